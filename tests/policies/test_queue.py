"""The queue of leaves against a sorted list."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.base import Ids
from policies.eviction import queue as module
from policies.eviction.queue import MomentQueue, Moments

ROWS = 40
VERBS = ["append", "append", "push", "push", "pop", "pop", "remove", "remove_many", "sort"]


def ids(blocks: Sequence[int]) -> Ids:
    return np.array(blocks, dtype=np.int32)


def moments(values: Sequence[int]) -> Moments:
    return np.array(values, dtype=np.int64)


@given(st.lists(st.tuples(st.sampled_from(VERBS), st.lists(st.integers(0, ROWS - 1), max_size=8)), max_size=80))
def test_the_first_comes_first_whatever_came_and_went(steps: list[tuple[str, list[int]]]) -> None:
    queue = MomentQueue(ROWS)
    model: dict[int, int] = {}
    now = 1_000
    for verb, blocks in steps:
        new = [block for block in dict.fromkeys(blocks) if block not in model]
        if verb == "append":
            model.update({block: now + at for at, block in enumerate(new)})
            queue.append(ids([*blocks, *new]), moments([*range(now - len(blocks), now), *range(now, now + len(new))]))
            now += 2 * ROWS
        elif verb == "push" and blocks:
            moment = 2 * sum(blocks) + 1
            if moment not in model.values():
                model.setdefault(blocks[0], moment)
                queue.push(blocks[0], moment)
        elif verb == "pop":
            first = min(((moment, block) for block, moment in model.items()), default=None)
            assert queue.pop() == first
            if first is not None:
                del model[first[1]]
        elif verb == "remove" and blocks:
            queue.remove(blocks[0])
            model.pop(blocks[0], None)
        elif verb == "remove_many":
            queue.remove_many(ids(blocks))
            model = {block: moment for block, moment in model.items() if block not in blocks}
        elif verb == "sort":
            later = moments([(now + block if block % 3 == 0 else 0) for block in range(ROWS)])
            queue.sort(later)
            model = {block: max(moment, int(later[block])) for block, moment in model.items()}
            now += 2 * ROWS
        assert len(queue) == len(model)
        assert all((block in queue) == (block in model) for block in range(ROWS))


def test_what_is_out_of_order_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million leaves in a heap of tuples were 120 MB."""
    monkeypatch.setattr(module, "_MAX_HEAP", 100)
    queue = MomentQueue(3000)
    for block in range(2000, 0, -1):
        queue.push(block, block)
    queue.remove(5)
    assert len(queue._heap) == 0
    assert [queue.pop() for _ in range(6)] == [(n, n) for n in (1, 2, 3, 4, 6, 7)]
    assert len(queue) == 1993


def test_a_line_that_moves_on_reuses_its_room() -> None:
    queue = MomentQueue(1)
    for moment in range(1, 10_000):
        queue.append(ids([0]), moments([moment]))
        assert queue.pop() == (moment, 0)
    assert len(queue._line_blocks) <= 4096
