"""What is learned of classes that are used again in known ways."""

import numpy as np

from policies.eviction import hazards
from policies.eviction.hazards import Hazards
from policies.eviction.lives import Lives

SOON, NEVER = 0, 1


def index(learned: Hazards, kind: int, age_s: float) -> float:
    return float(learned.index(np.array([kind], dtype=np.int16), np.array([age_s]))[0])


class Load:
    """Named runs that are used again and again."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.hazards = Hazards(shape)
        self.lives = Lives()
        self.newest: dict[int, int] = {}

    def use(self, name: int, now_s: float, kind: int) -> None:
        if name in self.newest:
            ended = self.lives.finish(self.newest[name], now_s)
            if ended is not None:
                self.hazards.end(*ended)
        self.newest[name] = self.lives.begin(kind, now_s)
        self.hazards.saw(kind)


def taught(num_lives: int, gap_s: float) -> Load:
    """Names below 1000 are used again after `gap_s`, the others never."""
    load = Load((2,))
    now_s = 0.0
    for number in range(num_lives):
        load.use(number % 1000, now_s, SOON)
        load.use(1000 + number, now_s, NEVER)
        now_s += gap_s / 1000
    load.hazards.learn(load.lives, now_s)
    return load


def test_what_is_never_used_again_is_worth_less_than_what_always_is() -> None:
    learned = taught(5_000, gap_s=30.0).hazards
    assert index(learned, SOON, 0.0) > 10 * index(learned, NEVER, 0.0)


def test_worth_rises_towards_the_time_of_the_return_and_falls_behind_it() -> None:
    """Uses per second: 30 s before the return at most 1/30, just before it many more."""
    learned = taught(5_000, gap_s=30.0).hazards
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
    load = Load((2, 2))
    now_s = 0.0
    for number in range(3_000):
        load.use(number % 500, now_s, 0)
        load.use(1000 + number, now_s, 2)
        now_s += 0.01
    load.use(9_000, now_s, 1)
    load.use(9_001, now_s, 3)
    load.hazards.learn(load.lives, now_s + 1.0)
    assert index(load.hazards, 1, 0.0) > 5 * index(load.hazards, 3, 0.0)


def test_what_the_client_says_counts_before_anything_was_learned() -> None:
    told = Hazards((2,), np.multiply.outer((1.0, 4.0), np.full(hazards.NUM_BINS, 0.03)))
    for age_s in (0.0, 10.0, 1_000.0):
        assert index(told, 1, age_s) > 2 * index(told, 0, age_s)


def test_what_was_thought_of_a_class_holds_beside_others_until_it_is_seen_itself() -> None:
    """The second of two classes was thought to be used ten times as often. That the first is used more than was
    thought lets the second rise with it."""
    thought = np.multiply.outer((0.01, 0.1), np.ones(hazards.NUM_BINS))
    learned, lives = Hazards((2,), thought), Lives()
    for number in range(400):
        learned.saw(0)
        ended = lives.finish(lives.begin(0, 10.0 * number), 10.0 * number + 5.0)
        assert ended is not None
        learned.end(*ended)
    learned.saw(1)
    learned.learn(lives, 5_000.0)
    assert index(learned, 1, 4.0) > index(learned, 0, 4.0)
    assert index(learned, 1, 4.0) > index(Hazards((2,), thought), 1, 4.0)


def test_counts_are_halved_so_that_a_new_load_is_learned() -> None:
    load = taught(5_000, gap_s=30.0)
    learned = load.hazards
    before = learned._alive[:, 0].sum()
    learned._alive *= hazards._HALVE_AT / before
    learned._ended *= hazards._HALVE_AT / before
    worth = index(learned, SOON, 0.0)
    load.use(5, 200.0, SOON)
    learned.learn(load.lives, 250.0)
    assert learned._alive[:, 0].sum() < 0.6 * hazards._HALVE_AT
    assert 0.5 * worth < index(learned, SOON, 0.0) < 2 * worth


def test_a_class_that_was_seen_years_ago_is_still_worth_something() -> None:
    """Halved a thousand times over, its counts once came to nothing, and its index to none."""
    learned, lives = Hazards((2,)), Lives()
    learned.saw(0)
    learned.saw(1)
    learned._alive[1, 30] = 1.0
    for _ in range(1_200):
        learned._alive[0, 0] += 2 * hazards._HALVE_AT
        learned.learn(lives, 0.0)
        assert np.isfinite(learned._index).all()
    assert (learned._index[1] > 0).all()
