"""LRU, leaf first: exact orders, and what every eviction policy promises, on random trees."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.base import Ids
from policies.eviction import lru
from policies.eviction.lru import Lru
from policies.eviction.queue import MomentQueue, Moments

BLOCK_BYTES = 100


class Tree:
    """An EvictableView over one tier that holds trees of blocks, and the policy's caller."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}
        self.held: set[int] = set()
        self.stuck: set[int] = set()
        self.sizes: dict[int, int] = {}
        self.num_questions = 0
        self.policy = Lru(self)

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


def test_the_coldest_prefix_goes_first_and_from_its_tail() -> None:
    tree = Tree()
    tree.insert([1, 2, 3])
    tree.insert([11, 12])
    assert tree.evict(4) == [3, 2, 1, 12]
    assert tree.evict(1) == [11]


def test_a_prefix_that_came_in_block_by_block_goes_as_a_whole_before_a_hotter_one() -> None:
    """Decoded blocks, and blocks copied to SSD, come one at a time, head first, so each was hotter than its parent; a
    walk from the cold end then skipped all heads and took the tails of every prefix before the head of the coldest."""
    tree = Tree()
    for block in (1, 2, 3):
        tree.insert([block], block - 1 if block > 1 else -1)
    for block in (11, 12, 13):
        tree.insert([block], block - 1 if block > 11 else -1)
    assert tree.evict(3) == [3, 2, 1]
    assert tree.evict(3) == [13, 12, 11]


def test_using_a_prefix_again_keeps_it_and_its_shared_head() -> None:
    tree = Tree()
    tree.insert([1, 2])
    tree.insert([3], 2)
    tree.insert([4], 2)
    tree.policy.on_access([1, 2, 3])
    assert tree.evict(1) == [4]
    assert tree.evict(3) == [3, 2, 1]


def test_a_head_that_was_used_without_its_tail_outlives_the_tail() -> None:
    tree = Tree()
    tree.insert([1, 2, 3, 4])
    tree.insert([11, 12])
    tree.policy.on_access([1, 2])
    assert tree.evict(4) == [4, 3, 12, 11]


def test_nothing_is_named_where_not_enough_can_be_freed() -> None:
    tree = Tree()
    tree.insert([1, 2, 3])
    tree.stuck = {2}
    assert tree.policy.victims(2 * BLOCK_BYTES) == []
    assert tree.policy.victims(BLOCK_BYTES) == [3]
    tree.stuck = set()
    assert tree.evict(3) == [3, 2, 1]


def test_victims_that_were_not_removed_are_named_again() -> None:
    tree = Tree()
    tree.insert([1, 2, 3])
    assert tree.policy.victims(2 * BLOCK_BYTES) == tree.policy.victims(2 * BLOCK_BYTES) == [3, 2]
    tree.insert([4], 3)
    assert tree.evict(4) == [4, 3, 2, 1]


def test_a_search_among_leaves_that_must_stay_gives_up_and_goes_on_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything in RAM waiting for the disk, each store walked over all of it while the control thread stood."""
    monkeypatch.setattr(lru, "_MAX_PASSED", 10)
    tree = Tree()
    for block in range(35):
        tree.insert([block])
    tree.stuck = set(range(30))
    found = []
    for _ in range(4):
        tree.num_questions = 0
        found += tree.evict(1)
        assert tree.num_questions <= 11
    assert found == [30]


def test_the_queue_does_not_grow_with_what_comes_and_goes() -> None:
    tree = Tree()
    for _ in range(50):
        for block in range(100):
            tree.insert([block])
        for block in range(100):
            tree.remove(block)
    assert len(tree.policy) == 0
    assert len(tree.policy._leaves._line_blocks) + len(tree.policy._leaves._heap) < 5000


def test_many_leaves_that_were_used_since_are_put_right_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart all blocks of sessions are used in the order of their last turns; the first search for victims
    then moved each leaf to its new place one by one, three seconds for a million."""
    sorted_at: list[int] = []
    sort = MomentQueue.sort

    def counted(queue: MomentQueue, not_before: Moments) -> None:
        sorted_at.append(len(queue))
        sort(queue, not_before)

    monkeypatch.setattr(MomentQueue, "sort", counted)
    monkeypatch.setattr(lru, "_MAX_MOVED", 10)
    tree = Tree()
    for head in range(0, 100, 2):
        tree.insert([head, head + 1])
    order = random.Random(3).sample(range(0, 100, 2), 50)
    for head in order:
        tree.policy.on_access([head, head + 1])
    assert tree.evict(100) == [block for head in order for block in (head + 1, head)]
    assert len(sorted_at) == 1


def test_accesses_to_blocks_of_another_tier_are_passed_over() -> None:
    tree = Tree()
    tree.insert([1])
    tree.policy.on_access([5_000, 7, 1])
    tree.policy.on_remove(9)
    tree.policy.on_remove(6_000)
    assert len(tree.policy) == 1 and tree.evict(1) == [1]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    verbs = st.sampled_from(["insert", "insert", "access", "remove", "evict", "pin"])
    return draw(st.lists(st.tuples(verbs, st.integers(0, 30), st.integers(0, 2**16)), max_size=60))


@given(histories())
def test_victims_are_all_or_nothing_and_leaves_first_whatever_came_before(history: list[tuple[str, int, int]]) -> None:
    tree = Tree()
    for verb, number, noise in history:
        choice = random.Random(noise)
        held = sorted(tree.held)
        if verb == "insert":
            free = [block for block in range(40) if block not in tree.held][: 1 + number % 4]
            if free:
                tree.insert(free, choice.choice([-1, *held]))
                tree.sizes.update({block: choice.choice((50, 100, 300)) for block in free})
        elif verb == "access" and held:
            tree.policy.on_access(choice.sample(held, min(len(held), 1 + number % 5)))
        elif verb == "remove" and held:
            leaves = [block for block in held if not tree.children(block)]
            tree.remove(choice.choice(leaves))
        elif verb == "pin":
            tree.stuck = set(choice.sample(held, len(held) // 3))
        else:
            check_eviction(tree, 1 + 40 * number)
        assert len(tree.policy) == len(tree.held)
    tree.stuck = set()
    check_eviction(tree, sum(tree.size_bytes(block) for block in tree.held) or 1)
    assert not tree.held


def check_eviction(tree: Tree, bytes_needed: int) -> None:
    before = set(tree.held)
    victims = tree.policy.victims(bytes_needed)
    assert tree.held == before and len(set(victims)) == len(victims) and set(victims) <= before - tree.stuck
    if not victims:
        assert freeable_bytes(tree) < bytes_needed
        return
    assert sum(tree.size_bytes(block) for block in victims) >= bytes_needed
    assert sum(tree.size_bytes(block) for block in victims[:-1]) < bytes_needed
    for block in victims:
        assert tree.children(block) == 0, "a block went before a child of it"
        tree.remove(block)


def freeable_bytes(tree: Tree) -> int:
    """All that has no descendant which must stay."""
    held, freed = set(tree.held), 0
    while True:
        leaves = [b for b in held - tree.stuck if not any(tree.parents[other] == b for other in held)]
        if not leaves:
            return freed
        freed += sum(tree.size_bytes(block) for block in leaves)
        held -= set(leaves)
