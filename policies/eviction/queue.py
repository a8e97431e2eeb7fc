"""A priority queue of blocks by moment, made for moments that mostly come in order: 20 bytes a block, not 120.

What comes in order stands in a line (two arrays), what does not in a heap; the first is the smaller of their heads. An
entry that was removed stays where it is and is void. When most are void, or the heap has grown large, all that waits
is sorted into a new line at once.
"""

import heapq
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from policies.base import Ids

NEVER = 0
_MIN_ROWS = 1024
# Each entry of the heap is about 120 bytes of objects.
_MAX_HEAP = 65_536

_Number = TypeVar("_Number", bound=np.generic)

Moments = npt.NDArray[np.int64]


class MomentQueue:
    """Every block waits at most once; moments are above NEVER. Of equal moments the smaller id is first in the heap,
    and the order is the same for the same calls."""

    def __init__(self, rows: int) -> None:
        """Blocks are ids below `rows`, until `grow`."""
        # Under which moment a block waits; an entry of line or heap with another moment is void.
        self._waits: Moments = np.zeros(rows, dtype=np.int64)
        self._count = 0
        self._line_moments: Moments = np.zeros(_MIN_ROWS, dtype=np.int64)
        self._line_blocks: Ids = np.zeros(_MIN_ROWS, dtype=np.int32)
        self._head = self._end = 0
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: int) -> bool:
        return bool(self._waits[block] != NEVER)

    def waiting(self, blocks: Ids) -> Ids:
        """Return those of the blocks that wait."""
        waiting: Ids = blocks[self._waits[blocks] != NEVER]
        return waiting

    def grow(self, rows: int) -> None:
        larger = np.zeros(rows, dtype=np.int64)
        larger[: len(self._waits)] = self._waits
        self._waits = larger

    def append(self, blocks: Ids, moments: Moments) -> None:
        """Add those that do not wait yet, at the end: the moments rise and are later than any that was appended."""
        is_new = self._waits[blocks] == NEVER
        blocks, moments = blocks[is_new], moments[is_new]
        if not len(blocks):
            return
        self._waits[blocks] = moments
        if len(blocks) > 1:
            # A block that was given twice waits under its last moment.
            is_last = self._waits[blocks] == moments
            blocks, moments = blocks[is_last], moments[is_last]
        self._count += len(blocks)
        self._make_room(len(blocks))
        self._line_blocks[self._end : self._end + len(blocks)] = blocks
        self._line_moments[self._end : self._end + len(blocks)] = moments
        self._end += len(blocks)

    def append_one(self, block: int, moment: int) -> None:
        """`append` for one block."""
        if self._waits[block] == NEVER:
            self._waits[block] = moment
            self._count += 1
            self._make_room(1)
            self._line_blocks[self._end] = block
            self._line_moments[self._end] = moment
            self._end += 1

    def push(self, block: int, moment: int) -> None:
        """Add a block, under any moment, unless it waits already."""
        if self._waits[block] == NEVER:
            self._waits[block] = moment
            self._count += 1
            heapq.heappush(self._heap, (moment, block))

    def pop(self) -> tuple[int, int] | None:
        """Take the first: return its moment and the block."""
        while True:
            at = int(self._line_moments[self._head]) if self._head < self._end else None
            if self._heap and (at is None or self._heap[0][0] < at):
                moment, block = heapq.heappop(self._heap)
            elif at is not None:
                moment, block = at, int(self._line_blocks[self._head])
                self._head += 1
            else:
                return None
            if self._waits[block] == moment:
                self._waits[block] = NEVER
                self._count -= 1
                return moment, block

    def remove(self, block: int) -> None:
        """A block that does not wait is passed over."""
        if self._waits[block] != NEVER:
            self._waits[block] = NEVER
            self._count -= 1
            self._tidy()

    def remove_many(self, blocks: Ids) -> None:
        """`remove` for each of the blocks."""
        waiting = self.waiting(blocks)
        if len(waiting):
            self._count -= len(np.unique(waiting))
            self._waits[waiting] = NEVER
            self._tidy()

    def sort(self, not_before: Moments) -> None:
        """Have each block wait under `not_before[block]` where that is later."""
        blocks = np.flatnonzero(self._waits)
        self._waits[blocks] = np.maximum(self._waits[blocks], not_before[blocks])
        self._sort(blocks)

    # ------------------------------------------------------------ private

    def _tidy(self) -> None:
        entries = self._end - self._head + len(self._heap)
        if entries > 2 * self._count + _MIN_ROWS or len(self._heap) > _MAX_HEAP:
            self._sort(np.flatnonzero(self._waits))

    def _sort(self, blocks: npt.NDArray[np.intp]) -> None:
        moments = self._waits[blocks]
        order = np.argsort(moments)
        self._line_moments = moments[order]
        self._line_blocks = blocks[order].astype(np.int32)
        self._head, self._end = 0, len(blocks)
        self._heap = []

    def _make_room(self, count: int) -> None:
        if self._end + count > len(self._line_blocks):
            left = slice(self._head, self._end)
            self._end -= self._head
            self._head = 0
            rows = max(_MIN_ROWS, 2 * (self._end + count))
            self._line_moments = _moved(self._line_moments[left], rows)
            self._line_blocks = _moved(self._line_blocks[left], rows)


def _moved(column: npt.NDArray[_Number], rows: int) -> npt.NDArray[_Number]:
    larger = np.zeros(rows, dtype=column.dtype)
    larger[: len(column)] = column
    return larger
