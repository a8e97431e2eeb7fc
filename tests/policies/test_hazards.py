"""What is learned of classes that are used again in known ways."""

import numpy as np

from policies.eviction import hazards
from policies.eviction.hazards import Hazards

SOON, NEVER = 0, 1


def index(learned: Hazards, kind: int, age_s: float) -> float:
    return float(learned.index(np.array([kind], dtype=np.int16), np.array([age_s]))[0])


def taught(num_lives: int, gap_s: float) -> Hazards:
    """Names below 1000 are used again after `gap_s`, the others never."""
    learned = Hazards((2,))
    now_s = 0.0
    for number in range(num_lives):
        for name, kind in ((number % 1000, SOON), (1000 + number, NEVER)):
            learned.begin(name, now_s)
            learned.classify(name, kind, 1)
        now_s += gap_s / 1000
    learned.learn(now_s)
    return learned


def test_what_is_never_used_again_is_worth_less_than_what_always_is() -> None:
    learned = taught(5_000, gap_s=30.0)
    assert index(learned, SOON, 0.0) > 10 * index(learned, NEVER, 0.0)


def test_worth_rises_towards_the_time_of_the_return_and_falls_behind_it() -> None:
    """Uses per second: 30 s before the return at most 1/30, just before it many more."""
    learned = taught(5_000, gap_s=30.0)
    assert 0.5 / 30 < index(learned, SOON, 0.0) < 1.5 / 30
    assert index(learned, SOON, 25.0) > 2 * index(learned, SOON, 0.0)
    assert index(learned, SOON, 200.0) < index(learned, SOON, 0.0)


def test_before_anything_was_seen_the_oldest_is_worth_least() -> None:
    learned = Hazards((2,))
    values = [index(learned, SOON, age_s) for age_s in (0.0, 10.0, 100.0, 1_000.0, 1e5, 1e9)]
    assert values == sorted(values, reverse=True)
    assert values[-1] > 0


def test_a_class_that_was_hardly_seen_leans_on_those_like_it() -> None:
    """Of classes (first, second) each first one leans on its own: (0, 1) on (0, 0), and (1, 1) on (1, 0)."""
    learned = Hazards((2, 2))
    now_s = 0.0
    for number in range(3_000):
        for name, kind in ((number % 500, 0), (1000 + number, 2)):
            learned.begin(name, now_s)
            learned.classify(name, kind, 1)
        now_s += 0.01
    for name, kind in ((9_000, 1), (9_001, 3)):
        learned.begin(name, now_s)
        learned.classify(name, kind, 1)
    learned.learn(now_s + 1.0)
    assert index(learned, 1, 0.0) > 5 * index(learned, 3, 0.0)


def test_a_life_is_remembered_with_its_turn_until_the_memory_is_full() -> None:
    learned = Hazards((2,))
    learned.begin(7, 3.0)
    learned.classify(7, SOON, 4)
    assert learned.last_seen(7) == (3.0, 4)
    assert learned.last_seen(8) is None
    for number in range(hazards._MAX_LIVES):
        learned.begin(100 + number, 4.0)
    assert learned.last_seen(7) is None
    assert len(learned._newest) == hazards._MAX_LIVES


def test_counts_are_halved_so_that_a_new_load_is_learned() -> None:
    learned = taught(5_000, gap_s=30.0)
    before = learned._alive[:, 0].sum()
    learned._alive *= hazards._HALVE_AT / before
    learned._ended *= hazards._HALVE_AT / before
    worth = index(learned, SOON, 0.0)
    learned.begin(5, 40.0)
    learned.learn(50.0)
    assert learned._alive[:, 0].sum() < 0.6 * hazards._HALVE_AT
    assert 0.5 * worth < index(learned, SOON, 0.0) < 2 * worth
