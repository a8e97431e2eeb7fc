"""A set of which some can be drawn."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from policies.eviction.leaves import Leaves


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=80))
def test_it_holds_what_was_added_and_not_discarded(calls: list[tuple[bool, int]]) -> None:
    leaves, held = Leaves(10), set[int]()
    leaves.grow(61)
    for is_added, block in calls:
        (leaves.add if is_added else leaves.discard)(block)
        (held.add if is_added else held.discard)(block)
    assert len(leaves) == len(held)
    assert set(leaves.some(100, np.random.default_rng(0)).tolist()) == held


def test_a_draw_is_of_what_is_held_and_the_same_for_the_same_seed() -> None:
    leaves = Leaves(5_000)
    for block in range(5_000):
        leaves.add(block)
    drawn = leaves.some(200, np.random.default_rng(3))
    assert len(drawn) == 200 and len(set(drawn.tolist())) > 150
    assert set(drawn.tolist()) <= set(range(5_000))
    assert drawn.tolist() == leaves.some(200, np.random.default_rng(3)).tolist()
