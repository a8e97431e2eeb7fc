"""What clients ask about sessions, and what becomes of the blocks of sessions that end.

Covers: get, put, list, pin, delete, expiry. Does not cover: the table (session.py), finding records (session_read.py),
keeping them (session_sync.py).
"""

from collections.abc import Callable, Collection

from kvstore import wire
from kvstore.bucket import tombstone
from kvstore.core.errors import ProtocolError
from kvstore.core.key import KEY_BYTES
from kvstore.core.outcome import Outcome, TierKind
from kvstore.session_record import SessionKey, SessionRecord
from kvstore.store.borrowed import Borrowed
from kvstore.store.burials import Burials
from kvstore.store.catalog import Catalog
from kvstore.store.demoter import Demoter
from kvstore.store.fetch import Reply
from kvstore.store.keeping import Keeping, check_session_hint
from kvstore.store.link import WorkerLink
from kvstore.store.room import Room
from kvstore.store.session import Session, SessionTable
from kvstore.store.session_read import SessionReader
from kvstore.store.session_removal import SessionRemovals
from kvstore.store.session_sync import SessionSync
from kvstore.wire import ErrorCode

_PIN_DEADLINE_S = 5.0
_DELETE_DEADLINE_S = 2.0
_EXPIRED_AT_ONCE = 64
_EXPIRY_CHECK_EVERY_S = 60.0
_MAX_LISTED = 1000
"""So many views fit into one message, whatever their names."""


