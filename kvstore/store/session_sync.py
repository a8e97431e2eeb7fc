"""Keeps session records where blocks are kept: on SSD at once, in the bucket once the blocks are there.

The bucket's copy is put with If-Match, so two daemons that continue one session at the same time are found out: the
later one's branch is kept under a new id.
"""

import logging
from collections.abc import Callable

import msgspec
import numpy as np

from kvstore import session_record as records
from kvstore.core.outcome import Outcome, TierKind
from kvstore.session_record import SessionKey, SessionRecord
from kvstore.store.borrowed import Borrowed
from kvstore.store.burials import Burials
from kvstore.store.catalog import Catalog
from kvstore.store.columns import tier_bit
from kvstore.store.demoter import Demoter
from kvstore.store.link import WorkerLink
from kvstore.store.second_look import SecondLook
from kvstore.store.session import Session, SessionTable
from kvstore.store.session_read import SessionReader
from kvstore.store.session_removal import SessionRemovals
from kvstore.worker import ops

_log = logging.getLogger(__name__)
_PUMP_EVERY_S = 0.02
_SESSIONS_PER_PUMP = 32
_RETRY_AFTER_S = 1.0
# Blocks of a turn that have not arrived from the engine after this long are not waited for any more.
_SETTLE_S = 30.0
_READ_DEADLINE_S = 30.0


