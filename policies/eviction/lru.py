"""Least recently used, leaf first.

A block without children in the tier is a leaf; the coldest leaf goes first, then its parent if that is a leaf now and
no hotter than the next, and so on up. So a cold prefix goes from its tail to its head, however its blocks came in, and
a hot one keeps its head. Within one call blocks count as touched from the tail to the head. Measured on the public
Mooncake traces this order is worth up to 20 points of token hit ratio against touching head first.

Leaves wait in a queue by the moment of their last use (queue.py). An access writes one number per block; the queue is
put right when the block comes up, so that reading a long prefix costs next to nothing.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from policies.base import EvictableView, Ids
from policies.eviction.queue import NEVER, MomentQueue

# A search that meets this many leaves which must stay gives up: better a refusal than a stalled control thread.
_MAX_PASSED = 2_000
# More leaves than this that were used since they began to wait are put right together, not one by one.
_MAX_MOVED = 2_000
_MIN_ROWS = 1024


class Lru:
    """One int64 column by block id, and the queue of the leaves."""

    def __init__(self, view: EvictableView) -> None:
        self._view = view
        self._clock = NEVER
        self._count = 0
        # When a block was last used; NEVER: not in the tier.
        self._used: npt.NDArray[np.int64] = np.zeros(_MIN_ROWS, dtype=np.int64)
        self._leaves = MomentQueue(_MIN_ROWS)

    def __len__(self) -> int:
        return self._count

    def on_insert(self, blocks: Sequence[int] | Ids) -> None:
        ids = np.asarray(blocks, dtype=np.int32)
        if not len(ids):
            return
        self._grow(int(ids.max()) + 1)
        new = ids[self._used[ids] == NEVER]
        self._count += len(new) if len(new) < 2 else len(np.unique(new))
        self._touch(ids)
        parents = self._view.parents_of(ids)
        self._leaves.remove_many(parents[(parents >= 0) & (parents < len(self._used))])
        # From the coldest on, as they were touched.
        leaves = ids[self._view.children_of(ids) == 0][::-1]
        self._leaves.append(leaves, self._used[leaves])

    def on_access(self, blocks: Sequence[int] | Ids) -> None:
        ids = np.asarray(blocks, dtype=np.int32)
        ids = ids[ids < len(self._used)]
        self._touch(ids[self._used[ids] != NEVER])

    def on_remove(self, block: int) -> None:
        if not self._has(block):
            return
        self._leaves.remove(block)
        moment = int(self._used[block])
        self._used[block] = NEVER
        self._count -= 1
        parent = self._view.parent(block)
        if self._has(parent) and parent not in self._leaves:
            # As recent as its last use, or as the use of what continued it.
            self._used[parent] = max(int(self._used[parent]), moment)
            self._leaves.push(parent, int(self._used[parent]))

    def victims(self, bytes_needed: int) -> list[int]:
        chosen: list[tuple[int, int]] = []
        passed: list[tuple[int, int]] = []
        orphaned: dict[int, int] = {}
        freed_bytes = num_moved = 0
        while freed_bytes < bytes_needed and len(passed) < _MAX_PASSED and (first := self._leaves.pop()) is not None:
            moment, block = first
            used = int(self._used[block])
            if used > moment:
                self._leaves.push(block, used)
                num_moved += 1
                if num_moved == _MAX_MOVED:
                    self._leaves.sort(self._used)
            elif self._view.children(block) > orphaned.get(block, 0):
                continue  # no leaf (any more); the last child that leaves brings it back
            elif self._view.pinned(block):
                passed.append((moment, block))
            else:
                chosen.append((moment, block))
                freed_bytes += self._view.size_bytes(block)
                parent = self._view.parent(block)
                if self._has(parent):
                    orphaned[parent] = orphaned.get(parent, 0) + 1
                    if orphaned[parent] == self._view.children(parent):
                        self._leaves.push(parent, max(moment, int(self._used[parent])))
        for moment, block in chosen:
            self._leaves.push(block, moment)
        if len(passed) >= _MAX_PASSED:
            # To the other end, so that the next search gets further.
            ids = np.array([block for _, block in passed], dtype=np.int32)
            self._leaves.append(ids, np.arange(self._clock + 1, self._clock + 1 + len(ids)))
            self._clock += len(ids)
        else:
            for moment, block in passed:
                self._leaves.push(block, moment)
        return [block for _, block in chosen] if freed_bytes >= bytes_needed else []

    # ------------------------------------------------------------ private

    def _touch(self, ids: Ids) -> None:
        """From the tail to the head, so that a child is colder than its parent."""
        self._used[ids[::-1]] = np.arange(self._clock + 1, self._clock + 1 + len(ids))
        self._clock += len(ids)

    def _has(self, block: int) -> bool:
        return 0 <= block < len(self._used) and bool(self._used[block] != NEVER)

    def _grow(self, rows: int) -> None:
        if rows > len(self._used):
            larger = np.zeros(max(rows, 2 * len(self._used)), dtype=np.int64)
            larger[: len(self._used)] = self._used
            self._used = larger
            self._leaves.grow(len(larger))
