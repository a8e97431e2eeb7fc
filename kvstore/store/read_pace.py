"""How fast to ask a bucket for blocks: as many at once as fill the link, and no more.

Requests that share a slow link all end late, and at about the same time: eight blocks of 720 KiB over 12 MB/s come
together every half second. An engine that computes from the front while its tail lands would meet nothing in between,
what is under way when both ends meet was read for nobody, and whoever asks next stands behind it. So, as BBR does for
packets (Cardwell et al., BBR: Congestion-Based Congestion Control, 2016), requests go out at the rate at which the link
has delivered, and no more bytes are under way than rate times shortest answer, and one block.

    rate      = the most, over the last answers, of bytes delivered while a request was under way / its seconds
    shortest  = the least seconds of the last answers; a request that begins alone shows it

The rate may grow, since requests go out a little faster than that; where answers take much longer than both let expect,
both are learned anew. A bucket that limits each connection rather than all
has a long shortest answer, and so gets many requests at once. Where the whole window takes less than a tenth of a
second all of this is left out: there nothing is gained, and threads need work in front of them.

Not thread-safe; without a clock of its own.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

# Below this, what the whole window takes is not worth pacing.
_SHORT_S: Final = 0.1
# Requests go out by so much faster than the link has delivered.
_GAIN: Final = 1.25
_RATES: Final = 64
_ANSWERS: Final = 128
# What is older says nothing of the link any more.
_MAX_AGE_S: Final = 120.0
# Nor does anything once so many requests in turn took so much longer than it lets expect.
_LATE_IN_TURN: Final = 2
_LATE: Final = 3.0
_LATE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class _Sent:
    at_s: float
    num_bytes: int
    delivered_bytes: int
    late_after_s: float


class _Best:
    """The best of the last `most` samples that are not too old, by `is_better(new, old)`."""

    def __init__(self, most: int, is_better: Callable[[float, float], bool]) -> None:
        self._most = most
        self._is_better = is_better
        self._num_added = 0
        # Samples that are or may become the best: number, time, value; the best one first.
        self._samples: deque[tuple[int, float, float]] = deque()

    def add(self, value: float, now: float) -> None:
        while self._samples and not self._is_better(self._samples[-1][2], value):
            self._samples.pop()
        self._num_added += 1
        self._samples.append((self._num_added, now, value))
        while self._samples[0][0] <= self._num_added - self._most:
            self._samples.popleft()

    def clear(self) -> None:
        self._samples.clear()

    def get(self, now: float) -> float | None:
        while self._samples and self._samples[0][1] < now - _MAX_AGE_S:
            self._samples.popleft()
        return self._samples[0][2] if self._samples else None


class ReadPace:
    """`most` requests at once, at any rate. Ask `may_send`, tell `sent` and `settled`; `now` never goes back."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._out: dict[int, _Sent] = {}
        self._out_bytes = 0
        self._delivered_bytes = 0
        self._rates = _Best(_RATES, lambda new, old: new > old)
        self._answers_s = _Best(_ANSWERS, lambda new, old: new < old)
        self._next_at_s = 0.0
        self._late_in_turn = 0

    def may_send(self, num_bytes: int, now: float) -> bool:
        """Whether a request for so many bytes may go out now; if not, at the latest `next_at_s`, or after an answer."""
        if not self._out:
            return True
        if len(self._out) >= self._most:
            return False
        rate = self._rate(num_bytes, now)
        shortest_s = self._answers_s.get(now)
        if rate is None or shortest_s is None:
            return True
        has_room = len(self._out) < 2 or self._out_bytes <= rate * shortest_s
        return has_room and now >= self._next_at_s

    def sent(self, op: int, num_bytes: int, now: float) -> None:
        """A request with that number goes out."""
        self._out_bytes += num_bytes
        rate = self._rates.get(now)
        shortest_s = self._answers_s.get(now)
        late_after_s = math.inf
        if rate is not None and shortest_s is not None:
            late_after_s = _LATE * (shortest_s + self._out_bytes / rate) + _LATE_S
        self._out[op] = _Sent(now, num_bytes, self._delivered_bytes, late_after_s)
        rate = self._rate(num_bytes, now)
        self._next_at_s = now if rate is None else now + num_bytes / (rate * _GAIN)

    def settled(self, op: int, is_whole: bool, now: float) -> None:
        """It was answered; `is_whole`: with all of its bytes."""
        sent = self._out.pop(op)
        self._out_bytes -= sent.num_bytes
        seconds = now - sent.at_s
        if not is_whole or seconds <= 0:
            return
        self._late_in_turn = self._late_in_turn + 1 if seconds > sent.late_after_s else 0
        if self._late_in_turn >= _LATE_IN_TURN:
            # Another link than it was.
            self._late_in_turn = 0
            self._rates.clear()
            self._answers_s.clear()
        self._delivered_bytes += sent.num_bytes
        self._rates.add((self._delivered_bytes - sent.delivered_bytes) / seconds, now)
        self._answers_s.add(seconds, now)

    def clear(self) -> None:
        """Nothing is under way any more; what was learned stays."""
        self._out.clear()
        self._out_bytes = 0

    @property
    def next_at_s(self) -> float:
        """When the rate lets the next request go out."""
        return self._next_at_s

    def _rate(self, num_bytes: int, now: float) -> float | None:
        """Return the bytes per second to keep to; None where there is no need to."""
        rate = self._rates.get(now)
        return None if rate is None or self._most * num_bytes <= _SHORT_S * rate else rate
