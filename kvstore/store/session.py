"""Sessions: which there are, which blocks they hold, and how far each is durable.

Covers: the table in memory, compare-and-swap on revisions, forks, sharing, expiry. Does not cover: where records are
kept (session_sync.py).

    put(revision seen) ── is the newest ──► revision + 1
                       └─ is older, or an edit ──► fork: a new id, revision 1, sharing the blocks of the same prefix
"""

import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore import session_record as records
from kvstore.core.errors import ProtocolError
from kvstore.core.index import Ids
from kvstore.core.key import KEY_BYTES
from kvstore.core.outcome import TierKind
from kvstore.session_record import MAX_REVISION, MAX_TTL_S, SessionKey, SessionRecord
from kvstore.store.catalog import Catalog
from kvstore.store.columns import tier_bit
from kvstore.store.namespaces import NamespaceInfo
from kvstore.wire import ChatMessage, ErrorCode, SessionPut, SessionView

_MAX_CACHED_BYTES = 64 << 20
# Text that no tier has taken yet must stay in memory; past this much of it turns are refused.
_MAX_UNSAVED_BYTES = 512 << 20
# Half of all sessions may be pinned.
_PINNED_SHARE = 2
# What a token id takes in a list of Python's.
_TOKEN_BYTES = 36


@dataclass(slots=True)
class Session:
    """What is always in memory of a session; its text lies in the record.

    `ssd_revision` and `s3_revision` are the newest revisions that are durable there, `s3_etag` the bucket's tag of the
    record we last put or saw, `bucket_revision` as in the record.
    """

    key: SessionKey
    model: str
    revision: int
    num_messages: int
    num_tokens: int
    blocks: Ids
    created_s: float
    last_turn_s: float
    ttl_s: float
    pinned: bool
    forked_from: str
    ssd_revision: int = 0
    s3_revision: int = 0
    s3_etag: str = ""
    bucket_revision: int = 0
    is_putting: dict[TierKind, bool] = field(default_factory=lambda: {TierKind.SSD: False, TierKind.S3: False})
    checked_at: float = -1e9

    @property
    def expires_s(self) -> float | None:
        return None if self.pinned else self.last_turn_s + self.ttl_s

    @property
    def shared_revision(self) -> int:
        """The number of this state where several daemons speak of it."""
        return self.bucket_revision or self.revision