class SessionSync:
    """Owned by the control thread; `demoter` is the one that copies blocks to the bucket."""

    def __init__(
        self,
        catalog: Catalog,
        table: SessionTable,
        links: dict[TierKind, WorkerLink],
        reader: SessionReader,
        removals: SessionRemovals,
        burials: Burials,
        borrowed: Borrowed,
        demoter: Demoter | None,
        on_fault: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._table = table
        self._links = links
        self._reader = reader
        self._removals = removals
        self._burials = burials
        self._demoter = demoter
        self._on_fault = on_fault
        self._clock = clock
        self._reading: set[SessionKey] = set()
        self._next_pump = 0.0
        self._not_before = dict.fromkeys(links, 0.0)
        self._settle_s = _SETTLE_S
        self._second_look: SecondLook | None = None
        if demoter is not None:
            self._second_look = SecondLook(catalog, table, links[TierKind.S3], borrowed, demoter, on_fault, clock)

    def pump(self, now: float) -> None:
        """Put what is newer here than on SSD or in the bucket; some sessions each time, in turn."""
        if now < self._next_pump:
            return
        self._next_pump = now + _PUMP_EVERY_S
        if self._second_look is not None:
            self._second_look.pump(now)
        dirty = self._table.dirty
        for _ in range(min(_SESSIONS_PER_PUMP, len(dirty))):
            key, _ = dirty.popitem(last=False)
            session = self._table.get(key)
            if session is not None and not (self._is_in(session, TierKind.SSD) and self._is_in(session, TierKind.S3)):
                dirty[key] = None
                self._put(session, now)

    def has_work(self) -> bool:
        """Whether a tier that answers still lacks a newest record."""
        waits = any(link.ready for link in self._links.values()) and bool(self._table.dirty)
        return waits or len(self._removals) > 0

    def drain(self) -> None:
        """No further blocks will arrive: what is missing is not waited for any more."""
        self._settle_s = 0.0

    def ended(self, session: Session) -> None:
        """The session has ended, and been taken out of the table."""
        if self._second_look is not None:
            self._second_look.ended(session.blocks, self._table.dirty)

    def change(self, record: SessionRecord, *, pinned: bool | None = None, ttl_s: float = 0.0) -> None:
        """Pin or unpin the session, or give it another time to live (0: leave it). No new turn, so the revision stays,
        but what is stored is out of date."""
        changed = msgspec.structs.replace(
            record,
            pinned=record.pinned if pinned is None else pinned,
            ttl_s=ttl_s or record.ttl_s,
            s3_revision=0,
        )
        session = self._table.get(record.session_key)
        if session is not None:
            changed = msgspec.structs.replace(changed, s3_etag=session.s3_etag, bucket_revision=session.bucket_revision)
        self._table.mark_dirty(self._table.adopt(changed, ssd_revision=0).key)

    # ------------------------------------------------------------ private

    def _is_in(self, session: Session, tier: TierKind) -> bool:
        stored = session.ssd_revision if tier == TierKind.SSD else session.s3_revision
        return tier not in self._links or stored == session.revision

    def _put(self, session: Session, now: float) -> None:
        record = self._table.cached(session.key)
        if record is None or record.revision != session.revision:
            self._read_again(session, now)
            return
        if self._may_put(session, TierKind.SSD, now):
            self._put_on_ssd(session, record)
        if self._may_put(session, TierKind.S3, now):
            self._upload(session, record)

    def _may_put(self, session: Session, tier: TierKind, now: float) -> bool:
        return (
            not self._is_in(session, tier)
            and self._links[tier].ready
            and now >= self._not_before[tier]
            and not session.is_putting[tier]
            and not self._removals.pending(tier, session.key)
        )

    def _read_again(self, session: Session, now: float) -> None:
        """The text left the memory before it was everywhere it should be: bring it back, once at a time."""
        if session.key in self._reading:
            return
        self._reading.add(session.key)

        self._reader.read(session, now, _READ_DEADLINE_S, lambda _: self._reading.discard(session.key))

    def _put_on_ssd(self, session: Session, record: SessionRecord) -> None:
        link = self._links[TierKind.SSD]
        session.is_putting[TierKind.SSD] = True

        def put(result: ops.Result) -> None:
            session.is_putting[TierKind.SSD] = False
            current = self._table.get(session.key)
            if result.outcome != Outcome.OK:
                self._failed(TierKind.SSD)
            elif current is session or (current is not None and record.revision < current.revision):
                current.ssd_revision = record.revision

        link.record(ops.RecordPut(link.next_op(), records.record_name(session.key), records.encode(record)), put)

    def _upload(self, session: Session, record: SessionRecord) -> None:
        """Have the blocks copied to the bucket, up to the first that nobody has, and once none of those is missing put
        the record."""
        assert self._demoter is not None
        residency = self._catalog.residency_of(session.blocks)
        is_missing = (residency & tier_bit(TierKind.S3)) == 0
        lost = np.flatnonzero(residency == 0)
        num_there = int(lost[0]) if len(lost) else len(session.blocks)
        elsewhere = session.blocks[:num_there][is_missing[:num_there]]
        for block in elsewhere.tolist():
            self._demoter.add(block)
        is_settled = self._table.age_s(session) >= self._settle_s or bool(residency.all())
        if len(elsewhere) or not is_settled:
            return
        gaps = np.flatnonzero(is_missing)
        s3_blocks = int(gaps[0]) if len(gaps) else len(session.blocks)
        self._put_in_bucket(session, msgspec.structs.replace(record, s3_blocks=s3_blocks))

    def _put_in_bucket(self, session: Session, record: SessionRecord) -> None:
        link = self._links[TierKind.S3]
        session.is_putting[TierKind.S3] = True
        bare = msgspec.structs.replace(record, s3_revision=0, s3_etag="", bucket_revision=0)

        def put(result: ops.Result) -> None:
            session.is_putting[TierKind.S3] = False
            current = self._table.get(session.key)
            if result.outcome == Outcome.OK:
                if current is not None:
                    self._uploaded(current, session, record, result.etag)
            elif result.outcome == Outcome.EXISTS:
                if current is not None:
                    self._look_at_conflict(current, record)
            else:
                self._failed(TierKind.S3)

        op = ops.RecordPut(
            link.next_op(),
            records.record_name(session.key),
            records.encode(bare),
            if_match=session.s3_etag or None,
            if_absent=not session.s3_etag,
        )
        link.record(op, put)

    def _uploaded(self, current: Session, session: Session, record: SessionRecord, etag: str) -> None:
        current.s3_etag = etag
        current.checked_at = self._clock()
        if record.revision == current.revision:
            current.bucket_revision = record.revision
        if self._second_look is not None:
            self._second_look.recorded(session)
        if current is not session and record.revision >= current.revision:
            return  # pinned or unpinned meanwhile
        current.s3_revision = record.revision
        # Note in the local record what the bucket has, so that it is known after a restart.
        newest = self._table.cached(current.key)
        if newest is None or newest.revision != current.revision:
            return
        noted = msgspec.structs.replace(
            newest,
            s3_blocks=record.s3_blocks,
            s3_revision=current.s3_revision,
            s3_etag=etag,
            bucket_revision=current.bucket_revision,
        )
        self._table.remember(noted)
        link = self._links.get(TierKind.SSD)
        if link is not None and current.ssd_revision == current.revision:
            op = ops.RecordPut(link.next_op(), records.record_name(current.key), records.encode(noted))
            link.record(op, lambda result: None if result.outcome == Outcome.OK else self._failed(TierKind.SSD))

    def _look_at_conflict(self, session: Session, record: SessionRecord) -> None:
        link = self._links[TierKind.S3]
        session.is_putting[TierKind.S3] = True

        def found(result: ops.Result) -> None:
            session.is_putting[TierKind.S3] = False
            current = self._table.get(session.key)
            if current is not None:
                self._settle_conflict(current, record, result)

        link.record(ops.RecordGet(link.next_op(), records.record_name(session.key)), found)

    def _settle_conflict(self, session: Session, record: SessionRecord, found: ops.Result) -> None:
        """The bucket's record is not the one we continued: either ours goes on from it, or ours becomes a fork."""
        if found.outcome == Outcome.MISS:
            if not session.s3_etag:
                # Something is there that is no record, or not whole any more, so it is in nobody's use.
                link = self._links[TierKind.S3]
                link.record(ops.RecordDelete(link.next_op(), records.record_name(session.key)), lambda _: None)
            session.s3_etag = ""
            return
        if found.outcome != Outcome.OK:
            self._failed(TierKind.S3)
            return
        theirs = records.decode(found.data)
        if theirs is None or record.continues(theirs) or self._burials.covers(theirs):
            session.s3_etag = found.etag  # the next pump replaces it
            return
        mine = self._table.cached(session.key)
        if mine is None or mine.revision != session.revision:
            return  # the next pump reads it again and comes back here
        self._on_fault("session_conflict")
        _log.warning("two turns of a session at once: this daemon's goes on as a fork")
        fork = msgspec.structs.replace(
            mine,
            id=self._table.fork_id(session.key),
            forked_from=mine.id,
            revision=1,
            s3_blocks=0,
            s3_revision=0,
            s3_etag="",
            bucket_revision=0,
        )
        self._table.mark_dirty(self._table.adopt(fork, ssd_revision=0).key)
        session.s3_revision = session.revision  # nothing of ours is left that theirs could overwrite
        self._reader.adopt_from_bucket(session.key, found)

    def _failed(self, tier: TierKind) -> None:
        self._on_fault(f"{tier.label}_session_put_failed")
        self._not_before[tier] = self._clock() + _RETRY_AFTER_S
