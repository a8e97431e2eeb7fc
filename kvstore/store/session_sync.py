"""Keeps session records where blocks are kept: on SSD at once, in the bucket once the blocks are there.

The bucket's copy is put with If-Match, so two daemons that continue one session at the same time are found out: the
later one's branch is kept under a new id. Before a session is used here, the bucket is asked whether another daemon has
a newer turn, within a short deadline.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from kvstore.core.outcome import Outcome, TierKind
from kvstore.store import ops
from kvstore.store import record as records
from kvstore.store.catalog import Catalog, tier_bit
from kvstore.store.demoter import Demoter
from kvstore.store.link import WorkerLink
from kvstore.store.record import SessionKey, SessionRecord
from kvstore.store.session import Session, SessionTable

_log = logging.getLogger(__name__)
_PUMP_EVERY_S = 0.02
_RETRY_AFTER_S = 1.0
# How long the bucket may take to say whether another daemon has a newer turn of a session known here.
_CHECK_DEADLINE_S = 0.3
_CHECK_EVERY_S = 1.0
# Blocks of a turn that have not arrived from the engine after this long are not waited for any more.
_SETTLE_S = 30.0

Got = Callable[[SessionRecord | None], None]


@dataclass(slots=True)
class _Asked:
    """Somebody waits for the bucket's answer, or for the deadline."""

    key: SessionKey
    got: Got
    deadline: float
    is_open: bool = True


