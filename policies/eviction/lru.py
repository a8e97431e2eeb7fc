"""Least recently used, leaf first.

A block without children in the tier is a leaf; the coldest leaf goes first, then its parent if that is a leaf now and
no hotter than the next, and so on up. So a cold prefix goes from its tail to its head, however its blocks came in, and
a hot one keeps its head. Within one call blocks count as touched from the tail to the head. Measured on the public
Mooncake traces this order is worth up to 20 points of token hit ratio against touching head first.

Leaves wait in a heap by the moment of their last use. An access writes one number per block; the heap is put right when
the block comes up, so that reading a long prefix costs next to nothing.
"""

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from policies.base import EvictableView

_OUT = -1
# A search that meets this many leaves which must stay gives up: better a refusal than a stalled control thread.
_MAX_PASSED = 2_000
_MIN_ROWS = 1024


class Lru:
    """Two int64 columns by block id, and a heap of the leaves."""

    def __init__(self, view: EvictableView) -> None:
        self._view = view
        self._clock = 0
        self._count = 0
        # When a block was last used, and under which moment it waits in the heap; _OUT: not in the tier, not waiting.
        self._used: npt.NDArray[np.int64] = np.full(_MIN_ROWS, _OUT, dtype=np.int64)
        self._waits: npt.NDArray[np.int64] = np.full(_MIN_ROWS, _OUT, dtype=np.int64)
        self._num_waiting = 0
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self._count

    def on_insert(self, blocks: Sequence[int]) -> None:
        ids = np.asarray(blocks, dtype=np.int64)
        if not len(ids):
            return
        self._grow(int(ids.max()) + 1)
        self._count += len(set(ids[self._used[ids] == _OUT].tolist()))
        self._touch(ids)
        for block in blocks:
            self._stop_waiting(self._view.parent(block))
            if not self._view.children(block):
                self._wait(block)

    def on_access(self, blocks: Sequence[int]) -> None:
        ids = np.asarray(blocks, dtype=np.int64)
        ids = ids[ids < len(self._used)]
        self._touch(ids[self._used[ids] != _OUT])

    def on_remove(self, block: int) -> None:
        if not self._has(block):
            return
        self._stop_waiting(block)
        moment = int(self._used[block])
        self._used[block] = _OUT
        self._count -= 1
        parent = self._view.parent(block)
        if self._has(parent) and self._waits[parent] == _OUT:
            # As recent as its last use, or as the use of what continued it.
            self._used[parent] = max(int(self._used[parent]), moment)
            self._wait(parent)

    def victims(self, bytes_needed: int) -> list[int]:
        chosen: list[tuple[int, int]] = []
        passed: list[tuple[int, int]] = []
        orphaned: dict[int, int] = {}
        freed_bytes = 0
        while freed_bytes < bytes_needed and self._heap and len(passed) < _MAX_PASSED:
            moment, block = heapq.heappop(self._heap)
            if self._waits[block] != moment:
                continue  # it left, or waits elsewhere in the heap
            self._unwait(block)
            if self._used[block] > moment:
                self._wait(block)
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
                        self._wait(parent, max(moment, int(self._used[parent])))
        for moment, block in chosen:
            self._wait(block, moment)
        gave_up = len(passed) >= _MAX_PASSED
        for moment, block in passed:
            # After giving up they go to the other end, so that the next search gets further.
            self._wait(block, self._next_moment() if gave_up else moment)
        return [block for _, block in chosen] if freed_bytes >= bytes_needed else []

    # ------------------------------------------------------------ private

    def _touch(self, ids: npt.NDArray[np.int64]) -> None:
        """From the tail to the head, so that a child is colder than its parent."""
        self._used[ids[::-1]] = np.arange(self._clock + 1, self._clock + 1 + len(ids))
        self._clock += len(ids)

    def _next_moment(self) -> int:
        self._clock += 1
        return self._clock

    def _has(self, block: int) -> bool:
        return 0 <= block < len(self._used) and bool(self._used[block] != _OUT)

    def _wait(self, block: int, moment: int | None = None) -> None:
        if self._waits[block] == _OUT:
            self._num_waiting += 1
            self._waits[block] = at = int(self._used[block]) if moment is None else moment
            heapq.heappush(self._heap, (at, block))

    def _unwait(self, block: int) -> None:
        self._waits[block] = _OUT
        self._num_waiting -= 1

    def _stop_waiting(self, block: int) -> None:
        """Its place in the heap becomes void; void ones are cleared away when they are most of the heap."""
        if 0 <= block < len(self._waits) and self._waits[block] != _OUT:
            self._unwait(block)
            if len(self._heap) > 2 * self._num_waiting + _MIN_ROWS:
                self._heap = [(moment, block) for moment, block in self._heap if self._waits[block] == moment]
                heapq.heapify(self._heap)

    def _grow(self, rows: int) -> None:
        if rows > len(self._used):
            missing = np.full(max(rows, 2 * len(self._used)) - len(self._used), _OUT, dtype=np.int64)
            self._used = np.concatenate((self._used, missing))
            self._waits = np.concatenate((self._waits, missing))
