"""Which request a piece goes on with, and what was told to come."""

import numpy as np

from policies.eviction.expected import Expected
from policies.eviction.open import MAX_OPEN, Open
from tests.support.trees import Tree


def chain(length: int) -> Tree:
    tree = Tree()
    tree.insert(range(length))
    return tree


def test_a_piece_goes_on_with_the_request_that_came_to_the_block_before_it() -> None:
    requests: Open[str] = Open()
    tree = chain(4)
    requests.put(1, "a", 0.0)
    assert requests.take(tree, 1, 0.0) is None
    assert requests.take(tree, 2, 0.0) == "a"
    assert requests.take(tree, 2, 0.0) is None, "it has gone on from there"


def test_the_root_of_a_prefix_begins_a_request() -> None:
    requests: Open[str] = Open()
    requests.put(-1, "a", 0.0)
    assert requests.take(chain(1), 0, 0.0) is None


def test_several_at_one_block_all_go_on() -> None:
    requests: Open[str] = Open()
    tree = chain(3)
    for name in "ab":
        requests.put(1, name, 0.0)
    assert {requests.take(tree, 2, 0.0), requests.take(tree, 2, 0.0)} == {"a", "b"}


def test_a_request_of_which_nothing_came_for_long_or_many_others_did_has_ended() -> None:
    requests: Open[str] = Open()
    tree = chain(3)
    requests.put(1, "a", 0.0)
    assert requests.take(tree, 2, 61.0) is None
    requests.put(1, "a", 0.0)
    for name in range(1000, 1000 + MAX_OPEN):
        requests.put(name, "other", 0.0)
    assert len(requests) == MAX_OPEN
    assert requests.take(tree, 2, 0.0) is None


def test_what_is_closed_does_not_go_on() -> None:
    requests: Open[str] = Open()
    requests.put(1, "a", 0.0)
    requests.put(1, "b", 0.0)
    requests.close(1, lambda request: request == "b")
    requests.close(5, lambda request: True)
    assert requests.take(chain(3), 2, 0.0) == "a"
    assert len(requests) == 0


def test_what_was_told_is_taken_once_by_its_first_block() -> None:
    expected = Expected()
    names = np.arange(10, 16, dtype=np.uint64)
    expected.tell(names, 2)
    behind = expected.after(11)
    assert behind is not None and behind.num_blocks == 4
    assert expected.after(11) is None
    told = expected.take(12)
    assert told is not None and told.names.tolist() == [12, 13, 14, 15]
    assert expected.take(12) is None
    expected.tell(names, 6)
    assert len(expected) == 0, "nothing is to come"


def test_what_was_told_is_bounded() -> None:
    expected = Expected()
    for first in range(MAX_OPEN + 5):
        expected.tell(np.arange(first, first + 10_000, dtype=np.uint64), 0)
    assert len(expected) == MAX_OPEN
    told = expected.take(MAX_OPEN)
    assert told is not None and (told.num_blocks, len(told.names)) == (10_000, 2_048)
