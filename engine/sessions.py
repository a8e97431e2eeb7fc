"""The sessions this process has served lately, so that a chat goes on while the daemon is away.

The daemon's copy is the truth whenever it answers. A session whose newest turn the daemon has not got is *unsaved* and
is put there as soon as that works; it may be forked then, and its old id leads to the fork from then on.

Not thread-safe: the consult thread owns it.
"""

import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.core.key import BlockKey
from kvstore.wire import ChatMessage

_Name = tuple[str, str]
_MAX_ALIASES = 1024


@dataclass(slots=True)
class LocalSession:
    """`revision` is the newest that the daemon has confirmed (0: none), `version` counts our own turns."""

    tenant: str
    id: str
    revision: int
    version: int
    messages: list[ChatMessage]
    keys: list[BlockKey]
    unsaved: bool

    @property
    def num_tokens(self) -> int:
        return sum(len(message.token_ids) for message in self.messages)


class LocalSessions:
    """At most `max_sessions` and about `max_tokens`; the least recently used goes first, unsaved ones last.

    `on_lost` is called for each unsaved session that had to go.
    """

    def __init__(self, on_lost: Callable[[], None], max_sessions: int = 256, max_tokens: int = 1 << 20) -> None:
        self._on_lost = on_lost
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._sessions: OrderedDict[_Name, LocalSession] = OrderedDict()
        self._aliases: OrderedDict[_Name, str] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def resolve(self, tenant: str, session_id: str) -> str:
        """Return the id under which the session goes on, after forks that its client could not be told of."""
        return self._aliases.get((tenant, session_id), session_id)

    def told(self, tenant: str, session_id: str) -> None:
        """The client of this id has been told how its session is called now."""
        self._aliases.pop((tenant, session_id), None)

    def get(self, tenant: str, session_id: str) -> LocalSession | None:
        session = self._sessions.get((tenant, session_id))
        if session is not None:
            self._sessions.move_to_end((tenant, session_id))
        return session

    def remember(
        self,
        tenant: str,
        session_id: str,
        revision: int,
        messages: Sequence[ChatMessage],
        keys: Sequence[BlockKey],
        *,
        unsaved: bool,
    ) -> LocalSession:
        """Take in a session's newest state, in place of an older one."""
        before = self._sessions.pop((tenant, session_id), None)
        version = 1 if before is None else before.version + 1
        session = LocalSession(tenant, session_id, revision, version, list(messages), list(keys), unsaved)
        self._num_tokens += session.num_tokens - (0 if before is None else before.num_tokens)
        self._sessions[tenant, session_id] = session
        self._make_room(session)
        return session

    def forget(self, tenant: str, session_id: str) -> None:
        session = self._sessions.pop((tenant, session_id), None)
        if session is not None:
            self._num_tokens -= session.num_tokens

    def saved(self, session: LocalSession, session_id: str, revision: int) -> None:
        """The daemon has it now, perhaps under another id."""
        session.unsaved = False
        session.revision = revision
        if session_id == session.id:
            return
        del self._sessions[session.tenant, session.id]
        # The client knows only the id that it used; that leads to the fork, as do those that led here.
        for name, target in self._aliases.items():
            if name[0] == session.tenant and target == session.id:
                self._aliases[name] = session_id
        self._aliases[session.tenant, session.id] = session_id
        while len(self._aliases) > _MAX_ALIASES:
            self._aliases.popitem(last=False)
        session.id = session_id
        self._sessions[session.tenant, session_id] = session

    def unsaved(self) -> list[LocalSession]:
        return [session for session in self._sessions.values() if session.unsaved]

    def fork_id(self, tenant: str, session_id: str) -> str:
        """Return an id of the daemon's form for a fork that is made here."""
        while True:
            forked = f"{session_id.partition('~')[0][:180]}~{secrets.token_hex(4)}"
            if (tenant, forked) not in self._sessions:
                return forked

    def _make_room(self, newest: LocalSession) -> None:
        while len(self._sessions) > self._max_sessions or self._num_tokens > self._max_tokens:
            others = [session for session in self._sessions.values() if session is not newest]
            if not others:
                return
            victim = next((session for session in others if not session.unsaved), others[0])
            if victim.unsaved:
                self._on_lost()
            del self._sessions[victim.tenant, victim.id]
            self._num_tokens -= victim.num_tokens
