"""What every eviction policy promises, on trees of blocks: policies/base.py."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policies.base import EvictionPolicy, Hint
from policies.eviction.belady import NOT_AGAIN, Belady
from policies.eviction.choice import NAMES, make
from tests.support.trees import BLOCK_BYTES, Tree

POLICIES = [*NAMES, "belady"]


def maker(name: str) -> Callable[[Tree], EvictionPolicy]:
    if name == "belady":
        # Made up, and wrong about parents, too: whatever is told, the promises hold.
        needed = np.random.default_rng(5).choice([3, 7, 20, NOT_AGAIN], 64)
        return lambda tree: Belady(tree, needed)
    return lambda tree: make(name, tree, tree.clock)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    verbs = st.sampled_from(["insert", "insert", "access", "request", "hint", "remove", "evict", "pin"])
    return draw(st.lists(st.tuples(verbs, st.integers(0, 30), st.integers(0, 2**16)), max_size=60))


@pytest.mark.parametrize("name", POLICIES)
@given(history=histories())
@example(history=[("insert", 1, 0), ("hint", 0, 0), ("insert", 3, 5), ("access", 14, 1045)])  # out of order
def test_victims_are_all_or_nothing_and_leaves_first_whatever_came_before(
    name: str, history: list[tuple[str, int, int]]
) -> None:
    """Also: pinned blocks are never named, and nothing is named twice or that has left."""
    tree = Tree(maker(name))
    live(tree, history)
    tree.stuck = set()
    check_eviction(tree, sum(tree.size_bytes(block) for block in tree.held) or 1)
    assert not tree.held


@pytest.mark.parametrize("name", POLICIES)
@given(history=histories())
def test_equal_histories_have_equal_victims(name: str, history: list[tuple[str, int, int]]) -> None:
    first, second = Tree(maker(name)), Tree(maker(name))
    assert live(first, history) == live(second, history)


@pytest.mark.parametrize("name", POLICIES)
def test_victims_that_were_not_removed_are_named_again(name: str) -> None:
    tree = Tree(maker(name))
    tree.insert([1, 2, 3])
    tree.insert([11, 12])
    asked = tree.policy.victims(2 * BLOCK_BYTES)
    assert tree.policy.victims(2 * BLOCK_BYTES) == asked
    assert len(tree.policy) == 5


@pytest.mark.parametrize("name", POLICIES)
def test_ids_of_other_tiers_and_empty_calls_are_passed_over(name: str) -> None:
    tree = Tree(maker(name))
    tree.insert([1])
    tree.policy.on_insert([])
    tree.policy.on_access([])
    tree.policy.on_access([5_000, 7, 1])
    tree.policy.on_remove(9)
    tree.policy.on_remove(6_000)
    assert len(tree.policy) == 1
    assert tree.policy.victims(2 * BLOCK_BYTES) == []
    assert tree.evict(1) == [1]
    assert len(tree.policy) == 0
    assert tree.policy.victims(1) == []


@pytest.mark.parametrize("name", POLICIES)
def test_an_id_may_come_back_as_another_block(name: str) -> None:
    tree = Tree(maker(name))
    tree.insert([1, 2])
    tree.policy.on_access([1, 2])
    assert tree.evict(2) == [2, 1]
    tree.insert([2])
    tree.insert([1], 2)
    assert tree.evict(2) == [1, 2]


def live(tree: Tree, history: list[tuple[str, int, int]]) -> list[list[int]]:
    """Do all that the history says; return what was evicted."""
    evicted = []
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
        elif verb == "request":
            names = np.array(choice.sample(range(40), 1 + number), dtype=np.uint64)
            tree.policy.on_request(names, choice.randrange(len(names) + 1))
        elif verb == "hint" and held:
            tree.policy.on_hint(held[noise % len(held) :], Hint(choice.choice((None, False, True)), number % 5 - 2))
        elif verb == "remove" and held:
            leaves = [block for block in held if not tree.children(block)]
            tree.remove(choice.choice(leaves))
        elif verb == "pin":
            tree.stuck = set(choice.sample(held, len(held) // 3))
        else:
            evicted.append(check_eviction(tree, 1 + 40 * number))
        tree.now_s += noise % 7
        assert len(tree.policy) == len(tree.held)
    return evicted


def check_eviction(tree: Tree, bytes_needed: int) -> list[int]:
    before = set(tree.held)
    victims = tree.policy.victims(bytes_needed)
    assert tree.held == before and len(set(victims)) == len(victims) and set(victims) <= before - tree.stuck
    if not victims:
        assert freeable_bytes(tree) < bytes_needed
        return []
    assert sum(tree.size_bytes(block) for block in victims) >= bytes_needed
    assert sum(tree.size_bytes(block) for block in victims[:-1]) < bytes_needed
    for block in victims:
        assert tree.children(block) == 0, "a block went before a child of it"
        tree.remove(block)
    return victims


def freeable_bytes(tree: Tree) -> int:
    """All that has no descendant which must stay."""
    held, freed = set(tree.held), 0
    while True:
        leaves = [b for b in held - tree.stuck if not any(tree.parents[other] == b for other in held)]
        if not leaves:
            return freed
        freed += sum(tree.size_bytes(block) for block in leaves)
        held -= set(leaves)


@pytest.mark.parametrize("name", NAMES)
def test_what_has_ended_goes_before_what_was_used_longer_ago(name: str) -> None:
    tree = Tree(maker(name))
    tree.insert([1, 2])
    tree.insert([11, 12])
    tree.policy.on_access([11, 12])
    tree.policy.on_hint([11, 12], Hint(returns=False))
    assert sorted(tree.evict(2)) == [11, 12]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_expected_outlasts_what_was_used_later(name: str) -> None:
    tree = Tree(maker(name))
    tree.insert([1, 2])
    tree.policy.on_hint([1, 2], Hint(returns=True))
    tree.insert([11, 12])
    tree.insert([21, 22])
    assert sorted(tree.evict(4)) == [11, 12, 21, 22]


@pytest.mark.parametrize("name", NAMES)
def test_a_higher_priority_stays_longer(name: str) -> None:
    tree = Tree(maker(name))
    tree.insert([1, 2])
    tree.policy.on_hint([1, 2], Hint(priority=1))
    tree.insert([11, 12])
    tree.insert([21, 22])
    tree.policy.on_hint([21, 22], Hint(priority=-1))
    assert sorted(tree.evict(2)) == [21, 22]
    assert sorted(tree.evict(2)) == [11, 12]


@pytest.mark.parametrize("name", NAMES)
def test_an_end_leaves_alone_what_others_continue(name: str) -> None:
    tree = Tree(maker(name))
    tree.insert([1, 2, 3])
    tree.insert([4], 2)
    tree.insert([11])
    tree.policy.on_hint([1, 2, 3], Hint(returns=False))
    assert tree.evict(1) == [3]
    assert 2 in tree.held and 4 in tree.held


@pytest.mark.parametrize("name", NAMES)
def test_a_hint_holds_until_its_blocks_are_used_again(name: str) -> None:
    tree = Tree(maker(name))
    tree.insert([1])
    tree.insert([11])
    tree.policy.on_hint([1], Hint(returns=False))
    tree.policy.on_access([1])
    tree.policy.on_hint([11], Hint(returns=False))
    assert tree.evict(1) == [11]
