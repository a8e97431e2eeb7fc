"""The last batches that were published, and who is being sent them again.

    subscriber ── REQ or DEALER: ["", sequence from which on, 8 bytes] ──►
               ◄── ["", topic, sequence, payload] … then ["", "", -1, ""]

Covers: what is kept, within bytes and a number; a slow reader's place in it. Does not cover: sockets, but for one send.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

MAX_BATCHES: Final = 10_000
MAX_READERS: Final = 64
END: Final = (-1).to_bytes(8, "big", signed=True)
_SEQUENCE_BYTES: Final = 8
# Who takes nothing for so long has given up, or keeps a place from others.
_PATIENCE_S: Final = 30.0


@dataclass(slots=True)
class _Reader:
    """`next` is the sequence it gets next; `since_s` when it last took something."""

    next: int
    since_s: float


class Replay:
    """Not thread-safe. `send(reader, frames)` answers False where the reader takes no more now, and raises
    ConnectionError where it is gone."""

    def __init__(
        self,
        max_bytes: int,
        topic: bytes,
        send: Callable[[bytes, list[bytes]], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._topic = topic
        self._send = send
        self._batches: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        # The newest question of a reader counts.
        self._readers: dict[bytes, _Reader] = {}

    def keep(self, sequence: int, payload: bytes) -> None:
        """Remember the batch, and forget the oldest ones where that is too much."""
        self._batches.append((sequence, payload))
        self._num_bytes += len(payload)
        while len(self._batches) > 1 and (len(self._batches) > MAX_BATCHES or self._num_bytes > self._max_bytes):
            self._num_bytes -= len(self._batches.popleft()[1])

    def ask(self, frames: list[bytes]) -> None:
        """Take a question: [reader, b"", sequence]. What is none, and who is one too many, gets no answer."""
        if len(frames) != 3 or len(frames[2]) != _SEQUENCE_BYTES:
            return
        reader, _, sequence = frames
        if reader in self._readers or len(self._readers) < MAX_READERS:
            self._readers[reader] = _Reader(int.from_bytes(sequence, "big"), self._clock())

    @property
    def is_busy(self) -> bool:
        return bool(self._readers)

    def step(self, max_batches: int) -> bool:
        """Send each reader some of what it asked for; return whether anything could be sent."""
        has_sent = False
        for name, reader in list(self._readers.items()):
            try:
                num_sent, is_done = self._send_some(name, reader, max_batches)
            except ConnectionError:
                num_sent, is_done = 0, True
            now = self._clock()
            if num_sent:
                reader.since_s = now
                has_sent = True
            if is_done or now - reader.since_s > _PATIENCE_S:
                del self._readers[name]
        return has_sent

    def _send_some(self, name: bytes, reader: _Reader, max_batches: int) -> tuple[int, bool]:
        """Return how many messages were taken, and whether that was all."""
        num_sent = 0
        for sequence, payload in self._from(reader.next, max_batches):
            if not self._send(name, [b"", self._topic, sequence.to_bytes(8, "big"), payload]):
                return num_sent, False
            reader.next = sequence + 1
            num_sent += 1
        if self._batches and reader.next <= self._batches[-1][0]:
            return num_sent, False
        is_done = self._send(name, [b"", b"", END, b""])
        return num_sent + is_done, is_done

    def _from(self, sequence: int, max_batches: int) -> Iterator[tuple[int, bytes]]:
        """The batches from that one on; sequences go up but need not be without gaps."""
        low, high = 0, len(self._batches)
        while low < high:
            middle = (low + high) // 2
            if self._batches[middle][0] < sequence:
                low = middle + 1
            else:
                high = middle
        for index in range(low, min(low + max_batches, len(self._batches))):
            yield self._batches[index]