class SessionRequests:
    """Owned by the control thread."""

    def __init__(
        self,
        table: SessionTable,
        catalog: Catalog,
        links: dict[TierKind, WorkerLink],
        demoters: dict[TierKind, Demoter],
        room: Room,
        borrowed: Borrowed,
        on_fault: Callable[[str], None],
        clock: Callable[[], float],
        keeping: Keeping,
    ) -> None:
        self._keeping = keeping
        self._table = table
        self._catalog = catalog
        self._links = links
        self._demoters = demoters
        self._room = room
        self._clock = clock
        to_bucket = demoters.get(TierKind.S3)
        self._on_fault = on_fault
        self._burials = Burials()
        self._removals = SessionRemovals(links, on_fault, clock)
        self._reader = SessionReader(
            catalog, table, links, self._removals, self._burials, to_bucket, on_fault, self._forget
        )
        self._sync = SessionSync(
            catalog, table, links, self._reader, self._removals, self._burials, borrowed, to_bucket, on_fault, clock
        )
        # Blocks that are to be deleted everywhere but are in use; each is pinned once by us.
        self._doomed: set[int] = set()
        self._expiring: set[SessionKey] = set()

    # ------------------------------------------------------------ the control loop

    def turn(self, now: float) -> None:
        self._reader.expire(now)
        self._sync.pump(now)

    def housekeeping(self) -> None:
        self._removals.pump()
        self._delete_doomed()

    def expire(self, now: float) -> None:
        """End the sessions whose time is over, and those beyond the number that may be kept."""
        for session in self._table.excess():
            if self._table.durable(session) == "s3":
                self._forget(session)
            else:
                self._delete(session)
        for session in self._table.expired():
            if not session.s3_etag or TierKind.S3 not in self._links:
                self._delete(session)
            elif len(self._expiring) < _EXPIRED_AT_ONCE:
                self._expire_unless_newer(session, now)

    def next_deadline(self) -> float | None:
        return self._reader.next_deadline()

    @property
    def doomed(self) -> Collection[int]:
        """Blocks that are only waited for in order to be deleted."""
        return self._doomed

    @property
    def is_busy(self) -> bool:
        return bool(self._table.dirty)

    def has_work(self) -> bool:
        return self._sync.has_work()

    def drain(self) -> None:
        self._sync.drain()

    def recover(self, data: bytes) -> None:
        """Enter a record that was found on SSD, or go on with a deletion that a predecessor of ours began."""
        stone = tombstone.decode(data)
        if stone is None:
            session = self._reader.recover(data)
            if session is not None:
                # The bucket may have told of its deletion before the disk told of it.
                self._heed(session, self._burials.up_to(session.key, session.created_s), is_new=True)
        else:
            self._buried(data)
            self._removals.resume(stone)

    def buried(self, tombstones: Collection[bytes]) -> None:
        """The bucket has these tombstones: another daemon, or this one, has deleted the sessions."""
        for data in tombstones:
            self._buried(data)

    # ------------------------------------------------------------ requests

    def get(self, request: wire.SessionGet, reply: Reply) -> None:
        if not 0.0 < request.deadline_s <= 60.0:
            raise ProtocolError(ErrorCode.BAD_REQUEST, "deadline_s lies between 0 and 60 seconds")

        def got(found: SessionRecord | Outcome) -> None:
            session = None if isinstance(found, Outcome) else self._table.get(found.session_key)
            if isinstance(found, Outcome) or session is None:
                reply(_not_got(request.id, found))
            else:
                if request.namespace:
                    self._keeping.prefetch.began(session)
                reply(wire.SessionFound(self._table.view(session, found)))

        now = self._clock()
        if request.namespace:
            self._reader.get((request.tenant, request.namespace, request.id), now, request.deadline_s, got)
        else:
            self._reader.read(self._table.find(request.id, request.tenant, b""), now, request.deadline_s, got)

    def put(self, request: wire.SessionPut, namespace: int) -> wire.SessionSaved:
        """`namespace` is the catalog's id of the engine's. Raises ProtocolError."""
        info = self._catalog.namespaces[namespace]
        if request.namespace != info.digest:
            raise ProtocolError(ErrorCode.BAD_REQUEST, "an engine records sessions of its own namespace only")
        if len(request.keys) > wire.MAX_KEYS * KEY_BYTES:
            raise ProtocolError(ErrorCode.BAD_REQUEST, f"a session has at most {wire.MAX_KEYS} blocks")
        check_session_hint(request)
        base = self._table.base_of(request)
        if request.pin and (base is None or not base.pinned):
            self._keeping.check_pin(None if base is None else base.key, request.keys, namespace)
        session, forked = self._table.put(request, info)
        self._keeping.recorded(session, request)
        return wire.SessionSaved(session.key[2], session.revision, forked)

    def list(self, request: wire.SessionList) -> wire.Sessions:
        chosen = [s for s in self._table if request.tenant is None or s.key[0] == request.tenant]
        chosen.sort(key=lambda session: session.last_turn_s, reverse=True)
        listed = chosen[: max(0, min(request.limit, _MAX_LISTED))]
        return wire.Sessions(self._table.views(listed), len(chosen))

    def pin(self, request: wire.SessionPin, reply: Reply) -> None:
        session = self._table.find(request.id, request.tenant, request.namespace)

        def got(found: SessionRecord | Outcome) -> None:
            if isinstance(found, Outcome):
                reply(_not_got(request.id, found))
                return
            current = self._table.get(found.session_key)
            if request.pinned and current is not None and not current.pinned:
                try:
                    self._table.check_may_pin(current.key[1])
                    self._keeping.check_pin(current.key, found.keys, self._namespace_of(found))
                except ProtocolError as error:
                    reply(wire.Error(error.code, str(error)))
                    return
            self._sync.change(found, pinned=request.pinned)
            reply(wire.Done())

        self._reader.read(session, self._clock(), _PIN_DEADLINE_S, got)

    def prefetch(self, request: wire.SessionPrefetch, reply: Reply) -> None:
        """Begin to bring the session's blocks into RAM; where the namespace is named, a session of the bucket too."""

        def got(found: SessionRecord | Outcome) -> None:
            session = None if isinstance(found, Outcome) else self._table.get(found.session_key)
            if session is None:
                reply(_not_got(request.id, found))
            else:
                reply(wire.Prefetching(self._keeping.prefetch.asked(session), len(session.blocks)))

        if request.namespace:
            key = (request.tenant, request.namespace, request.id)
            self._reader.get(key, self._clock(), _PIN_DEADLINE_S, got)
        else:
            session = self._table.find(request.id, request.tenant, b"")
            reply(wire.Prefetching(self._keeping.prefetch.asked(session), len(session.blocks)))

    def hint(self, request: wire.SessionHint, reply: Reply) -> None:
        check_session_hint(request)
        session = self._table.find(request.id, request.tenant, request.namespace)
        self._keeping.session_hint(session, request)
        if not request.ttl_s:
            reply(wire.Done())
            return

        def got(found: SessionRecord | Outcome) -> None:
            if isinstance(found, Outcome):
                reply(_not_got(request.id, found))
                return
            self._sync.change(found, ttl_s=request.ttl_s)
            reply(wire.Done())

        self._reader.read(session, self._clock(), _PIN_DEADLINE_S, got)

    def delete(self, request: wire.SessionDelete, reply: Reply) -> None:
        """Delete the session as it is now, wherever its last turn was made. Answered once no restart of this daemon can
        bring it back."""
        key = (request.tenant, request.namespace, request.id)
        if not request.namespace or TierKind.S3 not in self._links:
            key = self._table.find(request.id, request.tenant, request.namespace).key

        def got(found: SessionRecord | Outcome) -> None:
            session = self._table.get(key)
            if session is None:
                reply(_not_got(request.id, found))
                return
            num_blocks = len(session.blocks)
            self._delete(session, lambda deleted: reply(wire.SessionDeleted(deleted, num_blocks - deleted)))

        if TierKind.S3 in self._links:
            # What is known here may be older than what the bucket has, and a deletion names what it covers.
            self._reader.get(key, self._clock(), _DELETE_DEADLINE_S, got, may_be_old=False)
        else:
            got(Outcome.OK)

    # ------------------------------------------------------------ private

    def _namespace_of(self, record: SessionRecord) -> int:
        return self._catalog.namespaces.id_of(record.namespace, record.payload_bytes, record.root)

    def _buried(self, data: bytes) -> None:
        stone = tombstone.decode(data)
        if stone is None:
            self._on_fault("tombstone_unreadable")
            return
        is_new = self._burials.remember(stone)
        session = self._table.get(stone.session_key)
        if session is not None and session.created_s == stone.created_s:
            self._heed(session, stone.revision, is_new)

    def _heed(self, session: Session, up_to: int, is_new: bool) -> None:
        """The session was deleted elsewhere up to that revision of the bucket's, -1: it was not."""
        if session.shared_revision <= up_to:
            self._drop(session, self._links.keys() & {TierKind.SSD}, None)
        elif is_new and up_to >= 0:
            self._begin_anew(session)

    def _expire_unless_newer(self, session: Session, now: float) -> None:
        """The session may have gone on at another daemon, and then it is that one's to end."""
        if session.key in self._expiring or now - session.checked_at < _EXPIRY_CHECK_EVERY_S:
            return
        self._expiring.add(session.key)

        def answered(did_answer: bool) -> None:
            self._expiring.discard(session.key)
            current = self._table.get(session.key)
            if not did_answer:
                session.checked_at = now
            elif current is not None and self._table.is_expired(current):
                self._delete(current)

        self._reader.check(session.key, now, answered)

    def _forget(self, session: Session) -> None:
        """Know the session no more. Its blocks stay where they are, as long as they are not evicted."""
        self._removals.remove(session, self._links.keys() & {TierKind.SSD}, None, lambda: None)
        for block in self._table.remove(session):
            self._catalog.unpin(block)

    def _delete(self, session: Session, done: Callable[[int], None] = lambda _: None) -> None:
        """Delete the record and the blocks that no other session holds; `done` is told how many those are."""
        stone = None
        if TierKind.S3 in self._links:
            keys = b"".join(map(self._catalog.key, session.blocks.tolist()))
            # A record of ours may be on its way, with our number.
            is_put = session.s3_revision == session.revision
            revision = session.shared_revision if is_put else max(session.revision, session.bucket_revision)
            stone = tombstone.make_tombstone(
                session.key, session.created_s, revision, keys, session.ttl_s, self._table.now_s()
            )
            self._burials.remember(stone)
        self._drop(session, self._links.keys(), stone, done)

    def _drop(
        self,
        session: Session,
        tiers: Collection[TierKind],
        stone: tombstone.Tombstone | None,
        done: Callable[[int], None] = lambda _: None,
    ) -> None:
        alone = self._table.remove(session)
        self._sync.ended(session)
        for block in alone:
            for demoter in self._demoters.values():
                demoter.forget(block)
            if block in self._doomed:
                self._catalog.unpin(block)  # pinned for the same reason already
        self._doomed.update(alone)
        self._delete_doomed()
        self._removals.remove(session, tiers, stone, lambda: done(len(alone)))

    def _begin_anew(self, session: Session) -> None:
        """What the session goes on from was deleted elsewhere: for the bucket it is a new one."""
        session.s3_revision, session.s3_etag, session.bucket_revision = 0, "", 0
        for block in session.blocks.tolist():
            self._catalog.set_absent(block, TierKind.S3, "deleted")
        self._demoters[TierKind.S3].may_exist.update(session.blocks.tolist())
        self._table.mark_dirty(session.key)

    def _delete_doomed(self) -> None:
        """Delete, in our tiers, the blocks of deleted sessions that nobody uses any more. In the bucket others may use
        them: there whoever holds the lease does it, by the tombstone."""
        for block in list(self._doomed):
            if self._catalog.session_refs(block):
                self._doomed.discard(block)  # a new session has come to share it
                self._catalog.unpin(block)
            elif self._catalog.pins(block) == 1 and not self._catalog.writing(block):
                self._doomed.discard(block)
                self._catalog.set_absent(block, TierKind.S3, "deleted")
                if self._catalog.resident(block, TierKind.SSD) and TierKind.SSD in self._links:
                    self._room.delete(TierKind.SSD, [block], "deleted")
                if self._catalog.resident(block, TierKind.RAM):
                    self._room.free_ram(block, "deleted")
                self._catalog.unpin(block)


def _not_got(session_id: str, found: object) -> wire.Error:
    if found == Outcome.UNAVAILABLE:
        return wire.Error(ErrorCode.BUSY, f"session {session_id!r} cannot be read now; try again")
    return wire.Error(ErrorCode.NOT_FOUND, f"no session {session_id!r}")
