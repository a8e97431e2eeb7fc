"""What is remembered of blocks that left."""

import numpy as np

from policies.base import Names
from policies.eviction.past import FORGOTTEN, Past
from policies.eviction.worth import LIFE_BITS


def names(*numbers: int) -> Names:
    return np.array(numbers, dtype=np.uint64)


def put(past: Past, blocks: Names, life: int) -> None:
    """As number 1, 2 … of one run."""
    past.put(blocks, (life << LIFE_BITS) + np.arange(1, len(blocks) + 1))


def number(life: int, depth: int) -> int:
    return (life << LIFE_BITS) + depth


def test_blocks_are_known_up_to_the_first_that_is_not() -> None:
    past = Past()
    put(past, names(1, 2, 3), 7)
    put(past, names(4, 6), 8)
    assert past.parts(names(1, 2, 3, 4, 5, 6)) == [(number(7, 1), 3), (number(8, 1), 4)]
    assert past.parts(names(2, 3)) == [(number(7, 2), 2)]
    assert past.parts(names(5, 1)) == [] == Past().parts(names(0))


def test_what_left_again_is_what_it_was_last() -> None:
    past = Past()
    put(past, names(1, 2), 7)
    put(past, names(1), 9)
    assert past.parts(names(1, 2)) == [(number(9, 1), 1), (number(7, 2), 2)]


def test_what_is_to_be_forgotten_is_not_known_and_neither_is_what_was_in_an_older_life() -> None:
    past = Past()
    put(past, names(1, 2, 3), 7)
    past.put(names(2), np.array([FORGOTTEN]))
    assert past.parts(names(1, 2, 3)) == [(number(7, 1), 1)]
    assert past.parts(names(1, 2, 3), oldest_life=7) == [(number(7, 1), 1)]
    assert past.parts(names(1, 2, 3), oldest_life=8) == []


def test_a_name_may_be_zero() -> None:
    past = Past()
    put(past, names(5), 7)
    assert past.parts(names(5, 0)) == [(number(7, 1), 1)]
    put(past, names(0), 8)
    assert past.parts(names(0, 5)) == [(number(8, 1), 1), (number(7, 1), 2)]


def test_whatever_comes_it_stays_as_small_and_tells_of_nobody_else() -> None:
    past = Past(64)
    for first in range(0, 100_000, 100):
        put(past, np.arange(first, first + 100, dtype=np.uint64), first)
    assert len(past._rows) == 64
    unseen = np.arange(200_000, 201_000, dtype=np.uint64)
    assert not any(past.parts(unseen[at : at + 1]) for at in range(1_000))
