"""How far uses go into what came with one request."""

import numpy as np

from policies.eviction.kinds import kind_of
from policies.eviction.reach import MAX_DEPTH, Reach
from policies.eviction.runs import AT_ROOT, BEHIND_OWN, USED

KIND = kind_of(20, None, 1)


def share(reach: Reach, depth: int, branch: int = AT_ROOT) -> float:
    return reach.share(branch, KIND, depth)


def test_where_uses_end_what_is_behind_is_worth_less() -> None:
    """Templates of eight blocks, and a question behind each."""
    reach = Reach()
    for _ in range(200):
        reach.used(AT_ROOT, KIND, 0, 8, ends=True)
    reach.learn()
    assert share(reach, 1) == 1.0
    assert share(reach, 6) > 0.9
    assert share(reach, 16) < 0.1
    assert share(reach, 10_000) == share(reach, MAX_DEPTH) > 0


def test_what_is_used_to_its_end_is_worth_the_same_at_all_depths() -> None:
    reach = Reach()
    for _ in range(200):
        reach.used(AT_ROOT, KIND, 0, 8, ends=False)
    reach.learn()
    assert share(reach, 8) == share(reach, 300) == 1.0


def test_what_began_otherwise_is_counted_by_itself_and_what_was_used_since_is_whole() -> None:
    reach = Reach()
    for _ in range(200):
        reach.used(AT_ROOT, KIND, 0, 8, ends=True)
    reach.learn()
    assert share(reach, 16, BEHIND_OWN) == share(reach, 16, USED) == 1.0


def test_a_use_that_comes_in_pieces_did_not_end_between_them() -> None:
    whole, pieces = Reach(), Reach()
    for _ in range(200):
        whole.used(AT_ROOT, KIND, 0, 20, ends=True)
        ended = pieces.used(AT_ROOT, KIND, 0, 8, ends=True)
        assert ended is not None
        pieces.goes_on(ended)
        pieces.used(AT_ROOT, KIND, 8, 12, ends=True)
    whole.learn()
    pieces.learn()
    for depth in range(1, MAX_DEPTH):
        assert share(whole, depth) == share(pieces, depth)


def test_prompts_of_a_length_that_was_not_seen_are_as_the_others() -> None:
    reach = Reach()
    for _ in range(500):
        reach.used(AT_ROOT, KIND, 0, 8, ends=True)
    reach.learn()
    assert reach.share(AT_ROOT, kind_of(100, None, 1), 16) < 0.3


def test_many_at_once_are_told_as_one_by_one() -> None:
    reach = Reach()
    for _ in range(50):
        reach.used(AT_ROOT, KIND, 0, 4, ends=True)
    reach.learn()
    branches = np.array([AT_ROOT, USED, AT_ROOT], dtype=np.int8)
    depths = np.array([3, 9, 9_999], dtype=np.int32)
    found = reach.shares(branches, np.full(3, KIND, dtype=np.int16), depths)
    assert found.tolist() == [share(reach, 3), 1.0, share(reach, 9_999)]


def test_a_new_load_is_learned_in_time() -> None:
    reach = Reach()
    for _ in range(5_000):
        reach.used(AT_ROOT, KIND, 0, 400, ends=False)
    for _ in range(8):
        reach.learn()
    for _ in range(5_000):
        reach.used(AT_ROOT, KIND, 0, 8, ends=True)
    reach.learn()
    assert share(reach, 16) < 0.5
