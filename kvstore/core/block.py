"""What is known of one block beside its bytes, and the header that travels with the bytes outside of RAM.

A stored record is one header page followed by what was stored of the payload, in the SSD tier and in S3 alike:

    0        4096             4096 + stored_bytes
    | header | stored payload |

The header is a whole page so that the payload of a page-aligned record is page-aligned too and one direct
read can take header and payload to two aligned places. Its fields:

    | magic, version, depth, namespace, key, parent, payload_bytes, stored_bytes, codec, cipher, key id, salt, nonce |
    | checksum of the stored bytes | tag | seal: checksum of all before it | zeros |

Everything in the first line is what a cipher authenticates beside the bytes (`associated_data`); checksum and tag are
known only after it has run. The checksum is of the bytes as stored, so that damage shows without a key and without
decompressing. How payload and stored bytes turn into each other is in `tiers/codec.py`.
"""

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from kvstore.core.errors import CorruptBlock
from kvstore.core.key import KEY_BYTES, BlockKey

HEADER_BYTES: Final = 4096
FORMAT_VERSION: Final = 2
RAW: Final = 0
"""The `codec` of a record that holds the payload as it is."""
KEY_ID_BYTES: Final = 8
SALT_BYTES: Final = 16
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
_MAGIC = b"KVBLOCK\n"
_PLAIN, _AES_GCM = 0, 1
# magic, format version, depth, namespace digest, key, parent, payload length, stored length, codec, cipher,
# six zeros, key id, salt, nonce
_FIELDS = struct.Struct(f"<8sII32s32s32sQQBB6x{KEY_ID_BYTES}s{SALT_BYTES}s{NONCE_BYTES}s")
_CHECKSUM_AND_TAG = struct.Struct(f"<Q{TAG_BYTES}s")
_SEAL = struct.Struct("<Q")
_SEALED_BYTES = _FIELDS.size + _CHECKSUM_AND_TAG.size
_NO_TAG = bytes(TAG_BYTES)


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """The identity of one block: what a tier needs to store it and to know it again.

    `depth` is the block's index in its prefix (0 for the first), `parent` the key of the block before it, or
    the namespace's root; `payload_bytes` is the exact length of the KV bytes.
    """

    key: BlockKey
    parent: BlockKey
    namespace: bytes
    depth: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Sealing:
    """What one encryption was made with: the key by its id, the salt of its subkey, the nonce. None of it is secret."""

    key_id: bytes
    salt: bytes
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says of the `stored_bytes` bytes behind it. `sealing` is None where they are not encrypted, and
    then there is no `tag`; `codec` says what decompresses them (RAW: nothing)."""

    meta: BlockMeta
    stored_bytes: int
    checksum: int = 0
    codec: int = RAW
    sealing: Sealing | None = None
    tag: bytes = _NO_TAG


def checksum(data: bytes | bytearray | memoryview) -> int:
    """Return the 64-bit xxh3 of the bytes: guards against faults, not against forgers."""
    return xxhash.xxh3_64_intdigest(data)


Checksum: Final = xxhash.xxh3_64
"""The same of bytes that come in parts: `update(part)` for one after the other, then `intdigest()`."""


def associated_data(header: Header) -> bytes:
    """Return what a cipher must authenticate with the payload, so that no record can pass for another one."""
    meta, sealing = header.meta, header.sealing
    return _FIELDS.pack(
        _MAGIC,
        FORMAT_VERSION,
        meta.depth,
        meta.namespace,
        meta.key,
        meta.parent,
        meta.payload_bytes,
        header.stored_bytes,
        header.codec,
        _PLAIN if sealing is None else _AES_GCM,
        b"" if sealing is None else sealing.key_id,
        b"" if sealing is None else sealing.salt,
        b"" if sealing is None else sealing.nonce,
    )


def encode_header(header: Header) -> bytes:
    """Return the HEADER_BYTES bytes that go in front of the stored payload."""
    packed = associated_data(header) + _CHECKSUM_AND_TAG.pack(header.checksum, header.tag)
    return (packed + _SEAL.pack(checksum(packed))).ljust(HEADER_BYTES, b"\0")


def checksum_in(header: bytes) -> int:
    """Return the checksum that a header from `encode_header` states."""
    number: int = _CHECKSUM_AND_TAG.unpack_from(header, _FIELDS.size)[0]
    return number


def decode_header(data: bytes | bytearray | memoryview) -> Header:
    """Return what the first bytes of a record say. Raises CorruptBlock if they are no header of ours.

    What it returns holds together: `stored_bytes` is at most `payload_bytes`, and equal where the codec is RAW.
    """
    if len(data) < _SEALED_BYTES + _SEAL.size:
        raise CorruptBlock("the record is shorter than a header")
    packed = bytes(data[:_SEALED_BYTES])
    (seal,) = _SEAL.unpack_from(data, _SEALED_BYTES)
    magic, version, depth, namespace, key, parent, payload_bytes, stored_bytes, codec, cipher, key_id, salt, nonce = (
        _FIELDS.unpack_from(packed)
    )
    if magic != _MAGIC:
        raise CorruptBlock("it does not begin like a header")
    if version != FORMAT_VERSION:
        raise CorruptBlock(f"the header has format version {version}, this build reads {FORMAT_VERSION}")
    if seal != checksum(packed):
        raise CorruptBlock("the header is damaged")
    if stored_bytes > payload_bytes or (codec == RAW and stored_bytes != payload_bytes) or cipher > _AES_GCM:
        raise CorruptBlock("the header's fields do not fit together")
    payload_checksum, tag = _CHECKSUM_AND_TAG.unpack_from(packed, _FIELDS.size)
    meta = BlockMeta(BlockKey(key), BlockKey(parent), namespace, depth, payload_bytes)
    sealing = Sealing(key_id, salt, nonce) if cipher == _AES_GCM else None
    return Header(meta, stored_bytes, payload_checksum, codec, sealing, tag)


assert _SEALED_BYTES + _SEAL.size <= HEADER_BYTES and KEY_BYTES == 32
