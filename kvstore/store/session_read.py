"""Finds session records: in memory, on SSD, in the bucket, and there newer than here.

Before a session is used, the bucket is asked whether another daemon has a newer turn of it. Whoever asks is answered by
a deadline, whatever the tiers do; what comes later is still taken in.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvstore import session_record as records
from kvstore.core.outcome import Outcome, TierKind
from kvstore.session_record import SessionKey, SessionRecord
from kvstore.store.burials import Burials
from kvstore.store.catalog import Catalog
from kvstore.store.demoter import Demoter
from kvstore.store.link import WorkerLink
from kvstore.store.session import Session, SessionTable
from kvstore.store.session_removal import SessionRemovals
from kvstore.worker import ops

# How long the bucket may take to say whether another daemon has a newer turn of a session known here.
_CHECK_DEADLINE_S = 0.3
_CHECK_EVERY_S = 1.0

Got = Callable[[SessionRecord | Outcome], None]
"""Told once: the record, or MISS (there is no such session), or UNAVAILABLE (that cannot be said, or read, now)."""


@dataclass(slots=True)
class _Asked:
    """Somebody waits: until `check_until` for the bucket's word, until `deadline` for the record.

    `is_certain`: a session that is not known here is nowhere.
    """

    key: SessionKey
    got: Got
    deadline: float
    check_until: float | None = None
    is_open: bool = True
    is_certain: bool = True
    tried: set[TierKind] = field(default_factory=set)


class SessionReader:
    """Owned by the control thread; `demoter` is the one that copies blocks to the bucket."""

    def __init__(
        self,
        catalog: Catalog,
        table: SessionTable,
        links: dict[TierKind, WorkerLink],
        removals: SessionRemovals,
        burials: Burials,
        demoter: Demoter | None,
        on_fault: Callable[[str], None],
        on_lost: Callable[[Session], None],
    ) -> None:
        """`on_lost` is told of a session whose record is nowhere any more; it takes it out of the table."""
        self._catalog = catalog
        self._table = table
        self._links = links
        self._removals = removals
        self._burials = burials
        self._demoter = demoter
        self._on_fault = on_fault
        self._on_lost = on_lost
        self._asked: list[_Asked] = []

    def recover(self, data: bytes) -> Session | None:
        """Enter a record that was found on SSD; return the session, unless another one has its name by now."""
        record = records.decode(data)
        if record is None:
            self._on_fault("session_record_unreadable")
            return None
        present = self._table.get(record.session_key)
        if present is not None:
            # Told of already, by a worker that died then, or by the bucket, with whatever came after.
            is_told = record.revision in (record.s3_revision, present.ssd_revision)
            if (is_told and present.created_s == record.created_s) or self._burials.covers(record):
                return None
            # The disk came late, and the session was begun anew meanwhile: what was there before goes on as a fork.
            forked_id = self._table.fork_id(record.session_key)
            record = msgspec.structs.replace(
                record,
                id=forked_id,
                forked_from=record.id,
                s3_blocks=0,
                s3_revision=0,
                s3_etag="",
                bucket_revision=0,
            )
            self._on_fault("session_conflict")
            self._table.mark_dirty(self._table.adopt(record, ssd_revision=0).key)
            return None
        session = self._table.adopt(record, ssd_revision=record.revision)
        self._mark_in_bucket(session, record.s3_blocks)
        if TierKind.S3 in self._links and session.s3_revision < session.revision:
            self._table.mark_dirty(session.key)
            if self._demoter is not None:
                # Which of them had been uploaded before the restart is not known; asking is cheaper than sending.
                self._demoter.may_exist.update(session.blocks.tolist())
        return session

    def get(self, key: SessionKey, now: float, deadline_s: float, got: Got, *, may_be_old: bool = True) -> None:
        """Find the session's newest record here or in the bucket; `got` is told by the deadline.

        `may_be_old`: what the bucket said a moment ago is as good as what it says now.
        """
        session = self._table.get(key)
        is_ahead = session is not None and session.s3_revision < session.revision
        is_fresh = may_be_old and session is not None and now - session.checked_at < _CHECK_EVERY_S
        asked = _Asked(key, got, now + deadline_s)
        self._asked.append(asked)
        if TierKind.S3 not in self._links or is_ahead or is_fresh or self._removals.pending(TierKind.S3, key):
            self._read(asked)
            return
        asked.check_until = now + (deadline_s if session is None else min(deadline_s, _CHECK_DEADLINE_S))

        def answered(did_answer: bool) -> None:
            if asked.is_open and asked.check_until is not None:
                asked.check_until = None
                asked.is_certain = did_answer
                self._read(asked)

        self.check(key, now, answered)

    def read(self, session: Session, now: float, deadline_s: float, got: Got) -> None:
        """Give `got` the record of a session of the table, without asking whether there is a newer one elsewhere."""
        asked = _Asked(session.key, got, now + deadline_s)
        self._asked.append(asked)
        self._read(asked)

    def check(self, key: SessionKey, now: float, answered: Callable[[bool], None]) -> None:
        """Ask the bucket for the session and take over what is newer there; `answered` is told whether it answered."""
        bucket = self._links[TierKind.S3]

        def checked(result: ops.Result) -> None:
            did_answer = result.outcome in (Outcome.OK, Outcome.MISS)
            session = self._table.get(key)
            if not did_answer:
                self._on_fault("s3_session_check_failed")
            elif not self._removals.pending(TierKind.S3, key):
                if result.outcome == Outcome.OK and (session is None or result.etag != session.s3_etag):
                    self.adopt_from_bucket(key, result)
                session = self._table.get(key)
                if session is not None:
                    session.checked_at = now
            answered(did_answer)

        bucket.record(ops.RecordGet(bucket.next_op(), records.record_name(key)), checked)

    def adopt_from_bucket(self, key: SessionKey, found: ops.Result) -> bool:
        """Make the bucket's record the session's state; return whether that was done.

        Not where ours has turns that the bucket lacks: the next put settles that. Not where the session was deleted.
        """
        record = records.decode(found.data)
        if record is None or record.session_key != key:
            self._on_fault("session_record_unreadable")
            return False
        if self._burials.covers(record):
            return False
        session = self._table.get(key)
        revision = record.revision
        if session is not None:
            if session.s3_revision < session.revision:
                return False
            # Whoever began a turn from the state that was here must be found out, whatever number the other one has.
            revision = max(revision, session.revision + 1)
        record = msgspec.structs.replace(
            record, revision=revision, s3_revision=revision, s3_etag=found.etag, bucket_revision=record.revision
        )
        session = self._table.adopt(record, ssd_revision=0)
        self._mark_in_bucket(session, record.s3_blocks)
        for block in session.blocks[record.s3_blocks :].tolist():
            self._catalog.set_absent(block, TierKind.S3, "evicted")
        self._table.mark_dirty(session.key)
        return True

    def expire(self, now: float) -> None:
        """Whoever has waited for the bucket long enough goes on with what is known here; or, in the end, without."""
        for asked in [asked for asked in self._asked if self._due(asked) <= now]:
            if asked.check_until is not None:
                self._on_fault("s3_session_check_timed_out")
                asked.check_until = None
                asked.is_certain = False
                if asked.deadline > now:
                    self._read(asked)
                    continue
            self._close(asked, Outcome.UNAVAILABLE)

    def next_deadline(self) -> float | None:
        return min(map(self._due, self._asked), default=None)

    # ------------------------------------------------------------ private

    def _due(self, asked: _Asked) -> float:
        return asked.deadline if asked.check_until is None else min(asked.check_until, asked.deadline)

    def _read(self, asked: _Asked) -> None:
        session = self._table.get(asked.key)
        if session is None:
            self._close(asked, Outcome.MISS if asked.is_certain else Outcome.UNAVAILABLE)
            return
        cached = self._table.cached(session.key)
        if cached is not None and cached.revision == session.revision:
            self._close(asked, cached)
            return
        if session.revision not in (session.ssd_revision, session.s3_revision):
            self._on_fault("session_record_lost")
            self._close(asked, Outcome.MISS)
            self._on_lost(session)
            return
        tier = self._source(session, asked.tried)
        if tier is None:
            self._close(asked, Outcome.UNAVAILABLE)
            return
        asked.tried.add(tier)
        link = self._links[tier]
        op = ops.RecordGet(link.next_op(), records.record_name(session.key))
        link.record(op, lambda result: self._found(asked, session, tier, result))

    def _source(self, session: Session, tried: set[TierKind]) -> TierKind | None:
        durable = {TierKind.SSD: session.ssd_revision, TierKind.S3: session.s3_revision}
        for tier, revision in durable.items():
            if tier in self._links and tier not in tried and revision == session.revision:
                return tier
        return None

    def _found(self, asked: _Asked, session: Session, tier: TierKind, result: ops.Result) -> None:
        if self._table.get(session.key) is not session:
            asked.tried.clear()  # it has gone on, or gone away, meanwhile
        elif result.outcome in (Outcome.OK, Outcome.MISS):
            if tier == TierKind.SSD:
                self._found_on_ssd(session, records.decode(result.data))
            else:
                self._found_in_bucket(session, result)
        if asked.is_open:
            self._read(asked)

    def _found_on_ssd(self, session: Session, record: SessionRecord | None) -> None:
        if record is not None and record.session_key == session.key and record.revision == session.revision:
            self._table.remember(record)
        else:
            session.ssd_revision = 0

    def _found_in_bucket(self, session: Session, result: ops.Result) -> None:
        if result.etag != session.s3_etag and result.outcome == Outcome.OK:
            if not self.adopt_from_bucket(session.key, result):
                session.s3_revision = 0
            return
        record = records.decode(result.data)
        if record is not None and record.session_key == session.key:
            revision = session.revision
            session.bucket_revision = record.revision
            self._table.remember(
                msgspec.structs.replace(
                    record,
                    revision=revision,
                    s3_revision=revision,
                    s3_etag=result.etag,
                    bucket_revision=record.revision,
                )
            )
        else:
            session.s3_revision = 0

    def _close(self, asked: _Asked, found: SessionRecord | Outcome) -> None:
        if asked.is_open:
            asked.is_open = False
            self._asked.remove(asked)
            asked.got(found)

    def _mark_in_bucket(self, session: Session, s3_blocks: int) -> None:
        if TierKind.S3 in self._links:
            for block in session.blocks[:s3_blocks].tolist():
                self._catalog.set_resident(block, TierKind.S3)
