"""The control protocol between clients and the daemon: what a frame looks like and which messages exist.

A stream of messages over a unix socket, each a fixed header and a msgpack body. Bytes of blocks never travel here;
they lie in the shared region, and messages name places in it.

    header: magic "KV" | u16 version | u32 bytes of the body | u64 boot epoch | u64 incarnation | u64 sequence

Up to the bytes of the body the header is the same in all versions, so that another version can be refused in words.

The epoch names one start of the daemon, the incarnation one attached engine. A message with another epoch is
refused with `stale_epoch`, and the client attaches again. Requests that concern no shared memory (statistics,
sessions) may come from a client that is not attached: it leaves epoch and incarnation 0. A reply carries the
sequence of its request; a fetch is answered by several messages, all others by exactly one.
"""

import struct
from typing import Annotated, Final, NewType, TypeVar

import msgspec

from kvstore.core.errors import ProtocolError
from kvstore.core.key import MAX_TOKEN_ID
from kvstore.core.outcome import Outcome
from policies.decision import Decision

PROTOCOL_VERSION: Final = 1
MAX_BODY_BYTES: Final = 8 << 20
# A reply may be a little larger, so that whatever was taken in can be given back.
MAX_REPLY_BYTES: Final = MAX_BODY_BYTES + (64 << 10)
MAX_KEYS: Final = 65_536
_MAGIC = b"KV"
_HEADER = struct.Struct("<2sHIQQQ")
HEADER_BYTES: Final = _HEADER.size

Epoch = NewType("Epoch", int)
Incarnation = NewType("Incarnation", int)
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
# In steps: each lets blocks go later, or sooner, than those that are as likely to be used again.
Priority = Annotated[int, msgspec.Meta(ge=-2, le=2)]
_T = TypeVar("_T")


class ErrorCode:
    """The values of `Error.code`."""

    MALFORMED: Final = "malformed"
    TOO_LONG: Final = "too_long"
    VERSION: Final = "version"
    STALE_EPOCH: Final = "stale_epoch"
    NOT_ATTACHED: Final = "not_attached"
    BAD_REQUEST: Final = "bad_request"
    NOT_FOUND: Final = "not_found"
    CONFLICT: Final = "conflict"
    BUSY: Final = "busy"
    INTERNAL: Final = "internal"


class Header(msgspec.Struct, frozen=True):
    """The beginning of every message; `body_bytes` is what a message that has come said of itself."""

    epoch: int = 0
    incarnation: int = 0
    sequence: int = 0
    version: int = PROTOCOL_VERSION
    body_bytes: int = 0

    def encode(self, body_bytes: int) -> bytes:
        return _HEADER.pack(_MAGIC, self.version, body_bytes, self.epoch, self.incarnation, self.sequence)


def pack(header: Header, body: bytes) -> bytes:
    """Return the whole message, as it goes over the socket."""
    return header.encode(len(body)) + body


def decode_header(frame: bytes | bytearray, begin: int = 0) -> Header:
    """Return the header that begins there. Raises ProtocolError (malformed) where none does; the version is left to the
    caller to judge."""
    if len(frame) - begin < HEADER_BYTES:
        raise ProtocolError(ErrorCode.MALFORMED, f"a header has {HEADER_BYTES} bytes, this one {len(frame) - begin}")
    magic, version, body_bytes, epoch, incarnation, sequence = _HEADER.unpack_from(frame, begin)
    if magic != _MAGIC:
        raise ProtocolError(ErrorCode.MALFORMED, "the header does not begin with the protocol's magic")
    return Header(epoch, incarnation, sequence, version, body_bytes)


class Message(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True):
    """Base of all bodies; the tag is the class name."""


# ---------------------------------------------------------------- attach


class NamespaceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A namespace as far as the daemon needs it; `label` is for people (model name), `digest` decides."""

    digest: bytes
    root: bytes
    label: str
    block_tokens: int
    block_bytes: int


class Ping(Message, frozen=True, tag=True): ...


class Pong(Message, frozen=True, tag=True):
    epoch: int


class Attach(Message, frozen=True, tag=True):
    """Join as an engine. `liveness_file` is the name (no '/') of a file in the run folder's `clients/` that the engine
    holds an exclusive flock on for as long as it lives."""

    namespace: NamespaceSpec
    liveness_file: str
    name: str = ""


class Attached(Message, frozen=True, tag=True):
    """`region_path` is to be mapped shared, `region_bytes` long, as described in `tiers/region.py`. `wants_tokens`: a
    Store may say the token ids of its blocks."""

    epoch: int
    incarnation: int
    region_path: str
    region_bytes: int
    tiers: list[str]
    wants_tokens: bool = False


class Detach(Message, frozen=True, tag=True):
    """Leave; every lease and grant of this incarnation ends."""


class Done(Message, frozen=True, tag=True):
    """The plain 'yes' to a request that has nothing more to say."""


class Error(Message, frozen=True, tag=True):
    """The request was refused as a whole; nothing was done."""

    code: str
    message: str


# ---------------------------------------------------------------- lookup and fetch


class Lookup(Message, frozen=True, tag=True):
    """Which leading blocks exist? `keys` are joined block keys of one prefix, from its first block on."""

    keys: bytes


class Found(Message, frozen=True, tag=True):
    """`tiers[i]` is the fastest TierKind that holds block i, for the leading blocks that exist; the block
    after those answers `next` (an Outcome: MISS, PENDING, UNKNOWN; OK where all exist).

    `why` says of a MISS what became of the block, where that is known: "evicted", "corrupt", "never_stored" …
    `s3` is UNKNOWN where the bucket might have that block and has not been asked yet: it will be, so another lookup
    a moment later may find more. Nothing waits for the bucket here.
    """

    tiers: bytes
    next: int
    why: str = ""
    s3: int = int(Outcome.MISS)


class Fetch(Message, frozen=True, tag=True):
    """Bring these blocks into slots and pin them. Answered by Landed messages until one says `done`.

    `deadline_s` counts from receipt; what has not landed by then answers TIMED_OUT.
    """

    keys: bytes
    deadline_s: float


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """One block's place in this fetch or store: `index` into the request's keys, what became of it, and,
    where that is OK, `offset` into the region and the `generation` that the slot must still show afterwards.
    `source` is the TierKind that served it."""

    index: int
    outcome: int
    offset: int = 0
    generation: int = 0
    source: int = 0


class Landed(Message, frozen=True, tag=True):
    """Some more blocks of a fetch. Their pins are held until Release, Detach or the engine's death.

    `lease` is the same in all messages of one fetch.
    """

    lease: int
    slots: list[Slot]
    done: bool


class Release(Message, frozen=True, tag=True):
    """End the pins of these blocks of a fetch (indexes into its keys); without `indexes` give up the whole fetch: all
    pins end, what has not landed is cancelled. `stale` counts slots whose generation had changed under the copy.

    Releasing what is not pinned (any more) is not an error.
    """

    lease: int
    indexes: list[int] | None = None
    stale: int = 0


# ---------------------------------------------------------------- store


class Store(Message, frozen=True, tag=True):
    """Ask for slots for new blocks: `keys` are consecutive blocks of one prefix, `parent` the key before the first
    (the root for depth 0), `depth` the first one's index in the prefix. `tokens` are the blocks' token ids as
    little-endian uint32, joined, or b"": the daemon tells them to routers, if it publishes events, and keeps them
    nowhere but in memory."""

    keys: bytes
    parent: bytes
    depth: int
    tokens: bytes = b""


class Granted(Message, frozen=True, tag=True):
    """Per key: OK with a slot to write to, or EXISTS, PENDING, BUSY, FULL … A grant lasts as long as its engine.

    `retry_s` is a hint for BUSY ones.
    """

    slots: list[Slot]
    retry_s: float = 0.0


class Commit(Message, frozen=True, tag=True):
    """The bytes of these granted slots are complete. `written[i]` false gives the slot back unwritten."""

    keys: bytes
    generations: list[int]
    written: list[bool]


class Committed(Message, frozen=True, tag=True):
    """Per key: OK once the block is readable, STALE where the grant is not (any more) this engine's."""

    outcomes: bytes


