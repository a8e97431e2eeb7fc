"""Runs of blocks, drawn and at random."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.base import Ids
from policies.eviction.runs import NONE, Runs
from tests.support.trees import Tree


def ids(*blocks: int) -> Ids:
    return np.array(blocks, dtype=np.int32)


def held(*prefixes: tuple[int, ...]) -> Runs:
    """Each prefix is a run that continues its first block's parent: `(parent, block, …)`."""
    tree = Tree()
    runs = Runs(tree)
    for parent, *blocks in prefixes:
        for block, above in zip(blocks, [parent, *blocks], strict=False):
            tree.parents[block] = above
        runs.grow(max(blocks) + 1)
        runs.add(ids(*blocks), is_tail=False)
    return runs


def drawn(runs: Runs) -> set[tuple[int, ...]]:
    """All runs, each from its first block on."""
    found = set(runs.at[runs.at != NONE].tolist())
    return {tuple(reversed(runs.blocks(run, 1000))) for run in found}


def leaves(runs: Runs) -> set[int]:
    """The last blocks of the leaves."""
    return set(runs.last[runs.leaves.some(1000, np.random.default_rng(0))].tolist())


def test_who_continues_a_run_in_the_middle_cuts_it() -> None:
    runs = held((-1, 1, 2, 3, 4, 5), (3, 6, 7))
    assert drawn(runs) == {(1, 2, 3), (4, 5), (6, 7)}
    assert leaves(runs) == {5, 7}
    assert runs.kids[runs.at[1]] == 2
    assert runs.is_shared[runs.at[1]] and not runs.is_shared[runs.at[4]]


def test_who_uses_the_beginning_of_a_run_cuts_it() -> None:
    runs = held((-1, 1, 2, 3))
    runs.used_s[runs.at[1]] = 7.0
    path, ends = runs.path(ids(1, 2))
    assert (path, ends) == ([int(runs.at[1])], [2])
    assert drawn(runs) == {(1, 2), (3,)}
    assert runs.used_s[runs.at[3]] == 7.0
    assert leaves(runs) == {3}


def test_what_is_cut_is_as_deep_as_before() -> None:
    runs = held((-1, 1, 2, 3, 4, 5), (5, 6, 7))
    runs.path(ids(1, 2))
    assert runs.depths(ids(1, 2, 3, 4, 5, 6, 7), np.arange(7)).tolist() == [1, 2, 3, 4, 5, 1, 2]
    assert runs.depths(ids(3, 4, 5, 7), np.array([1, 3])).tolist() == [4, 2]


def test_what_only_one_continues_can_be_joined() -> None:
    runs = held((-1, 1, 2), (2, 3, 4), (4, 5))
    path, ends = runs.path(ids(1, 2, 3, 4))
    assert runs.join(path, ends, ids(1, 2, 3, 4)) == [int(runs.at[1])]
    assert drawn(runs) == {(1, 2, 3, 4), (5,)}
    path, ends = runs.path(ids(1, 2, 3, 4, 5))
    runs.join(path, ends, ids(1, 2, 3, 4, 5))
    assert drawn(runs) == {(1, 2, 3, 4, 5)}
    assert leaves(runs) == {5}


def test_a_run_whose_last_continuation_left_is_a_leaf() -> None:
    runs = held((-1, 1, 2), (2, 3), (2, 4))
    runs.remove(3)
    assert leaves(runs) == {4}
    runs.remove_many(ids(4, 2), runs.starts(ids(4, 2)))
    assert drawn(runs) == {(1,)}
    assert leaves(runs) == {1}
    assert runs.num_blocks == 1


def test_a_block_in_the_middle_can_be_lost() -> None:
    runs = held((-1, 1, 2, 3), (3, 4))
    runs.remove(2)
    assert drawn(runs) == {(1,), (3,), (4,)}
    assert leaves(runs) == {1, 4}
    runs.remove(3)
    assert drawn(runs) == {(1,), (4,)}


@pytest.mark.parametrize("at_once", [False, True])
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 60))
def test_every_block_is_in_one_run_and_leaves_have_no_children(at_once: bool, seed: int, steps: int) -> None:
    choice = random.Random(seed)
    tree = Tree()
    runs = Runs(tree)
    runs.grow(1000)
    for step in range(steps):
        kept = sorted(tree.held)
        if not kept or choice.random() < 0.5:
            new = list(range(10 * step, 10 * step + choice.randint(1, 5)))
            parent = choice.choice([-1, *kept])
            for block, above in zip(new, [parent, *new], strict=False):
                tree.parents[block] = above
            tree.held.update(new)
            runs.add(ids(*new), is_tail=choice.random() < 0.3)
        elif choice.random() < 0.5:
            path = [choice.choice(kept)]
            while tree.parents[path[-1]] in tree.held:
                path.append(tree.parents[path[-1]])
            path.reverse()
            found, ends = runs.path(ids(*path))
            runs.join(found, ends, ids(*path))
        else:
            gone = []
            for _ in range(choice.randint(1, 6)):
                ends_of = [block for block in sorted(tree.held) if not tree.children(block)]
                if ends_of:
                    gone.append(choice.choice(ends_of))
                    tree.held.discard(gone[-1])
            if at_once:
                runs.remove_many(ids(*gone), runs.starts(ids(*gone)))
            else:
                for block in gone:
                    runs.remove(block)
        found_blocks = [block for run in drawn(runs) for block in run]
        assert sorted(found_blocks) == sorted(tree.held)
        assert runs.num_blocks == len(tree.held)
        assert leaves(runs) == {block for block in tree.held if not tree.children(block)}
