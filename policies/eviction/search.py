"""Goes through the leaves among the runs (runs.py) of a tier in the order of their worth, and takes what may go."""

import heapq
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from policies.base import EvictableView
from policies.eviction.runs import NONE, Runs

_MAX_PASSED: Final = 2_000


def search(
    view: EvictableView,
    runs: Runs,
    order: Sequence[int],
    values: Sequence[float],
    index_of: Callable[[int], float],
    bytes_needed: int,
) -> list[int]:
    """Return victims among these runs, whose indices rise, and what they leave as leaves, of which `index_of` tells;
    [] where that is not enough."""
    at = 0
    heap: list[tuple[float, int]] = []  # what became a leaf meanwhile
    chosen: list[int] = []
    tried: set[int] = set()
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
        tried.add(run)
        blocks = runs.blocks(run, bytes_needed - freed_bytes)  # a block is at least a byte
        num_children = view.children_of(np.array(blocks, dtype=np.int32)).tolist()
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
            above = runs.parent(run)
            if above != NONE:
                orphaned[above] = orphaned.get(above, 0) + 1
                if orphaned[above] == runs.kids[above]:
                    heapq.heappush(heap, (index_of(above), above))
    return chosen if freed_bytes >= bytes_needed else []
