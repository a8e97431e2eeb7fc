"""Small caches of names that compare orders of eviction."""

import random

import numpy as np

from policies.eviction.judge import MAX_SHADOW, Judge
from policies.eviction.shadows import IndexShadow, LruShadow, S3FifoShadow, Shadow


def use(judge: Judge, names: list[int], capacity_blocks: int) -> None:
    asked = np.array(names, dtype=np.uint64)
    places = judge.sampled(asked)
    judge.saw(asked[places], places)
    judge.request_ends(capacity_blocks)


def popular(choice: random.Random) -> int:
    """A few names that are asked for often, among many that are not."""
    return choice.randrange(8) if choice.random() < 0.5 else choice.randrange(100, 100_000)


def test_it_follows_the_order_that_hits_more_and_goes_back_when_that_changes() -> None:
    judge = Judge((LruShadow(), S3FifoShadow()))
    choice = random.Random(1)
    for _ in range(2_000):
        use(judge, [popular(choice)], 12)
    assert judge.best == 1
    # Each name twice, so late that a small queue has given it up.
    for number in range(3_000):
        use(judge, [1_000_000 + number, 1_000_000 + number - 4], 12)
    assert judge.best == 0


def test_orders_that_hit_alike_are_not_told_apart() -> None:
    judge = Judge((LruShadow(), LruShadow(), LruShadow()))
    choice = random.Random(2)
    for _ in range(1_000):
        use(judge, [popular(choice)], 12)
    assert judge.best == 0


def test_however_large_the_tier_is_a_shadow_stays_small() -> None:
    shadows: tuple[Shadow, ...] = (
        LruShadow(),
        S3FifoShadow(),
        IndexShadow(lambda lives: np.array(lives, dtype=np.float64), np.random.default_rng(0)),
    )
    judge = Judge(shadows)
    for first in range(0, 200_000, 500):
        use(judge, list(range(first, first + 500)), 0 if first < 100_000 else 50_000)
        assert all(len(shadow) <= 1.25 * MAX_SHADOW for shadow in shadows)
    assert all(len(shadow) > MAX_SHADOW / 4 for shadow in shadows)


def test_an_index_shadow_gives_up_what_is_worth_least() -> None:
    shadow = IndexShadow(lambda lives: np.array(lives, dtype=np.float64), np.random.default_rng(0))
    for name in range(100):
        shadow.use(name, number=name)
    shadow.keep(50)
    assert not any(shadow.use(name, number=0) for name in range(40))
    assert all(shadow.use(name, number=name) for name in range(60, 100))


def test_what_was_used_before_fewer_names_are_sampled_is_sampled_like_the_rest() -> None:
    shadow = LruShadow()
    judge = Judge((shadow,))
    for names in (range(1_500), range(10_000, 30_000)):
        asked = np.array(names, dtype=np.uint64)
        places = judge.sampled(asked)
        judge.saw(asked[places], places)
    # So much room that no fewer have to be sampled once more.
    judge.request_ends(32_000)
    held = np.array(list(shadow._names), dtype=np.uint64)
    assert len(judge.sampled(held)) == len(held) > MAX_SHADOW / 4
