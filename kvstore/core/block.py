"""What is known of one block beside its bytes, and the header that travels with the bytes outside of RAM.

A stored record is one header page followed by the payload, in the SSD tier and in S3 alike:

    0        4096                    4096 + payload_bytes
    | header | payload               |

The header is a whole page so that the payload of a page-aligned record is page-aligned too and one direct
read can take header and payload to two aligned places.
"""

import struct
from dataclasses import dataclass

import xxhash

from kvstore.core.errors import CorruptBlock
from kvstore.core.key import KEY_BYTES, BlockKey

HEADER_BYTES = 4096
FORMAT_VERSION = 1
_MAGIC = b"KVBLOCK\n"
# magic, format version, depth, namespace digest, key, parent, payload length, payload checksum
_FIELDS = struct.Struct("<8sII32s32s32sQQ")
_CHECKSUM = struct.Struct("<Q")


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


def checksum(payload: bytes | bytearray | memoryview) -> int:
    """Return the 64-bit xxh3 of the payload: guards against faults, not against forgers."""
    return xxhash.xxh3_64_intdigest(payload)


def encode_header(meta: BlockMeta, payload_checksum: int) -> bytes:
    """Return the HEADER_BYTES bytes that go in front of the payload."""
    packed = _FIELDS.pack(
        _MAGIC,
        FORMAT_VERSION,
        meta.depth,
        meta.namespace,
        meta.key,
        meta.parent,
        meta.payload_bytes,
        payload_checksum,
    )
    sealed = packed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed))
    return sealed.ljust(HEADER_BYTES, b"\0")


def decode_header(header: bytes | memoryview) -> tuple[BlockMeta, int]:
    """Return the meta and the payload checksum a header states. Raises CorruptBlock if it is not one of ours."""
    end = _FIELDS.size
    if len(header) < end + _CHECKSUM.size:
        raise CorruptBlock("the record is shorter than a header")
    packed = bytes(header[:end])
    (seal,) = _CHECKSUM.unpack(header[end : end + _CHECKSUM.size])
    magic, version, depth, namespace, key, parent, payload_bytes, payload_checksum = _FIELDS.unpack(packed)
    if magic != _MAGIC or seal != xxhash.xxh3_64_intdigest(packed):
        raise CorruptBlock("the header is damaged or not a header")
    if version != FORMAT_VERSION:
        raise CorruptBlock(f"the header has format version {version}, this build reads {FORMAT_VERSION}")
    return BlockMeta(BlockKey(key), BlockKey(parent), namespace, depth, payload_bytes), payload_checksum


def verify(meta: BlockMeta, header: bytes | memoryview, payload: bytes | bytearray | memoryview) -> None:
    """Check that header and payload are the block `meta` and nothing else. Raises CorruptBlock, saying what differs."""
    found, payload_checksum = decode_header(header)
    if found != meta:
        raise CorruptBlock("the record holds another block")
    if len(payload) != meta.payload_bytes:
        raise CorruptBlock(f"the payload has {len(payload)} bytes, expected {meta.payload_bytes}")
    if checksum(payload) != payload_checksum:
        raise CorruptBlock("the payload does not match its checksum")


assert _FIELDS.size + _CHECKSUM.size <= HEADER_BYTES and KEY_BYTES == 32
