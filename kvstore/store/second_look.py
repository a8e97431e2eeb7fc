"""Looks once more for blocks that the bucket had before we came, when the record is there that names them.

They are another session's until then, and nobody's if that one ends: the holder of the bucket's lease deletes what no
record names. It may have looked at the records a moment before ours came, so we look some time after that, for the
last of them, since they go from the end of a prefix to its head. Where it is gone they are all asked for, one by one,
and what is missing is uploaded.
"""

from collections.abc import Callable, Iterable
from typing import Final

from kvstore.core.index import Ids
from kvstore.core.outcome import Outcome, TierKind
from kvstore.session_record import SessionKey
from kvstore.store.borrowed import Borrowed
from kvstore.store.catalog import Catalog
from kvstore.store.demoter import Demoter
from kvstore.store.link import WorkerLink
from kvstore.store.session import Session, SessionTable
from kvstore.worker import ops

# Longer than it takes from the last look at the records to the deletion.
LOOK_AFTER_S: Final = 15.0
# Whoever waits for a block goes first.
_MAX_OUT = 2


class SecondLook:
    """Owned by the control thread; `demoter` is the one that copies blocks to the bucket."""

    def __init__(
        self,
        catalog: Catalog,
        table: SessionTable,
        link: WorkerLink,
        borrowed: Borrowed,
        demoter: Demoter,
        on_fault: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._table = table
        self._link = link
        self._borrowed = borrowed
        self._demoter = demoter
        self._on_fault = on_fault
        self._clock = clock
        # The next one first, since all wait equally long.
        self._due: dict[SessionKey, float] = {}
        self._num_out = 0

    def recorded(self, session: Session) -> None:
        """The session's record is in the bucket."""
        if self._borrowed.among(session.blocks.tolist()):
            self._wait(session.key, self._clock())

    def ended(self, blocks: Ids, unrecorded: Iterable[SessionKey]) -> None:
        """A session of these blocks has ended; those that share its beginning and may have no record that names them
        have borrowed it."""
        for key in unrecorded if len(blocks) else ():
            session = self._table.get(key)
            if session is not None and len(session.blocks) and session.blocks[0] == blocks[0]:
                shared = min(len(blocks), len(session.blocks))
                for block in session.blocks[:shared][session.blocks[:shared] == blocks[:shared]].tolist():
                    if self._catalog.resident(block, TierKind.S3):
                        self._borrowed.add(block)

    def pump(self, now: float) -> None:
        while self._due and self._num_out < _MAX_OUT and self._link.ready:
            key = next(iter(self._due))
            if self._due[key] > now:
                return
            del self._due[key]
            session = self._table.get(key)
            blocks = [] if session is None else self._borrowed.among(session.blocks.tolist())
            if session is not None and blocks:
                self._look(session, blocks)

    def _wait(self, key: SessionKey, now: float) -> None:
        self._due.pop(key, None)
        self._due[key] = now + LOOK_AFTER_S

    def _look(self, session: Session, blocks: list[int]) -> None:
        last = self._catalog.key(blocks[-1])

        def answered(result: ops.Result) -> None:
            self._num_out -= 1
            if self._table.get(session.key) is not session or result.outcome != Outcome.OK:
                self._wait(session.key, self._clock())
                return
            self._borrowed.settle(blocks)
            if not result.count:
                self._upload_again(session, blocks)

        self._num_out += 1
        self._link.record(ops.Discover(self._link.next_op(), last), answered)

    def _upload_again(self, session: Session, blocks: list[int]) -> None:
        self._on_fault("s3_shared_blocks_lost")
        for block in blocks:
            self._catalog.set_absent(block, TierKind.S3, "lost")
        self._demoter.may_exist.update(blocks)
        if self._table.cached(session.key) is not None or session.ssd_revision == session.revision:
            session.s3_revision = 0  # the text is at hand, so the record can be put anew
            self._table.mark_dirty(session.key)
