"""How many sessions there are and what they survive, counted a few at a time.

Whether a session is durable is a question about each of its blocks. Counting ten thousand sessions of 32 blocks took
the control thread 130 ms one by one and 8 ms all together (best of nine on two cores with other load; medians 210 and
11), each time somebody asked for the statistics; one step takes 0.1 ms. So few are counted when asked for, of many the
last count is told, some seconds old.
"""

from collections import Counter
from typing import Final

from kvstore.session_record import SessionKey
from kvstore.store.session import Session, SessionTable

_AT_ONCE: Final = 256
_BLOCKS_AT_ONCE: Final = 65_536


class SessionCensus:
    """Owned by the control thread."""

    def __init__(self, table: SessionTable) -> None:
        self._table = table
        self._left: list[SessionKey] = []
        self._counted: Counter[str] = Counter()
        self._running: Counter[str] = Counter()

    def step(self) -> None:
        """Count some more; begin again after the last."""
        if not self._left:
            self._counted, self._running = self._running, Counter()
            self._left = [session.key for session in self._table]
        sessions: list[Session] = []
        num_blocks = 0
        while self._left and len(sessions) < _AT_ONCE and num_blocks < _BLOCKS_AT_ONCE:
            session = self._table.get(self._left.pop())
            if session is not None:
                sessions.append(session)
                num_blocks += len(session.blocks)
        self._count(sessions, self._running)

    def snapshot(self) -> dict[str, object]:
        """Return the part of docs/stats.md: `count` is exact, the others may be as of the last count."""
        counted = self._counted
        if len(self._table) <= _AT_ONCE:
            counted = Counter()
            self._count(list(self._table), counted)
        durable = {name: counted[name] for name in ("none", "ssd", "s3")}
        return {"count": len(self._table), "pinned": counted["pinned"], "durable": durable}

    def _count(self, sessions: list[Session], into: Counter[str]) -> None:
        into.update(self._table.durable_of(sessions))
        into["pinned"] += sum(session.pinned for session in sessions)