class SessionSync:
    """Owned by the control thread; `demoter` is the one that copies blocks to the bucket."""

    def __init__(
        self,
        catalog: Catalog,
        table: SessionTable,
        links: dict[TierKind, WorkerLink],
        demoter: Demoter | None,
        on_fault: Callable[[str], None],
    ) -> None:
        self._catalog = catalog
        self._table = table
        self._links = links
        self._demoter = demoter
        self._on_fault = on_fault
        self._asked: list[_Asked] = []
        self._reading: set[SessionKey] = set()
        self._not_before = 0.0

    # ------------------------------------------------------------ reading

    def recover(self, data: bytes) -> None:
        """Enter a record that was found on SSD at the start."""
        record = records.decode(data)
        if record is None:
            self._on_fault("session_record_unreadable")
            return
        session = self._table.adopt(record, ssd_revision=record.revision)
        self._mark_in_bucket(session, record.s3_blocks)
        if TierKind.S3 in self._links and session.s3_revision < session.revision:
            self._table.dirty.add(session.key)
            if self._demoter is not None:
                # Which of them had been uploaded before the restart is not known; asking is cheaper than sending.
                self._demoter.may_exist.update(session.blocks.tolist())

    def get(self, key: SessionKey, now: float, deadline_s: float, got: Got) -> None:
        """Find the session's newest record here or in the bucket; `got` is told once, None: there is none."""
        session = self._table.get(key)
        bucket = self._links.get(TierKind.S3)
        is_ahead = session is not None and session.s3_revision < session.revision
        is_fresh = session is not None and now - session.checked_at < _CHECK_EVERY_S
        if bucket is None or not bucket.ready or is_ahead or is_fresh:
            self._read(session, got)
            return
        wait_s = deadline_s if session is None else min(deadline_s, _CHECK_DEADLINE_S)
        asked = _Asked(key, got, now + wait_s)
        self._asked.append(asked)
        op = ops.RecordGet(bucket.next_op(), records.record_name(key))
        bucket.record(op, lambda result: self._bucket_answered(asked, result, now))

    def read(self, session: Session, got: Got) -> None:
        """Give `got` the record of a session of the table, without asking whether there is a newer one elsewhere."""
        self._read(session, got)

    def expire(self, now: float) -> None:
        """Whoever has waited for the bucket long enough goes on with what is known here."""
        for asked in [asked for asked in self._asked if asked.deadline <= now]:
            self._on_fault("s3_session_check_timed_out")
            self._close(asked)
            self._read(self._table.get(asked.key), asked.got)

    def next_deadline(self) -> float | None:
        return min((asked.deadline for asked in self._asked), default=None)

    # ------------------------------------------------------------ writing

    def pump(self, now: float) -> None:
        """Put what is newer here than on SSD or in the bucket."""
        if now < self._not_before:
            return
        self._not_before = now + _PUMP_EVERY_S
        for key in list(self._table.dirty):
            session = self._table.get(key)
            if session is None or (self._is_on_ssd(session) and self._is_in_bucket(session)):
                self._table.dirty.discard(key)
                continue
            record = self._table.cached(key)
            if record is None or record.revision != session.revision:
                self._read_again(session)
                continue
            if not self._is_on_ssd(session):
                self._put_on_ssd(session, record)
            if not self._is_in_bucket(session) and not session.is_putting[TierKind.S3]:
                self._upload(session, record, now)

    def has_work(self) -> bool:
        """Whether a tier that answers still lacks a newest record."""
        return any(link.ready for link in self._links.values()) and bool(self._table.dirty)

    def set_pinned(self, record: SessionRecord, pinned: bool) -> None:
        """Pin or unpin the session. No new turn, so the revision stays, but what is stored is out of date."""
        changed = msgspec.structs.replace(record, pinned=pinned, s3_revision=0)
        self._table.dirty.add(self._table.adopt(changed, ssd_revision=0).key)

    def delete(self, session: Session) -> None:
        """Delete the record in every tier."""
        for tier in (TierKind.SSD, TierKind.S3):
            link = self._links.get(tier)
            if link is None:
                continue
            op = ops.RecordDelete(link.next_op(), records.record_name(session.key))
            link.record(op, lambda result: self._count_failure("session_delete_failed", result))

    # ------------------------------------------------------------ private: reading

    def _read(self, session: Session | None, got: Got) -> None:
        if session is None:
            got(None)
            return
        cached = self._table.cached(session.key)
        if cached is not None and cached.revision == session.revision:
            got(cached)
            return
        tier = TierKind.SSD if session.ssd_revision == session.revision else TierKind.S3
        link = self._links.get(tier)
        if link is None:
            got(None)
            return

        def answered(result: ops.Result) -> None:
            record = records.decode(result.data) if result.outcome == Outcome.OK else None
            if record is None or record.session_key != session.key:
                self._on_fault("session_record_lost")
                got(None)
                return
            self._table.remember(record)
            got(record)

        link.record(ops.RecordGet(link.next_op(), records.record_name(session.key)), answered)

    def _read_again(self, session: Session) -> None:
        """The text left the memory before it was everywhere it should be: bring it back, once at a time."""
        if session.key in self._reading:
            return
        self._reading.add(session.key)

        def got(record: SessionRecord | None) -> None:
            self._reading.discard(session.key)
            if record is None:
                self._table.dirty.discard(session.key)

        self._read(session, got)

    def _bucket_answered(self, asked: _Asked, result: ops.Result, now: float) -> None:
        session = self._table.get(asked.key)
        if session is not None and result.outcome in (Outcome.OK, Outcome.MISS):
            session.checked_at = now
        if result.outcome == Outcome.OK and (session is None or result.etag != session.s3_etag):
            self._adopt_from_bucket(asked.key, result)
        elif result.outcome not in (Outcome.OK, Outcome.MISS):
            self._on_fault("s3_session_check_failed")
        if asked.is_open:
            self._close(asked)
            self._read(self._table.get(asked.key), asked.got)

    def _adopt_from_bucket(self, key: SessionKey, result: ops.Result) -> None:
        record = records.decode(result.data)
        if record is None or record.session_key != key:
            self._on_fault("session_record_unreadable")
            return
        session = self._table.get(key)
        if session is not None and session.revision > max(record.revision, session.s3_revision):
            return  # ours is ahead: the next put settles it
        record = msgspec.structs.replace(record, s3_revision=record.revision, s3_etag=result.etag)
        session = self._table.adopt(record, ssd_revision=0)
        self._mark_in_bucket(session, record.s3_blocks)
        self._table.dirty.add(session.key)

    def _mark_in_bucket(self, session: Session, s3_blocks: int) -> None:
        if TierKind.S3 in self._links:
            for block in session.blocks[:s3_blocks].tolist():
                self._catalog.set_resident(block, TierKind.S3)

    def _close(self, asked: _Asked) -> None:
        asked.is_open = False
        self._asked.remove(asked)

    # ------------------------------------------------------------ private: writing

    def _is_on_ssd(self, session: Session) -> bool:
        return TierKind.SSD not in self._links or session.ssd_revision == session.revision

    def _is_in_bucket(self, session: Session) -> bool:
        return TierKind.S3 not in self._links or session.s3_revision == session.revision

    def _put_on_ssd(self, session: Session, record: SessionRecord) -> None:
        link = self._links[TierKind.SSD]
        if session.is_putting[TierKind.SSD] or not link.ready:
            return
        session.is_putting[TierKind.SSD] = True

        def put(result: ops.Result) -> None:
            session.is_putting[TierKind.SSD] = False
            current = self._table.get(session.key)
            if result.outcome == Outcome.OK and current is not None:
                current.ssd_revision = record.revision
            self._count_failure("ssd_session_put_failed", result)

        link.record(ops.RecordPut(link.next_op(), records.record_name(session.key), records.encode(record)), put)

    def _upload(self, session: Session, record: SessionRecord, now: float) -> None:
        link = self._links[TierKind.S3]
        assert self._demoter is not None
        if not link.ready:
            return
        residency = self._catalog.residency_of(session.blocks)
        waits = False
        for block in session.blocks[(residency & tier_bit(TierKind.S3)) == 0].tolist():
            if self._catalog.residency(block):
                self._demoter.add(block)
                waits = True
            else:
                waits = waits or self._table.age_s(session) < _SETTLE_S
        if waits:
            return
        gaps = np.flatnonzero((residency & tier_bit(TierKind.S3)) == 0)
        s3_blocks = int(gaps[0]) if len(gaps) else len(session.blocks)
        self._put_in_bucket(session, msgspec.structs.replace(record, s3_blocks=s3_blocks), now)

    def _put_in_bucket(self, session: Session, record: SessionRecord, now: float) -> None:
        link = self._links[TierKind.S3]
        session.is_putting[TierKind.S3] = True
        bare = msgspec.structs.replace(record, s3_revision=0, s3_etag="")

        def put(result: ops.Result) -> None:
            current = self._table.get(session.key)
            if current is None:
                return
            if result.outcome == Outcome.OK:
                current.is_putting[TierKind.S3] = False
                current.s3_revision, current.s3_etag = record.revision, result.etag
                current.checked_at = now
                self._remember_upload(current, record)
            elif result.outcome == Outcome.EXISTS:
                op = ops.RecordGet(link.next_op(), records.record_name(session.key))
                link.record(op, lambda found: self._settle_conflict(current, record, found))
            else:
                current.is_putting[TierKind.S3] = False
                self._not_before = now + _RETRY_AFTER_S
                self._count_failure("s3_session_put_failed", result)

        op = ops.RecordPut(
            link.next_op(),
            records.record_name(session.key),
            records.encode(bare),
            if_match=session.s3_etag or None,
            if_absent=not session.s3_etag,
        )
        link.record(op, put)

    def _remember_upload(self, session: Session, record: SessionRecord) -> None:
        """Note in the local record what the bucket has, so that it is known after a restart."""
        newest = self._table.cached(session.key)
        if newest is None or newest.revision != session.revision:
            return
        noted = msgspec.structs.replace(
            newest, s3_blocks=record.s3_blocks, s3_revision=session.s3_revision, s3_etag=session.s3_etag
        )
        self._table.remember(noted)
        link = self._links.get(TierKind.SSD)
        if link is not None:
            op = ops.RecordPut(link.next_op(), records.record_name(session.key), records.encode(noted))
            link.record(op, lambda result: self._count_failure("ssd_session_put_failed", result))

    def _settle_conflict(self, session: Session, record: SessionRecord, found: ops.Result) -> None:
        """The bucket's record is not the one we continued: either ours goes on from it, or ours becomes a fork."""
        session.is_putting[TierKind.S3] = False
        if found.outcome == Outcome.MISS:
            session.s3_etag = ""
            return
        theirs = records.decode(found.data) if found.outcome == Outcome.OK else None
        if found.outcome != Outcome.OK:
            self._count_failure("s3_session_put_failed", found)
            return
        if theirs is None or record.continues(theirs):
            session.s3_etag = found.etag  # the next pump replaces it
            return
        mine = self._table.cached(session.key)
        if mine is None:
            return
        self._on_fault("session_conflict")
        forked_id = self._table.fork_id(session.key)
        _log.warning("two turns of a session at once: this daemon's goes on as a fork")
        fork = msgspec.structs.replace(
            mine, id=forked_id, forked_from=mine.id, revision=1, s3_blocks=0, s3_revision=0, s3_etag=""
        )
        self._table.dirty.add(self._table.adopt(fork, ssd_revision=0).key)
        session.revision = 0  # so that theirs is newer, whatever its number
        session.s3_revision = 0
        self._adopt_from_bucket(session.key, found)

    def _count_failure(self, kind: str, result: ops.Result) -> None:
        if result.outcome not in (Outcome.OK, Outcome.MISS):
            self._on_fault(kind)
