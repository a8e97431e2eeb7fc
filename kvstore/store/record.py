"""The stored form of a session, and the names under which tiers keep it."""

import hashlib

import msgspec

from kvstore.core.block import BlockMeta
from kvstore.core.errors import ProtocolError
from kvstore.core.key import BlockKey, split_keys
from kvstore.wire import ChatMessage, ErrorCode

RECORD_PREFIX = "sessions/"
RECORD_VERSION = 1
_MAX_ID_CHARS = 200

SessionKey = tuple[str, bytes, str]
"""(tenant, namespace digest, id): who guesses an id of another tenant or model finds nothing."""


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One session at one revision. It holds the user's text, so it goes only where blocks go, with mode 0600.

    `s3_blocks` is how many leading blocks were in the bucket when the record was put there; `s3_revision` and
    `s3_etag` are the local copy's memory of what it last put or saw there.
    """

    version: int = RECORD_VERSION
    id: str
    tenant: str
    namespace: bytes
    root: bytes
    model: str
    payload_bytes: int
    revision: int
    messages: list[ChatMessage]
    keys: bytes
    created_s: float
    last_turn_s: float
    ttl_s: float
    pinned: bool = False
    forked_from: str = ""
    s3_blocks: int = 0
    s3_revision: int = 0
    s3_etag: str = ""

    @property
    def session_key(self) -> SessionKey:
        return (self.tenant, self.namespace, self.id)

    def metas(self) -> list[BlockMeta]:
        """The identities of the session's blocks, in order."""
        parent = BlockKey(self.root)
        metas = []
        for depth, key in enumerate(split_keys(self.keys)):
            metas.append(BlockMeta(key, parent, self.namespace, depth, self.payload_bytes))
            parent = key
        return metas

    def continues(self, other: "SessionRecord") -> bool:
        """Whether this is a later state of the same conversation, so nothing of `other` is lost by replacing it."""
        mine = [(message.role, message.content, message.token_ids) for message in self.messages]
        theirs = [(message.role, message.content, message.token_ids) for message in other.messages]
        return mine[: len(theirs)] == theirs


def record_name(key: SessionKey) -> str:
    tenant, namespace, session_id = key
    hasher = hashlib.sha256()
    for part in (tenant.encode(), namespace, session_id.encode()):
        hasher.update(len(part).to_bytes(8, "little") + part)
    return RECORD_PREFIX + hasher.hexdigest()


def encode(record: SessionRecord) -> bytes:
    return msgspec.msgpack.encode(record)


def decode(data: bytes) -> SessionRecord | None:
    """Return None for what is no session record of this version: it counts as missing, never as a fault of ours."""
    try:
        record = _decoder.decode(data)
        record.metas()
    except (msgspec.DecodeError, ValueError):
        return None
    return record if record.version == RECORD_VERSION else None


def check_id(session_id: str) -> None:
    """Raise ProtocolError (bad_request) unless the id is 1 to 200 printable characters."""
    if not 0 < len(session_id) <= _MAX_ID_CHARS or not session_id.isprintable():
        raise ProtocolError(ErrorCode.BAD_REQUEST, f"a session id has 1 to {_MAX_ID_CHARS} printable characters")


_decoder = msgspec.msgpack.Decoder(SessionRecord)
