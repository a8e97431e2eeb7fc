"""Goes through the leaves among the runs (runs.py) of a tier in the order of their worth, and takes what may go."""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from policies.base import EvictableView
from policies.eviction.runs import NONE, USED, Runs

_MAX_PASSED: Final = 2_000


def search(
    view: EvictableView,
    runs: Runs,
    order: Sequence[int],
    values: Sequence[float],
    index_of: Callable[[int, int], float],
    part_of: Callable[[int, int, float], int],
    bytes_needed: int,
) -> list[int]:
    """Return victims among these runs, whose indices rise, and what they leave as leaves; [] where that is not enough.
    Of a run without so many of its last blocks `index_of` tells the index, and `part_of` how many more go before it is
    above another's."""
    at = 0
    heap: list[tuple[float, int]] = []  # what became a leaf meanwhile, and what is left of what was taken in part
    chosen: list[int] = []
    tried: dict[int, int] = {}  # how many blocks were taken of each
    orphaned: dict[int, int] = {}
    freed_bytes = num_passed = 0
    while freed_bytes < bytes_needed and num_passed < _MAX_PASSED:
        if heap and (at == len(order) or heap[0][0] <= values[at]):
            _, run = heapq.heappop(heap)
        elif at < len(order):
            run = order[at]
            at += 1
            if run in tried:
                continue  # drawn twice
        else:
            break
        taken = tried.get(run, 0)
        most = bytes_needed - freed_bytes  # a block is at least a byte
        if runs.branch[run] != USED and runs.length[run] > taken + 1:
            next_index = min(values[at] if at < len(order) else math.inf, heap[0][0] if heap else math.inf)
            most = min(most, part_of(run, taken, next_index))
        blocks = runs.blocks(run, taken + most)[taken:]
        tried[run] = taken + len(blocks)
        num_children = view.children_of(np.array(blocks, dtype=np.int32)).tolist()
        if not taken:
            num_children[0] -= orphaned.get(run, 0) - 1
        for block, children in zip(blocks, num_children, strict=True):
            if children > 1 or view.pinned(block):
                num_passed += 1
                break
            chosen.append(block)
            freed_bytes += view.size_bytes(block)
            if freed_bytes >= bytes_needed:
                break
        else:
            if tried[run] < runs.length[run]:
                heapq.heappush(heap, (index_of(run, tried[run]), run))
                continue
            above = runs.parent(run)
            if above != NONE:
                orphaned[above] = orphaned.get(above, 0) + 1
                if orphaned[above] == runs.kids[above]:
                    heapq.heappush(heap, (index_of(above, 0), above))
    return chosen if freed_bytes >= bytes_needed else []
