"""Blocks in any order of depths, put together by prefix."""

import random

import numpy as np

from kvstore.store.chains import by_prefix


def ids(*numbers: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(numbers, dtype=np.int32)


def test_prefixes_that_came_depth_by_depth_are_put_together() -> None:
    assert by_prefix(ids(7, 3, 8, 4, 9, 5), ids(-1, 100, 7, 3, 8, 4)).tolist() == [7, 8, 9, 3, 4, 5]
    assert by_prefix(ids(), ids()).tolist() == []


def test_no_block_is_lost_and_none_stands_before_its_parent() -> None:
    draw = random.Random(3)
    for _ in range(50):
        blocks = draw.sample(range(1000), 80)
        parents = [draw.choice([-1, 5000, *blocks[:at]]) for at in range(80)]
        ordered = by_prefix(ids(*blocks), ids(*parents)).tolist()
        assert sorted(ordered) == sorted(blocks)
        place = {block: at for at, block in enumerate(ordered)}
        for block, parent in zip(blocks, parents, strict=True):
            assert place.get(parent, -1) < place[block]
