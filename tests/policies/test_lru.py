"""LRU, leaf first: exact orders."""

import random

import pytest

from policies.eviction import leafwise
from policies.eviction.lru import Lru
from policies.eviction.queue import MomentQueue, Moments
from tests.support.trees import BLOCK_BYTES, Tree


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
    monkeypatch.setattr(leafwise, "_MAX_PASSED", 10)
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
    assert isinstance(tree.policy, Lru)
    queue = tree.policy._queues[0]
    assert len(queue._line_blocks) + len(queue._heap) < 5000


def test_many_leaves_that_were_used_since_are_put_right_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart all blocks of sessions are used in the order of their last turns; the first search for victims
    then moved each leaf to its new place one by one, three seconds for a million."""
    sorted_at: list[int] = []
    sort = MomentQueue.sort

    def counted(queue: MomentQueue, not_before: Moments) -> None:
        sorted_at.append(len(queue))
        sort(queue, not_before)

    monkeypatch.setattr(MomentQueue, "sort", counted)
    monkeypatch.setattr(leafwise, "_MAX_MOVED", 10)
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
