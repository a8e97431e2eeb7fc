"""Blocks to store in tests: content that follows from a number, so that every mix-up shows."""

import hashlib
import random

from kvstore.core.block import BlockMeta
from kvstore.core.key import BlockKey
from tiers.base import Tier

NAMESPACE = hashlib.sha256(b"a namespace").digest()


def key(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"block %d" % number).digest())


def meta(number: int, payload_bytes: int = 8192) -> BlockMeta:
    """Return block `number` of one long prefix."""
    return BlockMeta(key(number), key(number - 1), NAMESPACE, number, payload_bytes)


def payload(block: BlockMeta, salt: int = 0) -> memoryview:
    """Return the bytes of that block; a copy with another `salt` differs."""
    return memoryview(random.Random(block.key + bytes([salt])).randbytes(block.payload_bytes))


def blank(block: BlockMeta) -> memoryview:
    """Return a place to read the block into."""
    return memoryview(bytearray(block.payload_bytes))


def recovered(tier: Tier) -> list[BlockMeta]:
    """Return all blocks that the tier says it kept, in its order."""
    return [meta for batch in tier.recover_batches() for meta in batch.metas()]
