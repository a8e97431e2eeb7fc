"""The stored form of a session, and the names under which tiers keep it.

    magic, version | xxh3 of what follows | the record as msgpack

The checksum is ours, since neither LMDB nor every bucket verifies what it gives back, and a flipped bit in a token id
would send a chat on with another prompt.
"""

import hashlib
import math
import struct

import msgspec
import xxhash

from kvstore.core.block import BlockMeta
from kvstore.core.errors import ProtocolError
from kvstore.core.key import KEY_BYTES, BlockKey, split_keys
from kvstore.wire import ChatMessage, ErrorCode

RECORD_PREFIX = "sessions/"
_MAGIC = b"KVSESS1\n"
_SEAL = struct.Struct("<8sQ")
_MAX_ID_CHARS = 200
MAX_REVISION = 1 << 53
MAX_TTL_S = 1e10

SessionKey = tuple[str, bytes, str]
"""(tenant, namespace digest, id): who guesses an id of another tenant or model finds nothing."""


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One session at one revision. It holds the user's text, so it goes only where blocks go, with mode 0600.

    `s3_blocks` is how many leading blocks were in the bucket when the record was put there; `s3_revision` and
    `s3_etag` are the local copy's memory of what it last put or saw there. So is `bucket_revision`: which revision this
    state is in the bucket, 0 where it is not there. What a daemon takes over from there it numbers anew where it must
    (`session_read.py`), and deletions are told in the bucket's numbers.
    """

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
    bucket_revision: int = 0

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
        return self.messages[: len(other.messages)] == other.messages


def record_name(key: SessionKey) -> str:
    tenant, namespace, session_id = key
    hasher = hashlib.sha256()
    for part in (tenant.encode(), namespace, session_id.encode()):
        hasher.update(len(part).to_bytes(8, "little") + part)
    return RECORD_PREFIX + hasher.hexdigest()


def seal(magic: bytes, body: bytes) -> bytes:
    return _SEAL.pack(magic, xxhash.xxh3_64_intdigest(body)) + body


def unseal(magic: bytes, data: bytes) -> bytes | None:
    """Return the body, None where `data` does not begin with this magic of 8 bytes, or is not whole."""
    if len(data) < _SEAL.size:
        return None
    found, checksum = _SEAL.unpack_from(data)
    body = data[_SEAL.size :]
    return body if found == magic and checksum == xxhash.xxh3_64_intdigest(body) else None


def encode(record: SessionRecord) -> bytes:
    return seal(_MAGIC, msgspec.msgpack.encode(record))


def decode(data: bytes) -> SessionRecord | None:
    """Return None for what is no session record of this version, or not whole: it counts as missing, never as a fault
    of ours."""
    body = unseal(_MAGIC, data)
    if body is None:
        return None
    try:
        record = _decoder.decode(body)
    except (msgspec.DecodeError, ValueError):
        return None
    return record if _is_sound(record) else None


def check_id(session_id: str) -> None:
    """Raise ProtocolError (bad_request) unless the id is 1 to 200 printable characters."""
    if not 0 < len(session_id) <= _MAX_ID_CHARS or not session_id.isprintable():
        raise ProtocolError(ErrorCode.BAD_REQUEST, f"a session id has 1 to {_MAX_ID_CHARS} printable characters")


def check_tenant(tenant: str) -> None:
    """Raise ProtocolError (bad_request) unless the tenant has at most 200 printable characters."""
    if len(tenant) > _MAX_ID_CHARS or not tenant.isprintable():
        raise ProtocolError(ErrorCode.BAD_REQUEST, f"a tenant has at most {_MAX_ID_CHARS} printable characters")


def _is_sound(record: SessionRecord) -> bool:
    """Whether the rest of the store may rely on it, whoever wrote it."""
    try:
        check_id(record.id)
        check_tenant(record.tenant)
    except ProtocolError:
        return False
    return (
        len(record.namespace) == len(record.root) == KEY_BYTES
        and len(record.keys) % KEY_BYTES == 0
        and record.payload_bytes > 0
        and 0 <= record.revision < MAX_REVISION
        and record.s3_blocks >= 0
        and 0.0 <= record.ttl_s <= MAX_TTL_S
        and math.isfinite(record.created_s)
        and math.isfinite(record.last_turn_s)
    )


_decoder = msgspec.msgpack.Decoder(SessionRecord)
