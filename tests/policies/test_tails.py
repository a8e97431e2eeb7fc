"""What is remembered of last blocks that left."""

import pytest

from policies.eviction import tails
from policies.eviction.tails import Tails


def test_each_comes_back_once_in_the_life_in_which_it_left_last() -> None:
    left = Tails()
    left.put(1, 7)
    left.put(2, 8)
    left.put(1, 9)
    assert left.take([5, 1, 6]) == [9]
    assert left.take([1, 3]) == []
    assert left.take([2]) == [8]


def test_what_left_first_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "MAX_TAILS", 3)
    left = Tails()
    for name in (1, 2, 1, 3, 4):
        left.put(name, 10 + name)
    assert len(left) == 3
    assert sorted(left.take([1, 2, 3, 4])) == [11, 13, 14]
