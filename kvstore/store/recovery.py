"""Learns what the SSD tier holds, whenever its worker was started: blocks, and session records.

At the first start that is all that is known of the time before; after a later one it is compared with what was believed
(`review.py`).
"""

from collections.abc import Callable

import numpy as np

from kvstore.core.outcome import Outcome, TierKind
from kvstore.store.catalog import Catalog
from kvstore.store.chains import by_prefix
from kvstore.store.link import WorkerLink
from kvstore.store.review import Review
from kvstore.store.room import Room
from kvstore.store.session import SessionTable
from kvstore.store.session_requests import SessionRequests
from kvstore.store.writing import Writing
from kvstore.worker import ops

# Sessions, and the tombstones of those whose deletion the bucket has not been told of.
_ALL_RECORDS = ""


class Recovery:
    """Owned by the control thread. `link` is the SSD tier's; where there is none, all is known from the start."""

    def __init__(
        self,
        link: WorkerLink | None,
        catalog: Catalog,
        table: SessionTable,
        sessions: SessionRequests,
        room: Room,
        writing: Writing,
        on_lost: Callable[[int], None],
        on_fault: Callable[[str, int], None],
        *,
        ssd_policy: str,
    ) -> None:
        """`on_lost` is told of each block that the tier has lost, `on_fault` of what is odd, and how often."""
        self._link = link
        self._catalog = catalog
        self._table = table
        self._sessions = sessions
        self._room = room
        self._writing = writing
        self._on_fault = on_fault
        self._ssd_policy = ssd_policy
        self._was_ready = False
        self.is_done = link is None
        """Whether all that the tier held at the first start is known."""
        self.review = Review(
            catalog, table, on_lost, on_fault, lambda: writing.write_down(catalog.blocks_only_in_ram())
        )

    def look(self) -> None:
        """Ask the tier for all it holds if it has been opened since the last look, and copy what it missed."""
        link = self._link
        if link is None:
            return
        if link.ready and not self._was_ready:
            if self.is_done:
                self.review.begin()
            link.record(ops.Recover(link.next_op(), _ALL_RECORDS), self._ended)
            self._writing.write_down(self._catalog.blocks_only_in_ram())
        self._was_ready = link.ready

    def take_in(self, reply: ops.Recovered) -> None:
        """Enter blocks and session records that the tier says it holds."""
        if reply.blocks is not None:
            self._take_in_blocks(reply.blocks)
        for data in reply.records:
            if self.review.is_running:
                self.review.saw_record(data)
            else:
                self._sessions.recover(data)

    # ------------------------------------------------------------ private

    def _take_in_blocks(self, packed: ops.PackedBatch) -> None:
        batch = packed.unpack()
        found = self._catalog.ensure_many(batch)[np.argsort(batch.depths, kind="stable")]
        self._on_fault("ssd_recovered_inconsistent", int((found < 0).sum()))
        found = found[found >= 0]
        blocks = found[np.sort(np.unique(found, return_index=True)[1])]
        if self._room.deleting[TierKind.SSD]:
            blocks = blocks[~np.isin(blocks, list(self._room.deleting[TierKind.SSD]))]
        self.review.saw(blocks)
        inserted = self._catalog.set_resident_many(blocks, TierKind.SSD)
        if self._ssd_policy != "lru":
            # Depth by depth, as they are, is all the same to lru, and what others are slowest at.
            inserted = by_prefix(inserted, self._catalog.parents_of(inserted))
        self._room.entered(TierKind.SSD, inserted)
        if self._catalog.watcher is not None and self.is_done:
            for block in inserted.tolist():
                self._catalog.watcher.entered(block, TierKind.SSD)

    def _ended(self, result: ops.Result) -> None:
        if result.outcome != Outcome.OK:
            return  # the worker died; the next one is asked again
        if self.review.is_running:
            self.review.end()
            return
        self.is_done = True
        # Nothing is known of when a block was used last, but when its session was is.
        for session in sorted(self._table, key=lambda session: session.last_turn_s):
            self._room.policies[TierKind.SSD].on_access(session.blocks.tolist())
