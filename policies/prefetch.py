"""When a session will come back: what its own pauses so far say.

A person who answers after half a minute tends to go on doing so, and a tool that runs for two seconds too. A session's
last pauses are remembered, the time from one turn's end to the next one's beginning, and the next is expected between
somewhat less than the shortest and somewhat more than the longest of them. Bounded, pure; the clock is the caller's.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

# A single pause says nothing about how they differ.
_MIN_GAPS: Final = 2
_GAPS: Final = 8
# How much before the shortest, and after the longest, a return is still expected.
_EARLIER: Final = 0.7
_LATER: Final = 1.5
_SLACK_S: Final = 2.0
# Sessions whose pauses differ by more cannot be predicted: blocks would wait in RAM for most of the time.
_MAX_SPREAD: Final = 20.0


@dataclass(frozen=True, slots=True)
class Return:
    """Seconds after the turn's end, from and to."""

    earliest_s: float
    latest_s: float


@dataclass(slots=True)
class _Pauses:
    ended_s: float
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_GAPS))


class Returns:
    """The pauses of at most `max_sessions` sessions; who has not been seen for longest is forgotten."""

    def __init__(self, max_sessions: int = 10_000) -> None:
        self._max_sessions = max_sessions
        self._pauses: OrderedDict[Hashable, _Pauses] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pauses)

    def began(self, session: Hashable, now_s: float) -> None:
        """The session's next turn has begun; more than once for one turn counts once."""
        pauses = self._pauses.get(session)
        if pauses is not None and pauses.ended_s >= 0.0:
            pauses.gaps_s.append(now_s - pauses.ended_s)
            pauses.ended_s = -1.0

    def ended(self, session: Hashable, now_s: float) -> Return | None:
        """A turn has ended; return when the next is expected, None where that cannot be said.

        Of a turn whose beginning was not seen, the pause is taken to last until now.
        """
        self.began(session, now_s)
        pauses = self._pauses.setdefault(session, _Pauses(now_s))
        pauses.ended_s = now_s
        self._pauses.move_to_end(session)
        if len(self._pauses) > self._max_sessions:
            self._pauses.popitem(last=False)
        return _predict(pauses.gaps_s)

    def forget(self, session: Hashable) -> None:
        self._pauses.pop(session, None)


def _predict(gaps_s: deque[float]) -> Return | None:
    if len(gaps_s) < _MIN_GAPS:
        return None
    earliest_s = max(0.0, _EARLIER * min(gaps_s) - _SLACK_S)
    latest_s = _LATER * max(gaps_s) + _SLACK_S
    if max(gaps_s) > _MAX_SPREAD * max(min(gaps_s), _SLACK_S):
        return None
    return Return(earliest_s, latest_s)
