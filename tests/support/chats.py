"""Prefixes of small blocks for tests of the store: keys from token ids, and bytes that follow from the key."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.core.key import BlockKey, Namespace, chain_keys

BLOCK_TOKENS = 4


def namespace(model: str = "model", block_bytes: int = 8192, tenant: str = "") -> Namespace:
    return Namespace(model, "weights", "float32", "LKTHD-1", BLOCK_TOKENS, block_bytes, 1, 1, 64, tenant=tenant)


@dataclass(frozen=True, slots=True)
class Prefix:
    """`num_blocks` blocks of tokens that follow from `seed`; two of one seed share what both have."""

    namespace: Namespace
    seed: int
    num_blocks: int

    @property
    def tokens(self) -> list[int]:
        choice = random.Random(self.seed)
        return [choice.randrange(50_000) for _ in range(self.num_blocks * BLOCK_TOKENS)]

    @property
    def keys(self) -> list[BlockKey]:
        return chain_keys(self.namespace, self.tokens)


def payload(key: BlockKey, num_bytes: int = 8192) -> bytes:
    """Return the bytes of the block of this key, so that every mix-up shows."""
    return random.Random(key).randbytes(num_bytes)


def parents(namespace: Namespace, keys: Sequence[BlockKey]) -> list[BlockKey]:
    """Return the parent of each block of a prefix."""
    return [namespace.root(), *keys[:-1]]
