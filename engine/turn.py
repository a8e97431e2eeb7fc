"""What a client asks for, in the engine's own words, and what the consult thread makes of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.chat import Said
from engine.request import PlanMode, Request, Sampling
from kvstore.wire import ChatMessage

SessionMode = Literal["append", "history"]


class Refused(Exception):
    """The request cannot be served as it is; `status` is the HTTP status, `code` for programs, the text for people."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Keep:
    """What the client says will become of the request's KV, for kvstore; as in `kvstore.wire.Hint`.

    `pin` of a session: as `SessionPut.pin`; else for an hour, one pin for each session
    that is not saved, or whole prompt.
    """

    expect_followup: bool = False
    end: bool = False
    priority: int = 0
    ttl_s: float = 0.0
    pin: bool | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """One validated request. Exactly one of `messages` and `prompt` is given; sessions go with messages.

    `session_mode` None: one message continues the session, several are its whole history. `max_tokens` None: as many
    as the engine's default and the context allow.
    """

    id: str
    tenant: str
    arrival_s: float
    messages: Sequence[Said] | None = None
    prompt: str | Sequence[int] | None = None
    session_id: str = ""
    session_mode: SessionMode | None = None
    resume_only: bool = False
    save_session: bool = True
    plan: PlanMode = "auto"
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    ignore_eos: bool = False
    keep: Keep = field(default_factory=Keep)

    @property
    def saves(self) -> bool:
        return bool(self.session_id) and self.save_session


@dataclass(eq=False, slots=True)
class Turn:
    """An asked request on its way; whoever has queued it last owns it.

    `messages` are those of the sequence before the reply. `revision` and `version` say which state of the session it
    continues, as the daemon and as this process count; `is_fork`: it continues an older part of it.
    """

    ask: Ask
    cancelled: bool = False
    request: Request | None = None
    messages: list[ChatMessage] = field(default_factory=list)
    session_id: str = ""
    revision: int = 0
    version: int = 0
    is_fork: bool = False


@dataclass(frozen=True, slots=True)
class Saved:
    """Where a turn was saved; `in_kvstore` False: only in this process, until the daemon answers again."""

    session_id: str
    revision: int
    forked: bool
    in_kvstore: bool