# ---------------------------------------------------------------- what the engine did


class Hint(Message, frozen=True, tag=True):
    """What will become of a finished request's blocks. `keys` are joined block keys of one prefix, from its first on.

    `expect_followup`: another request will go on from it; `end`: none will, so it may go first. `priority` -2 … 2: goes
    earlier or later than others. After `ttl_s` seconds without use it is as with `end`; 0: never. For `pin_s` seconds
    the blocks are not evicted from RAM and SSD (0: unpinned), at most one pin for each engine and `pin_name`; Error
    (busy) where more would be pinned than is allowed. The rest holds until the blocks are used again. Answered by Done.
    """

    keys: bytes
    expect_followup: bool = False
    end: bool = False
    priority: Priority = 0
    ttl_s: float = 0.0
    pin_s: float | None = None
    pin_name: str = ""


class Report(Message, frozen=True, tag=True):
    """One finished request, for the statistics. Token counts partition the prompt; `hbm`, `ram`, `ssd`, `s3` were
    served from there. `miss` counts recomputed tokens by reason. Seconds as measured by the engine. `decision` is None
    where nobody wrote it down; whose request it was is `tenant`. `last_block` is the key that ended its lookup (b"":
    there was none), by which a recording of the load finds the prompt."""

    request_id: str
    prompt_tokens: int
    hbm: int
    ram: int
    ssd: int
    s3: int
    recomputed: int
    miss: dict[str, int]
    plan: str
    ttft_s: float
    saved_prefill_s: float = 0.0
    tenant: str = ""
    decision: Decision | None = None
    output_tokens: int = 0
    last_block: bytes = b""


class Observe(Message, frozen=True, tag=True):
    """Faults the engine met that the daemon cannot see, as counts by kind (unknown session, stale slot …)."""

    errors: dict[str, int]


class DecisionView(msgspec.Struct, frozen=True):
    """A reported request as consoles see it; `reported_s` is when (unix). Tokens and seconds as in Report."""

    id: str
    tenant: str
    model: str
    reported_s: float
    prompt_tokens: int
    served_tokens: dict[str, int]
    recomputed_tokens: int
    miss: dict[str, int]
    plan: str
    ttft_s: float
    saved_prefill_s: float
    decision: Decision | None


class DecisionGet(Message, frozen=True, tag=True):
    """What is known of this request; `tenant` None: whosever it is."""

    request_id: str
    tenant: str | None = None


class DecisionList(Message, frozen=True, tag=True):
    """The last requests, newest first; `tenant` None: of all."""

    tenant: str | None = None
    limit: int = 1000


class Decisions(Message, frozen=True, tag=True):
    """Each is an encoded DecisionView, see `decision_view`; `total` is how many there are."""

    decisions: list[bytes]
    total: int


# ---------------------------------------------------------------- sessions


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


# ---------------------------------------------------------------- operation


class Evict(Message, frozen=True, tag=True):
    """Empty these tiers ("ram", "ssd", "s3"); blocks with no copy elsewhere are kept unless `drop`. With `session_id`
    only of that session's blocks."""

    tiers: list[str]
    drop: bool = False
    session_id: str = ""


class Evicted(Message, frozen=True, tag=True):
    """Blocks freed and kept (pinned, or the only copy), by tier."""

    freed: dict[str, int]
    kept: dict[str, int]


class Verify(Message, frozen=True, tag=True):
    """Begin to walk over these tiers ("ssd", "s3"; none named: all there are) and check everything in them.

    `repair` deletes what is damaged, `drop_wrong_key` what is encrypted with a key that the daemon does not have.
    Answered, as the next two are, by VerifyReport at once.
    """

    tiers: list[str]
    repair: bool = False
    drop_wrong_key: bool = False


