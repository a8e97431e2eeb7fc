"""What every eviction policy promises, on trees of blocks: policies/base.py."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.base import EvictionPolicy
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
    verbs = st.sampled_from(["insert", "insert", "access", "remove", "evict", "pin"])
    return draw(st.lists(st.tuples(verbs, st.integers(0, 30), st.integers(0, 2**16)), max_size=60))


@pytest.mark.parametrize("name", POLICIES)
@given(history=histories())
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
