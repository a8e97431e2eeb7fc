"""Messages about chat sessions, and what a session is to a client."""

import msgspec

from kvstore.messages.base import Message, Priority, TokenId


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message and the exact token ids it contributed to the sequence, template tokens included."""

    role: str
    content: str
    token_ids: list[TokenId]


class SessionView(msgspec.Struct, frozen=True):
    """A session as clients see it. `messages` is empty in listings.

    `namespace` is the digest as hex; `durable` is "none", "ssd" or "s3": what the newest turn survives.
    """

    id: str
    tenant: str
    namespace: str
    model: str
    revision: int
    messages: list[ChatMessage]
    num_messages: int
    num_tokens: int
    num_blocks: int
    durable: str
    pinned: bool
    created_s: float
    last_turn_s: float
    expires_s: float | None
    forked_from: str


class SessionGet(Message, frozen=True, tag=True):
    """`namespace` (digest) and `tenant` must be the session's own; a console that has neither leaves `namespace` empty
    and gets the session if the id is unambiguous."""

    id: str
    tenant: str = ""
    namespace: bytes = b""
    deadline_s: float = 2.0


class SessionFound(Message, frozen=True, tag=True):
    session: SessionView


class SessionPut(Message, frozen=True, tag=True):
    """Record a finished turn. `revision` is the one the turn began from (0: a new session). If the session has moved
    on meanwhile, or `fork` asks for it, it is saved under a new id instead. `keys` are the joined keys of all full
    blocks of the sequence. `ttl_s` 0 takes the session's own or the configured default. The hints are as in `Hint`, and
    hold until the session goes on; with `pin` its blocks stay in RAM and on SSD, for `sessions.pin_for`: Error (busy),
    and the turn is not recorded, where a session that was not pinned does not fit."""

    id: str
    tenant: str
    namespace: bytes
    revision: int
    messages: list[ChatMessage]
    keys: bytes
    fork: bool = False
    ttl_s: float = 0.0
    pin: bool | None = None
    expect_followup: bool = False
    end: bool = False
    priority: Priority = 0


class SessionSaved(Message, frozen=True, tag=True):
    """Where the turn was saved: `id` differs from the one asked for if it was forked."""

    id: str
    revision: int
    forked: bool


class SessionList(Message, frozen=True, tag=True):
    tenant: str | None = None
    limit: int = 1000


class Sessions(Message, frozen=True, tag=True):
    sessions: list[SessionView]
    total: int


class SessionPin(Message, frozen=True, tag=True):
    id: str
    pinned: bool
    tenant: str = ""
    namespace: bytes = b""


class SessionHint(Message, frozen=True, tag=True):
    """`Hint` for all blocks of a session. `ttl_s` is the session's from now on, 0: as it was. Answered by Done."""

    id: str
    tenant: str = ""
    namespace: bytes = b""
    expect_followup: bool = False
    end: bool = False
    priority: Priority = 0
    ttl_s: float = 0.0


class SessionPrefetch(Message, frozen=True, tag=True):
    """The session is about to go on (a user began to type): bring its blocks into RAM, as far as the budget allows."""

    id: str
    tenant: str = ""
    namespace: bytes = b""


class Prefetching(Message, frozen=True, tag=True):
    """So many of the session's blocks are not in RAM and will be loaded."""

    blocks_to_load: int
    blocks: int


class SessionDelete(Message, frozen=True, tag=True):
    """Delete the record everywhere and, in every tier, the blocks that no other session shares."""

    id: str
    tenant: str = ""
    namespace: bytes = b""


class SessionDeleted(Message, frozen=True, tag=True):
    blocks_deleted: int
    blocks_shared: int
