"""What is remembered of blocks that left."""

import numpy as np

from policies.base import Names
from policies.eviction.past import Past
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


def test_whatever_comes_it_stays_as_small_and_tells_of_nobody_else() -> None:
    past = Past(64)
    for first in range(0, 100_000, 100):
        put(past, np.arange(first, first + 100, dtype=np.uint64), first)
    assert len(past._rows) == 64
    unseen = np.arange(200_000, 201_000, dtype=np.uint64)
    assert not any(past.parts(unseen[at : at + 1]) for at in range(1_000))