class VerifyStatus(Message, frozen=True, tag=True): ...


class VerifyCancel(Message, frozen=True, tag=True): ...


class ScrubFinding(msgspec.Struct, frozen=True):
    """Something that is not as it should be, in the words of `tiers/scrub.py`."""

    verdict: str
    area: str
    name: str
    why: str
    is_removed: bool


class ScrubReport(msgspec.Struct, frozen=True):
    """The walk over one tier. `counts` is by area ("blocks", "records", "slots", "files") and verdict; `examples` are
    the first few findings of each verdict. `removed` is by area. `total` is how many blocks there are,
    where that is known beforehand.

    `state` is "running", "done", "cancelled" or "failed": the tier stopped answering.
    """

    counts: dict[str, dict[str, int]] = {}
    examples: list[ScrubFinding] = []
    removed: dict[str, int] = {}
    num_seen: int = 0
    num_bytes: int = 0
    total: int | None = None
    seconds: float = 0.0
    state: str = "running"


class VerifyReport(Message, frozen=True, tag=True):
    """By tier; of the last verification where none is running."""

    is_running: bool
    tiers: dict[str, ScrubReport]


class Stats(Message, frozen=True, tag=True): ...


class StatsReply(Message, frozen=True, tag=True):
    """The snapshot that `kvstore stats --json` prints; its form is documented in docs/stats.md."""

    stats: dict[str, object]


Request = (
    Ping
    | Attach
    | Detach
    | Lookup
    | Fetch
    | Release
    | Store
    | Commit
    | Hint
    | Report
    | Observe
    | DecisionGet
    | DecisionList
    | SessionGet
    | SessionPut
    | SessionList
    | SessionPin
    | SessionHint
    | SessionPrefetch
    | SessionDelete
    | Evict
    | Verify
    | VerifyStatus
    | VerifyCancel
    | Stats
)
Reply = (
    Pong
    | Attached
    | Done
    | Error
    | Found
    | Landed
    | Granted
    | Committed
    | Decisions
    | SessionFound
    | SessionSaved
    | Sessions
    | Prefetching
    | SessionDeleted
    | Evicted
    | VerifyReport
    | StatsReply
)

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_decision_decoder: msgspec.msgpack.Decoder[DecisionView] = msgspec.msgpack.Decoder(DecisionView)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(body: Message) -> bytes:
    """Raises ProtocolError (too_long, malformed) instead of making a body that the other side would refuse."""
    try:
        frame = _encoder.encode(body)
    except (UnicodeError, OverflowError) as error:
        raise ProtocolError(ErrorCode.MALFORMED, f"the message cannot be sent: {error}") from None
    if len(frame) > MAX_BODY_BYTES:
        _check_length(frame, MAX_BODY_BYTES if isinstance(body, Request) else MAX_REPLY_BYTES)
    return frame


def decode_request(frame: bytes) -> Request:
    """Raises ProtocolError (too_long, malformed)."""
    _check_length(frame, MAX_BODY_BYTES)
    return _decode(_request_decoder, frame)


def decode_reply(frame: bytes) -> Reply:
    """Raises ProtocolError (too_long, malformed)."""
    _check_length(frame, MAX_REPLY_BYTES)
    return _decode(_reply_decoder, frame)


def decision_view(encoded: bytes) -> DecisionView:
    """Raises ProtocolError (malformed)."""
    return _decode(_decision_decoder, encoded)


def _check_length(frame: bytes, max_bytes: int) -> None:
    if len(frame) > max_bytes:
        raise ProtocolError(ErrorCode.TOO_LONG, f"a body of {len(frame)} bytes, at most {max_bytes} are allowed")


def _decode(decoder: "msgspec.msgpack.Decoder[_T]", frame: bytes) -> _T:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ProtocolError(ErrorCode.MALFORMED, f"the body is no known message: {error}") from None