class SessionTable:
    """Owned by the control thread. A session's blocks keep their catalog entries, with or without copies."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        ttl_s: float,
        max_sessions: int,
        max_tokens: int,
        wall_clock: Callable[[], float] = time.time,
        max_unsaved_bytes: int = _MAX_UNSAVED_BYTES,
        on_adopted: Callable[["Session"], None] = lambda session: None,
        on_removed: Callable[["Session"], None] = lambda session: None,
    ) -> None:
        """`on_adopted` is told of each new state of a session, `on_removed` of one that ends, before it does."""
        self._catalog = catalog
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._wall_clock = wall_clock
        self._max_unsaved_bytes = max_unsaved_bytes
        self._on_adopted = on_adopted
        self._on_removed = on_removed
        self._sessions: dict[SessionKey, Session] = {}
        self._pinned: set[SessionKey] = set()
        # How many sessions each namespace has, and so each tenant.
        self._num_by_namespace: Counter[bytes] = Counter()
        # Records in memory, coldest first; one whose text is nowhere else stays.
        self._cache: OrderedDict[SessionKey, SessionRecord] = OrderedDict()
        self._cached_bytes = 0
        # Newer here than in some tier, in the order in which they are looked at.
        self.dirty: OrderedDict[SessionKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    # ------------------------------------------------------------ reading

    def get(self, key: SessionKey) -> Session | None:
        return self._sessions.get(key)

    def find(self, session_id: str, tenant: str, namespace: bytes) -> Session:
        """Return the session; without `namespace` the one of this id if there is only one. Raises ProtocolError."""
        if namespace:
            found = [self._sessions[key]] if (key := (tenant, namespace, session_id)) in self._sessions else []
        else:
            found = [
                s for s in self._sessions.values() if s.key[2] == session_id and (not tenant or s.key[0] == tenant)
            ]
        if not found:
            raise ProtocolError(ErrorCode.NOT_FOUND, f"no session {session_id!r}")
        if len(found) > 1:
            raise ProtocolError(ErrorCode.CONFLICT, f"{len(found)} sessions are called {session_id!r}: name the tenant")
        return found[0]

    def cached(self, key: SessionKey) -> SessionRecord | None:
        record = self._cache.get(key)
        if record is not None:
            self._cache.move_to_end(key)
        return record

    def views(self, sessions: Sequence[Session]) -> list[SessionView]:
        """`view` of each, without messages."""
        return [
            self._view(session, durable, [])
            for session, durable in zip(sessions, self.durable_of(sessions), strict=True)
        ]

    def view(self, session: Session, record: SessionRecord) -> SessionView:
        return self._view(session, self.durable(session), record.messages)

    def _view(self, session: Session, durable: str, messages: list[ChatMessage]) -> SessionView:
        tenant, namespace, session_id = session.key
        return SessionView(
            id=session_id,
            tenant=tenant,
            namespace=namespace.hex(),
            model=session.model,
            revision=session.revision,
            messages=messages,
            num_messages=session.num_messages,
            num_tokens=session.num_tokens,
            num_blocks=len(session.blocks),
            durable=durable,
            pinned=session.pinned,
            created_s=session.created_s,
            last_turn_s=session.last_turn_s,
            expires_s=session.expires_s,
            forked_from=session.forked_from,
        )

    def durable(self, session: Session) -> str:
        """ "s3" or "ssd" if the newest record and every full block of it lie there, synced; else "none"."""
        return self.durable_of([session])[0]

    def durable_of(self, sessions: Sequence[Session]) -> list[str]:
        """`durable` of each of the sessions; all their blocks are looked at together."""
        if not sessions:
            return []
        ends = np.cumsum([0, *(len(session.blocks) for session in sessions)])
        residency = self._catalog.residency_of(np.concatenate([session.blocks for session in sessions]))
        in_s3 = _none_missing(residency, TierKind.S3, ends)
        on_ssd = _none_missing(residency, TierKind.SSD, ends)
        return [
            _survives(session, on_ssd=is_on_ssd, in_s3=is_in_s3)
            for session, is_on_ssd, is_in_s3 in zip(sessions, on_ssd, in_s3, strict=True)
        ]

    # ------------------------------------------------------------ changing

    def put(self, put: SessionPut, info: NamespaceInfo) -> tuple[Session, bool]:
        """Record a turn; return the session it went to and whether that is a fork. Raises ProtocolError.

        The same turn sent twice, since the first answer was lost, is recorded once.
        """
        self._check(put, info)
        now = self._wall_clock()
        key = (put.tenant, put.namespace, put.id)
        known = self._sessions.get(key)
        if known is not None and not put.fork and self._has_recorded(known, put):
            return known, False
        base = self.base_of(put)
        forked = put.fork or (known is not None and base is None)
        session_id = self.fork_id(key) if forked else put.id
        if base is None:
            self._check_room()
        if put.pin and (base is None or not base.pinned):
            self.check_may_pin(put.namespace)
        record = SessionRecord(
            id=session_id,
            tenant=put.tenant,
            namespace=put.namespace,
            root=info.root,
            model=info.label,
            payload_bytes=info.payload_bytes,
            revision=1 if forked else put.revision + 1,
            messages=put.messages,
            keys=put.keys,
            created_s=now if base is None else base.created_s,
            last_turn_s=now,
            ttl_s=put.ttl_s or (self._ttl_s if base is None else base.ttl_s),
            pinned=put.pin if put.pin is not None else base is not None and base.pinned,
            forked_from=put.id if forked else ("" if base is None else base.forked_from),
            s3_revision=0 if base is None else base.s3_revision,
            s3_etag="" if base is None else base.s3_etag,
        )
        session = self.adopt(record)
        self.mark_dirty(session.key)
        return session, forked

    def base_of(self, put: SessionPut) -> Session | None:
        """Return the session that the turn goes on in; None: it begins one, be it a fork."""
        known = self._sessions.get((put.tenant, put.namespace, put.id))
        if known is None or (not put.fork and self._has_recorded(known, put)):
            return known
        return None if put.fork or known.revision != put.revision else known

    def adopt(self, record: SessionRecord, ssd_revision: int | None = None) -> Session:
        """Enter a record as the newest of its session. `ssd_revision`: what of it is durable on SSD, where known."""
        blocks = self._catalog.ensure_prefix(record.namespace, record.root, record.payload_bytes, record.keys)
        self._catalog.add_session_refs(blocks, 1)
        before = self._sessions.get(record.session_key)
        session = Session(
            key=record.session_key,
            model=record.model,
            revision=record.revision,
            num_messages=len(record.messages),
            num_tokens=sum(len(message.token_ids) for message in record.messages),
            blocks=blocks,
            created_s=record.created_s,
            last_turn_s=record.last_turn_s,
            ttl_s=record.ttl_s,
            pinned=record.pinned,
            forked_from=record.forked_from,
            s3_revision=record.s3_revision,
            s3_etag=record.s3_etag,
            bucket_revision=record.bucket_revision,
        )
        if before is not None:
            session.ssd_revision = before.ssd_revision
            session.is_putting = before.is_putting
            self._catalog.add_session_refs(before.blocks, -1)
        if ssd_revision is not None:
            session.ssd_revision = ssd_revision
        self._num_by_namespace[session.key[1]] += before is None
        self._sessions[session.key] = session
        if session.pinned:
            self._pinned.add(session.key)
        else:
            self._pinned.discard(session.key)
        self.remember(record)
        self._on_adopted(session)
        return session

    def check_may_pin(self, namespace: bytes) -> None:
        """Raise ProtocolError (busy) where one more pinned session would leave too little room for others: pinned ones
        never make room, and those without a whole block cost nothing of what may be pinned. Beside others a namespace,
        and so a tenant, has half of them."""
        may_be = max(1, self._max_sessions // _PINNED_SHARE)
        if len(self._pinned) >= may_be:
            raise ProtocolError(ErrorCode.BUSY, f"not pinned: {len(self._pinned)} sessions are; unpin something")
        mine = sum(key[1] == namespace for key in self._pinned)
        if mine >= max(1, may_be // 2) and self._num_by_namespace.keys() - {namespace}:
            raise ProtocolError(ErrorCode.BUSY, f"not pinned: {mine} sessions of this tenant are; unpin something")

    def mark_dirty(self, key: SessionKey) -> None:
        """Some tier lacks the newest state of this session."""
        self.dirty[key] = None

    def remember(self, record: SessionRecord) -> None:
        """Keep the record in memory, within the cache's bound."""
        before = self._cache.pop(record.session_key, None)
        self._cached_bytes += _weight(record) - (0 if before is None else _weight(before))
        self._cache[record.session_key] = record
        for key in list(self._cache):
            if self._cached_bytes <= _MAX_CACHED_BYTES:
                break
            session = self._sessions.get(key)
            is_elsewhere = session is None or session.revision in (session.ssd_revision, session.s3_revision)
            if is_elsewhere and key != record.session_key:
                self._cached_bytes -= _weight(self._cache.pop(key))

    def remove(self, session: Session) -> list[int]:
        """Forget the session; return those of its blocks that no other session holds, children first.

        Their entries are pinned once, by the caller's leave, until the caller unpins them.
        """
        self._on_removed(session)
        del self._sessions[session.key]
        self._num_by_namespace[session.key[1]] -= 1
        if not self._num_by_namespace[session.key[1]]:
            del self._num_by_namespace[session.key[1]]
        self._pinned.discard(session.key)
        self.dirty.pop(session.key, None)
        cached = self._cache.pop(session.key, None)
        self._cached_bytes -= 0 if cached is None else _weight(cached)
        blocks = session.blocks.tolist()
        for block in blocks:
            self._catalog.pin(block)
        self._catalog.add_session_refs(session.blocks, -1)
        alone = [block for block in reversed(blocks) if self._catalog.session_refs(block) == 0]
        for block in set(blocks) - set(alone):
            self._catalog.unpin(block)
        return alone

    def fork_id(self, key: SessionKey) -> str:
        """Return an id that is not taken, made from the one it forks from."""
        tenant, namespace, session_id = key
        stem = session_id.partition("~")[0][:180]
        while True:
            forked = f"{stem}~{secrets.token_hex(4)}"
            if (tenant, namespace, forked) not in self._sessions:
                return forked

    def expired(self) -> list[Session]:
        return [session for session in self._sessions.values() if self.is_expired(session)]

    def excess(self) -> list[Session]:
        """Return those that were unused longest, as many as there are beyond `max_sessions`."""
        num_excess = len(self._sessions) - self._max_sessions
        if num_excess <= 0:
            return []
        unpinned = [session for session in self._sessions.values() if not session.pinned]
        return sorted(unpinned, key=lambda session: session.last_turn_s)[:num_excess]

    def is_expired(self, session: Session) -> bool:
        return session.expires_s is not None and session.expires_s <= self._wall_clock()

    def now_s(self) -> float:
        return self._wall_clock()

    def age_s(self, session: Session) -> float:
        """Seconds since the session's last turn."""
        return self._wall_clock() - session.last_turn_s

    # ------------------------------------------------------------ private

    def _check(self, put: SessionPut, info: NamespaceInfo) -> None:
        records.check_id(put.id)
        records.check_tenant(put.tenant)
        num_tokens = sum(len(message.token_ids) for message in put.messages)
        wrong = ""
        if num_tokens > self._max_tokens:
            wrong = f"a session has at most {self._max_tokens} tokens"
        elif len(put.keys) % KEY_BYTES or len(put.keys) // KEY_BYTES * info.block_tokens > num_tokens:
            wrong = "keys are those of the full blocks of the session's tokens"
        elif not 0 <= put.revision < MAX_REVISION:
            wrong = "a revision is a number that the daemon has given, or 0"
        elif not 0.0 <= put.ttl_s <= MAX_TTL_S:
            wrong = "ttl_s is a number of seconds, or 0"
        if wrong:
            raise ProtocolError(ErrorCode.BAD_REQUEST, wrong)

    def _check_room(self) -> None:
        """Raise ProtocolError (busy) where one more session could only be kept by losing what must be kept."""
        if self._cached_bytes > self._max_unsaved_bytes:
            raise ProtocolError(ErrorCode.BUSY, "no tier takes the sessions that are held in memory")
        if len(self._sessions) >= self._max_sessions and all(session.pinned for session in self._sessions.values()):
            raise ProtocolError(ErrorCode.BUSY, f"{self._max_sessions} sessions are pinned already")

    def _has_recorded(self, session: Session, put: SessionPut) -> bool:
        if session.revision != put.revision + 1:
            return False
        record = self._cache.get(session.key)
        return record is not None and record.keys == put.keys and record.messages == put.messages


def _survives(session: Session, *, on_ssd: bool, in_s3: bool) -> str:
    """`on_ssd`, `in_s3`: whether all its blocks are there."""
    if in_s3 and session.s3_revision == session.revision:
        return "s3"
    return "ssd" if on_ssd and session.ssd_revision == session.revision else "none"


def _none_missing(residency: npt.NDArray[np.uint8], tier: TierKind, ends: npt.NDArray[np.int64]) -> list[bool]:
    """Whether all are in the tier, per run of blocks from one of `ends` to the next."""
    missing = np.concatenate(([0], np.cumsum(residency & tier_bit(tier) == 0)))[ends]
    return [bool(is_none) for is_none in missing[1:] == missing[:-1]]


def _weight(record: SessionRecord) -> int:
    texts = sum(len(message.content) + _TOKEN_BYTES * len(message.token_ids) for message in record.messages)
    return texts + len(record.keys)
