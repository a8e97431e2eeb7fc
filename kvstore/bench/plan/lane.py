"""One direction of a link: bytes of all connections share its bandwidth and arrive after its delay.

    read ──► serialised at bytes_per_s, one after the other ──► on the way for delay_s ──► due

Pure: the clock is the caller's. Covers: when bytes may be read and when they are due. Does not cover: sockets.
"""

import heapq
from collections import deque
from typing import Final, Generic, TypeVar

_T = TypeVar("_T")

# What may be read ahead of the line, and what it may catch up after a pause of the process.
_SLACK_S: Final = 0.004
# At a time of one connection, so that connections share fairly.
_PIECE_S: Final = 0.002
_MIN_PIECE_BYTES, _MAX_PIECE_BYTES = 2 << 10, 256 << 10


class Lane(Generic[_T]):
    """Pieces on their way. `bytes_per_s` 0: as fast as it goes."""

    def __init__(self, bytes_per_s: float = 0.0, delay_s: float = 0.0) -> None:
        self._bytes_per_s = bytes_per_s
        self._delay_s = delay_s
        # When the line has sent all that was read.
        self._free_s = 0.0
        self._on_the_way: list[tuple[float, int, _T]] = []
        self._num_taken = 0

    def change(self, now: float, bytes_per_s: float, delay_s: float) -> None:
        """From now on; what is on the way is due after the new delay at the latest."""
        self._bytes_per_s, self._delay_s = bytes_per_s, delay_s
        self._free_s = min(self._free_s, now)
        # The order stays: each is due no earlier than the one before it was.
        self._on_the_way = [(min(due_s, now + delay_s), number, item) for due_s, number, item in self._on_the_way]
        heapq.heapify(self._on_the_way)

    @property
    def piece_bytes(self) -> int:
        """How much to read at a time."""
        if not self._bytes_per_s:
            return _MAX_PIECE_BYTES
        return int(min(_MAX_PIECE_BYTES, max(_MIN_PIECE_BYTES, self._bytes_per_s * _PIECE_S)))

    def free_at_s(self) -> float:
        """Return when more may be read."""
        return self._free_s - _SLACK_S if self._bytes_per_s else 0.0

    def take(self, now: float, num_bytes: int, item: _T, not_before_s: float = 0.0) -> float:
        """Send `num_bytes`, which were read now, on their way; return when they are due, at `not_before_s` at the
        soonest. `item` is what `arrived` gives back."""
        if self._bytes_per_s:
            self._free_s = max(self._free_s, now - _SLACK_S) + num_bytes / self._bytes_per_s
        due_s = max(self._free_s if self._bytes_per_s else now, now) + self._delay_s
        due_s = max(due_s, not_before_s)
        heapq.heappush(self._on_the_way, (due_s, self._num_taken, item))
        self._num_taken += 1
        return due_s

    def arrived(self, now: float) -> "deque[_T]":
        """Take out what is due."""
        items: deque[_T] = deque()
        while self._on_the_way and self._on_the_way[0][0] <= now:
            items.append(heapq.heappop(self._on_the_way)[2])
        return items

    def next_due_s(self) -> float | None:
        """Return when the next piece is due; None: nothing is on the way."""
        return self._on_the_way[0][0] if self._on_the_way else None
