"""A made-up tier that holds trees of blocks, for the tests of eviction policies."""

from collections.abc import Callable, Sequence

import numpy as np

from policies.base import EvictionPolicy, Ids, Names
from policies.eviction.lru import Lru

BLOCK_BYTES = 100


class Tree:
    """An EvictableView over one tier that holds trees of blocks, and the policy's caller."""

    def __init__(self, make_policy: Callable[["Tree"], EvictionPolicy] = Lru) -> None:
        self.parents: dict[int, int] = {}
        self.held: set[int] = set()
        self.stuck: set[int] = set()
        self.sizes: dict[int, int] = {}
        self.num_questions = 0
        self.now_s = 0.0
        self.policy = make_policy(self)

    def pinned(self, block: int) -> bool:
        self.num_questions += 1
        return block in self.stuck

    def children(self, block: int) -> int:
        return sum(self.parents[other] == block for other in self.held)

    def parent(self, block: int) -> int:
        return self.parents[block]

    def parents_of(self, blocks: Ids) -> Ids:
        return np.array([self.parent(int(block)) for block in blocks], dtype=np.int32)

    def children_of(self, blocks: Ids) -> Ids:
        return np.array([self.children(int(block)) for block in blocks], dtype=np.int32)

    def name(self, block: int) -> int:
        return block

    def names_of(self, blocks: Ids) -> Names:
        return blocks.astype(np.uint64)

    def clock(self) -> float:
        return self.now_s

    def size_bytes(self, block: int) -> int:
        return self.sizes.get(block, BLOCK_BYTES)

    def insert(self, blocks: Sequence[int], parent: int = -1) -> None:
        for block in blocks:
            self.parents[block] = parent
            self.held.add(block)
            parent = block
        self.policy.on_insert(blocks)

    def remove(self, block: int) -> None:
        self.policy.on_remove(block)
        self.held.discard(block)

    def evict(self, num_blocks: int) -> list[int]:
        victims = self.policy.victims(num_blocks * BLOCK_BYTES)
        for block in victims:
            self.remove(block)
        return victims
