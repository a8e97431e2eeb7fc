"""The control protocol between clients and the daemon: what a frame looks like and which messages exist.

A stream of messages over a unix socket, each a fixed header and a msgpack body. Bytes of blocks never travel here;
they lie in the shared region, and messages name places in it.

    header: magic "KV" | u16 version | u32 bytes of the body | u64 boot epoch | u64 incarnation | u64 sequence

Up to the bytes of the body the header is the same in all versions, so that another version can be refused in words.

The epoch names one start of the daemon, the incarnation one attached engine. A message with another epoch is
refused with `stale_epoch`, and the client attaches again. Requests that concern no shared memory (statistics,
sessions) may come from a client that is not attached: it leaves epoch and incarnation 0. A reply carries the
sequence of its request; a fetch is answered by several messages, all others by exactly one. Where a request has the
incarnation a reply has one more than the number of the CPU that the daemon ran on (0: unknown), from which a client
tells whether it keeps the daemon from running while it looks for an answer.

Covers headers, encoding, and which message is a request and which a reply; what each says is in `kvstore/messages/`.
"""

import struct
from typing import Final, NewType, TypeVar

import msgspec

from kvstore.core.errors import ProtocolError
from kvstore.messages.base import Message, Priority, TokenId
from kvstore.messages.blocks import (
    Attach,
    Attached,
    Commit,
    Committed,
    Damaged,
    Detach,
    Done,
    Error,
    Fetch,
    Found,
    Granted,
    Landed,
    Lookup,
    NamespaceSpec,
    Ping,
    Pong,
    Release,
    Slot,
    Store,
)
from kvstore.messages.operation import (
    Evict,
    Evicted,
    ScrubFinding,
    ScrubReport,
    Stats,
    StatsReply,
    Verify,
    VerifyCancel,
    VerifyReport,
    VerifyStatus,
)
from kvstore.messages.reports import DecisionGet, DecisionList, Decisions, DecisionView, Hint, Observe, Report
from kvstore.messages.sessions import (
    ChatMessage,
    Prefetching,
    SessionDelete,
    SessionDeleted,
    SessionFound,
    SessionGet,
    SessionHint,
    SessionList,
    SessionPin,
    SessionPrefetch,
    SessionPut,
    Sessions,
    SessionSaved,
    SessionView,
)

# Whoever speaks the protocol finds all of it here.
__all__ = [
    "HEADER_BYTES",
    "MAX_BODY_BYTES",
    "MAX_KEYS",
    "MAX_REPLY_BYTES",
    "PROTOCOL_VERSION",
    "Attach",
    "Attached",
    "ChatMessage",
    "Commit",
    "Committed",
    "Damaged",
    "DecisionGet",
    "DecisionList",
    "DecisionView",
    "Decisions",
    "Detach",
    "Done",
    "Epoch",
    "Error",
    "ErrorCode",
    "Evict",
    "Evicted",
    "Fetch",
    "Found",
    "Granted",
    "Header",
    "Hint",
    "Incarnation",
    "Landed",
    "Lookup",
    "Message",
    "NamespaceSpec",
    "Observe",
    "Ping",
    "Pong",
    "Prefetching",
    "Priority",
    "Release",
    "Reply",
    "Report",
    "Request",
    "ScrubFinding",
    "ScrubReport",
    "SessionDelete",
    "SessionDeleted",
    "SessionFound",
    "SessionGet",
    "SessionHint",
    "SessionList",
    "SessionPin",
    "SessionPrefetch",
    "SessionPut",
    "SessionSaved",
    "SessionView",
    "Sessions",
    "Slot",
    "Stats",
    "StatsReply",
    "Store",
    "TokenId",
    "Verify",
    "VerifyCancel",
    "VerifyReport",
    "VerifyStatus",
    "decision_view",
    "decode_header",
    "decode_reply",
    "decode_request",
    "encode",
    "pack",
]

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
    """The beginning of every message; `body_bytes` is what a message that has come said of itself. In a reply
    `incarnation` is not one, see the module."""

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


Request = (
    Ping
    | Attach
    | Detach
    | Lookup
    | Fetch
    | Release
    | Damaged
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
