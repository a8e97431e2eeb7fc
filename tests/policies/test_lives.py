"""The ring of lives."""

from policies.eviction.lives import MAX_LIVES, Lives


def test_a_life_is_finished_once() -> None:
    lives = Lives()
    number = lives.begin(4, 3.0)
    lives.set_kind(number, 5)
    assert lives.finish(number, 10.0) == (5, 7.0)
    assert lives.finish(number, 20.0) is None
    assert lives.lasted_s[number] == 7.0


def test_the_oldest_lives_are_forgotten() -> None:
    lives = Lives()
    first = lives.begin(1, 0.0)
    for number in range(MAX_LIVES):
        lives.begin(2, 1.0 + number)
    lives.set_kind(first, 3)
    assert lives.finish(first, 1e6) is None
    assert lives.finish(first + 1, 2.0) == (2, 1.0)
    assert set(lives.kinds.tolist()) == {2}


def test_a_life_that_is_void_neither_ends_nor_counts() -> None:
    lives = Lives()
    number = lives.begin(4, 3.0)
    lives.void(number)
    assert lives.finish(number, 10.0) is None
    assert lives.lasted_s[number] < 0
