"""Finds out what the SSD tier lost, when its worker had to be started again under a running daemon.

Blocks that counted as durable may have gone with it: files were removed under it, or its index was damaged and began
anew. So the tier is asked again for all it holds, as at the start; what the catalog believed to be there and is not
told of has gone, and so has a session's record.
"""

from collections.abc import Callable

import numpy as np

from kvstore import session_record as records
from kvstore.core.index import Ids
from kvstore.core.outcome import TierKind
from kvstore.session_record import SessionKey
from kvstore.store.catalog import Catalog
from kvstore.store.session import SessionTable

# Blocks that one turn of the control loop gives up.
_AT_ONCE = 2048
_NONE: Ids = np.empty(0, dtype=np.int32)


class Review:
    """Owned by the control thread: `begin`, what the tier says, `end`, and then `pump` in every turn."""

    def __init__(
        self,
        catalog: Catalog,
        table: SessionTable,
        on_lost: Callable[[int], None],
        on_fault: Callable[[str, int], None],
        on_done: Callable[[], None],
    ) -> None:
        """`on_lost` is told of each block that has gone, `on_done` when all are."""
        self._catalog = catalog
        self._table = table
        self._on_lost = on_lost
        self._on_fault = on_fault
        self._on_done = on_done
        self.is_running = False
        self._believed = _NONE
        self._seen: list[Ids] = []
        self._revisions: dict[SessionKey, int] = {}
        self._gone = _NONE

    @property
    def is_busy(self) -> bool:
        return self._gone.size > 0

    def begin(self) -> None:
        """Take note of what the tier is believed to hold; a review that was under way begins anew."""
        self.is_running = True
        self._believed = np.array(self._catalog.blocks_resident(TierKind.SSD), dtype=np.int32)
        self._seen = []
        self._revisions = {session.key: session.ssd_revision for session in self._table if session.ssd_revision}
        self._gone = _NONE

    def saw(self, blocks: Ids | int) -> None:
        """The tier holds these, as it says now or since they were stored meanwhile."""
        if self.is_running:
            self._seen.append(np.atleast_1d(blocks))
        elif self.is_busy:
            self._gone = np.setdiff1d(self._gone, blocks)

    def saw_record(self, data: bytes) -> None:
        """Take note of a session's record, if it is the one that was put there."""
        record = records.decode(data)
        if record is not None and self._revisions.get(record.session_key, 0) <= record.revision:
            self._revisions.pop(record.session_key, None)

    def end(self) -> None:
        """All was told. Sessions without their record are put again; blocks go from now on, some at a time."""
        self.is_running = False
        for key, revision in self._revisions.items():
            session = self._table.get(key)
            if session is not None and session.ssd_revision == revision:
                session.ssd_revision = 0
                self._table.mark_dirty(key)
                self._on_fault("ssd_session_lost", 1)
        self._gone = np.setdiff1d(self._believed, np.concatenate([_NONE, *self._seen]))
        self._believed, self._seen, self._revisions = _NONE, [], {}
        if not self.is_busy:
            self._on_done()

    def pump(self) -> None:
        """Give up some more of what has gone."""
        if not self.is_busy:
            return
        now, self._gone = self._gone[:_AT_ONCE], self._gone[_AT_ONCE:]
        for block in now.tolist():
            if self._catalog.resident(block, TierKind.SSD):
                self._on_lost(block)
        if self._gone.size == 0:
            self._on_done()
