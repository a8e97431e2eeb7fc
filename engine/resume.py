"""Finding the session that a turn continues, and saving the turn: in kvstore, or here while the daemon is away.

    begin ── daemon answers ──► its newest revision, or none
          └─ does not ────────► our own copy, or a new session (or a refusal, where only resuming was asked for)
    save  ── daemon answers ──► saved, or forked where the session has moved on meanwhile
          └─ does not ────────► kept here as unsaved, put again by `flush`

Not thread-safe: the consult thread owns it.
"""

from collections.abc import Callable, Sequence

import msgspec

from engine.counters import Counters
from engine.link import KVClient, Links
from engine.request import wants_the_bytes
from engine.sessions import LocalSession, LocalSessions
from engine.turn import Refused, Saved, Turn
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.key import BlockKey, Namespace, join_keys
from kvstore.wire import ChatMessage, ErrorCode, SessionPut, SessionSaved

_DEADLINE_S = 2.0
# With a copy at hand, asking only finds out whether there is a newer one.
_CHECK_DEADLINE_S = 0.3


class SessionKeeper:
    """`links` None: there is no kvstore, sessions live in this process only. `namespace_of` is asked by tenant,
    `deadline_for` by the number of tokens that would have to be recomputed."""

    def __init__(
        self,
        links: Links | None,
        namespace_of: Callable[[str], Namespace],
        deadline_for: Callable[[int], float],
        counters: Counters,
        faults: Counters,
    ) -> None:
        self._links = links
        self._namespace_of = namespace_of
        self._deadline_for = deadline_for
        self._counters = counters
        self._faults = faults
        self._local = LocalSessions(on_lost=lambda: counters.add("sessions_lost"))

    def begin(self, turn: Turn) -> list[ChatMessage]:
        """Return what is remembered of the turn's session, [] for a new one, and note in the turn which state that is.

        Raises Refused where the turn only wants to resume and there is nothing to, or nobody who knows.
        """
        tenant, asked_id = turn.ask.tenant, turn.ask.session_id
        local = self._local.get(tenant, self._local.resolve(tenant, asked_id))
        if local is not None and local.unsaved:
            self._put_again(local, _CHECK_DEADLINE_S)
        turn.session_id = local.id if local is not None else self._local.resolve(tenant, asked_id)
        turn.version = 0 if local is None else local.version
        if self._links is None or (local is not None and local.unsaved):
            return self._from_local(turn, local)
        deadline_s = _DEADLINE_S if local is None else _CHECK_DEADLINE_S
        client = self._links.client(tenant)
        pinned = wants_the_bytes(turn.ask.plan)
        try:
            if local is not None:
                # Is it awake? A silent daemon must not take the time that asking the bucket may take. The root is
                # no block: asking for it counts as no request.
                root = self._namespace_of(tenant).root()
                client.lookup([root], _DEADLINE_S if pinned else self._deadline_for(local.num_tokens))
            view = client.session_get(turn.session_id, tenant, deadline_s)
        except (TierUnavailable, ProtocolError) as error:
            self._counters.add("session_asked_in_vain")
            if local is None:
                self._faults.add("session_unknown")
                if turn.ask.resume_only:
                    raise Refused(
                        503, "kvstore_unavailable", f"session {asked_id!r} cannot be found: {error}"
                    ) from None
            return self._from_local(turn, local)
        if view is None:
            # Deleted or expired: what is left here of it must not come back.
            self._local.forget(tenant, turn.session_id)
            return self._from_local(turn, None)
        turn.revision = view.revision
        return view.messages

    def save(self, turn: Turn, messages: Sequence[ChatMessage], keys: Sequence[BlockKey]) -> Saved:
        """Record the turn; `messages` are the whole session, `keys` those of all its full blocks."""
        tenant = turn.ask.tenant
        local = self._local.get(tenant, turn.session_id)
        if local is not None and local.version == turn.version:
            # It may have been saved since the turn began.
            turn.revision = max(turn.revision, local.revision)
        saved = None if self._links is None else self._put(turn, messages, keys)
        if saved is None:
            saved = self._keep(turn, local, messages, keys)
        if saved.session_id != turn.ask.session_id:
            self._local.told(tenant, turn.ask.session_id)
        return saved

    def flush(self) -> None:
        """Try to put what is unsaved; ends at the first sign that the daemon is still away, or has no room."""
        for session in self._local.unsaved():
            if not self._put_again(session):
                return

    def _from_local(self, turn: Turn, local: LocalSession | None) -> list[ChatMessage]:
        if local is not None:
            turn.revision = local.revision
            return list(local.messages)
        if turn.ask.resume_only:
            self._faults.add("session_unknown")
            raise Refused(404, "session_unknown", f"there is no session {turn.ask.session_id!r}")
        return []

    def _put(self, turn: Turn, messages: Sequence[ChatMessage], keys: Sequence[BlockKey]) -> Saved | None:
        assert self._links is not None
        tenant = turn.ask.tenant
        put = SessionPut(
            id=turn.session_id,
            tenant=tenant,
            namespace=self._namespace_of(tenant).digest(),
            revision=turn.revision,
            messages=list(messages),
            keys=join_keys(keys),
            fork=turn.is_fork,
            ttl_s=turn.ask.keep.ttl_s,
            pin=turn.ask.keep.pin,
            expect_followup=turn.ask.keep.expect_followup,
            end=turn.ask.keep.end,
            priority=turn.ask.keep.priority,
        )
        try:
            saved = self._put_pinned_or_not(self._links.client(tenant), put)
        except TierUnavailable:
            return None
        except ProtocolError as error:
            self._faults.add(f"session_refused_{error.code}")
            return None
        self._local.remember(tenant, saved.id, saved.revision, messages, keys, unsaved=False)
        return Saved(saved.id, saved.revision, saved.forked, in_kvstore=True)

    def _put_pinned_or_not(self, client: KVClient, put: SessionPut) -> SessionSaved:
        """A turn that cannot be pinned is recorded all the same."""
        try:
            return client.session_put(put)
        except ProtocolError as error:
            if error.code != ErrorCode.BUSY or not put.pin:
                raise
            self._counters.add("pins_refused")
            return client.session_put(msgspec.structs.replace(put, pin=None))

    def _keep(
        self, turn: Turn, local: LocalSession | None, messages: Sequence[ChatMessage], keys: Sequence[BlockKey]
    ) -> Saved:
        tenant = turn.ask.tenant
        forked = turn.is_fork or (local is not None and local.version != turn.version)
        session_id = self._local.fork_id(tenant, turn.session_id) if forked else turn.session_id
        revision = 0 if forked else turn.revision
        if self._links is None:
            revision += 1
        self._local.remember(tenant, session_id, revision, messages, keys, unsaved=self._links is not None)
        self._counters.add("sessions_kept_here")
        return Saved(session_id, revision, forked, in_kvstore=False)

    def _put_again(self, session: LocalSession, deadline_s: float | None = None) -> bool:
        """Whether the session needs no further attempt."""
        assert self._links is not None, "without a kvstore nothing is unsaved"
        put = SessionPut(
            id=session.id,
            tenant=session.tenant,
            namespace=self._namespace_of(session.tenant).digest(),
            revision=session.revision,
            messages=session.messages,
            keys=join_keys(session.keys),
        )
        try:
            saved = self._links.client(session.tenant).session_put(put, deadline_s)
        except TierUnavailable:
            return False
        except ProtocolError as error:
            self._faults.add(f"session_refused_{error.code}")
            if error.code == ErrorCode.BUSY:
                return False
            # Asking again would change nothing; the chat goes on from the copy here.
            session.unsaved = False
            return True
        self._local.saved(session, saved.id, saved.revision)
        self._counters.add("sessions_put_again")
        return True
