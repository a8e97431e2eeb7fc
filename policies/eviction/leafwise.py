"""What the policies share that keep blocks in queues by moment: counts, columns, and the search for victims.

Only leaves wait: blocks without children in the tier. The first leaf of a queue goes first, then its parent if that is
a leaf now and comes no later than the next, and so on up, so that a tier stays closed under prefixes. Within one call
blocks count from the tail to the head. A policy says by its hooks when a block's moment is, in which of its queues it
stands, and from which queue the next victim comes.

Leaves wait under the moment they had when they began to (queue.py). A use writes one number per block; the queue is put
right when the block comes up, so that reading a long prefix costs next to nothing. A policy whose moments can also
become earlier says so to `_requeue`.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from policies.base import EvictableView, Hint, Ids, Names
from policies.eviction.queue import NEVER, MomentQueue, Moments

# A search that meets this many leaves which must stay gives up: better a refusal than a stalled control thread.
_MAX_PASSED = 2_000
# More leaves than this that were used since they began to wait are put right together, not one by one.
_MAX_MOVED = 2_000
_MIN_ROWS = 1024
# The moment of what goes first.
FIRST = NEVER + 1
# A priority counts for at least so many uses of blocks.
_MIN_STEP = 64

_Number = TypeVar("_Number", bound=np.generic)


class Leafwise:
    """An int64 and an int8 column by block id, and one queue of leaves per place. Subclasses order."""

    # Whether what enters always has a later moment than all before.
    _enters_last = True

    def __init__(self, view: EvictableView, num_places: int = 1) -> None:
        self._view = view
        self._clock = FIRST
        self._count = 0
        # Whether a use may make a moment earlier than it was.
        self._was_hinted = False
        # The moment by which a block is ordered; NEVER: not in the tier.
        self._moments: Moments = np.zeros(_MIN_ROWS, dtype=np.int64)
        # In which queue it waits whenever it is a leaf.
        self._places: npt.NDArray[np.int8] = np.zeros(_MIN_ROWS, dtype=np.int8)
        self._queues = tuple(MomentQueue(_MIN_ROWS) for _ in range(num_places))
        # How many blocks, leaves or not, are in each place.
        self._sizes = [0] * num_places

    def __len__(self) -> int:
        return self._count

    def on_insert(self, blocks: Sequence[int] | Ids) -> None:
        ids = np.asarray(blocks, dtype=np.int32)
        if not len(ids):
            return
        self._grow(int(ids.max()) + 1)
        is_known = self._moments[ids] != NEVER
        if is_known.any():
            self.on_access(ids[is_known])
            ids = ids[~is_known]
        if len(ids) > 1:
            ids = ids[np.sort(np.unique(ids, return_index=True)[1])]
        if not len(ids):
            return
        self._count += len(ids)
        self._enter(ids)
        for place in range(len(self._sizes)):
            self._sizes[place] += int(np.count_nonzero(self._places[ids] == place))
        parents = self._view.parents_of(ids)
        parents = parents[(parents >= 0) & (parents < len(self._moments))]
        # From the coldest on, as they were touched.
        leaves = ids[self._view.children_of(ids) == 0][::-1]
        for place, queue in enumerate(self._queues):
            queue.remove_many(parents)
            own = leaves[self._places[leaves] == place]
            if self._enters_last:
                queue.append(own, self._moments[own])
            else:
                for block in own.tolist():
                    queue.push(block, int(self._moments[block]))

    def on_access(self, blocks: Sequence[int] | Ids) -> None:
        ids = np.asarray(blocks, dtype=np.int32)
        ids = ids[ids < len(self._moments)]
        ids = ids[self._moments[ids] != NEVER]
        if len(ids):
            self._use(ids)
            if self._was_hinted:
                self._requeue(ids)

    def on_request(self, names: Names, known: int) -> None:
        """Which pieces make a request is all the same here."""

    def on_hint(self, blocks: Sequence[int] | Ids, hint: Hint) -> None:
        ids = np.asarray(blocks, dtype=np.int32)
        ids = ids[ids < len(self._moments)]
        ids = ids[self._moments[ids] != NEVER]
        if not len(ids) or hint == Hint():
            return
        self._was_hinted = True
        self._renew(ids)
        if hint.returns is False:
            own = own_tail(self._view, ids)
            self._end(own)
            self._requeue(own)
            ids = ids[: -len(own)] if len(own) else ids
        steps = hint.priority + (hint.returns is True)
        if steps:
            self._shift(ids, steps)
        self._requeue(ids)

    def on_remove(self, block: int) -> None:
        self.on_remove_many((block,))

    def on_remove_many(self, blocks: Sequence[int]) -> None:
        gone: dict[int, int] = {}  # children by parent; the view still counts them
        for block in blocks:
            if not self._has(block):
                continue
            self._leave(block)
            place = int(self._places[block])
            self._queues[place].remove(block)
            self._sizes[place] -= 1
            moment = int(self._moments[block])
            self._moments[block] = NEVER
            self._count -= 1
            parent = self._view.parent(block)
            if self._has(parent):
                gone[parent] = gone.get(parent, 0) + 1
                if not self._waits(parent):
                    # As late as its own moment, or as that of what continued it.
                    latest = max(int(self._moments[parent]), moment)
                    self._moments[parent] = latest
                    if self._view.children(parent) <= gone[parent]:
                        self._queues[self._places[parent]].push(parent, latest)

    def victims(self, bytes_needed: int) -> list[int]:
        view = self._view
        chosen: list[tuple[int, int]] = []
        passed: list[tuple[int, int]] = []
        orphaned: dict[int, int] = {}
        taken = [0] * len(self._queues)
        freed_bytes = num_moved = 0
        while freed_bytes < bytes_needed and len(passed) < _MAX_PASSED:
            place = self._next_place(taken)
            first = self._queues[place].pop()
            if first is None:
                place, first = self._pop_elsewhere(place)
                if first is None:
                    break
            moment, block = first
            latest = int(self._moments[block])
            if latest > moment:
                self._queues[place].push(block, latest)
                num_moved += 1
                if num_moved == _MAX_MOVED:
                    for queue in self._queues:
                        queue.sort(self._moments)
            elif view.children(block) > orphaned.get(block, 0):
                continue  # no leaf (any more); the last child that leaves brings it back
            elif view.pinned(block):
                passed.append((moment, block))
            else:
                chosen.append((moment, block))
                taken[place] += 1
                freed_bytes += view.size_bytes(block)
                parent = view.parent(block)
                if self._has(parent):
                    orphaned[parent] = orphaned.get(parent, 0) + 1
                    if orphaned[parent] == view.children(parent):
                        self._queues[self._places[parent]].push(parent, max(moment, int(self._moments[parent])))
        for moment, block in chosen:
            self._queues[self._places[block]].push(block, moment)
        self._put_back(passed)
        return [block for _, block in chosen] if freed_bytes >= bytes_needed else []

    # ------------------------------------------------------------ for subclasses

    def _enter(self, ids: Ids) -> None:
        """Give new blocks, in prefix order, their moments and places."""
        self._touch(ids)

    def _use(self, ids: Ids) -> None:
        """Blocks of the tier are used again, in prefix order; unless told otherwise that renews their moments."""
        self._touch(ids)

    def _renew(self, ids: Ids) -> None:
        """Undo what an earlier hint did, or do nothing."""
        self._moments[ids] = np.minimum(self._moments[ids], self._clock)

    def _end(self, ids: Ids) -> None:
        """Blocks that nobody will use again, from the head to the tail: let them go first."""
        self._moments[ids] = FIRST

    def _shift(self, ids: Ids, steps: int) -> None:
        """Let blocks go later, by so many times what it takes to use the whole tier, or sooner."""
        self._moments[ids] = np.maximum(self._moments[ids] + steps * max(self._count, _MIN_STEP), FIRST)

    def _leave(self, block: int) -> None:
        """A block leaves; its columns still stand."""

    def _next_place(self, taken: Sequence[int]) -> int:
        """Return the queue of the next victim, if there is one; `taken` per queue are chosen by this search already."""
        return 0

    def _touch(self, ids: Ids) -> None:
        """From the tail to the head, so that a child is colder than its parent."""
        self._moments[ids[::-1]] = np.arange(self._clock + 1, self._clock + 1 + len(ids))
        self._clock += len(ids)

    def _move(self, block: int, place: int) -> None:
        """To another queue, whether it waits there or not; its moment may have changed."""
        old = int(self._places[block])
        self._places[block] = place
        self._sizes[old] -= 1
        self._sizes[place] += 1
        if block in self._queues[old]:
            self._queues[old].remove(block)
            self._queues[place].push(block, int(self._moments[block]))

    def _requeue(self, ids: Ids) -> None:
        """Put right at once where these wait."""
        for queue in self._queues:
            for block in queue.waiting(ids).tolist():
                queue.remove(block)
                queue.push(block, int(self._moments[block]))

    # ------------------------------------------------------------ private

    def _pop_elsewhere(self, empty: int) -> tuple[int, tuple[int, int] | None]:
        for place, queue in enumerate(self._queues):
            if place != empty and (first := queue.pop()) is not None:
                return place, first
        return empty, None

    def _put_back(self, passed: list[tuple[int, int]]) -> None:
        if len(passed) >= _MAX_PASSED:
            # To the other end, so that the next search gets further.
            last = max(self._clock, int(self._moments.max()))
            passed = [(last + 1 + i, block) for i, (_, block) in enumerate(passed)]
            self._clock = last + len(passed) if self._enters_last else self._clock
        for moment, block in passed:
            self._queues[self._places[block]].push(block, moment)

    def _waits(self, block: int) -> bool:
        return block in self._queues[self._places[block]]

    def _has(self, block: int) -> bool:
        return 0 <= block < len(self._moments) and bool(self._moments[block] != NEVER)

    def _grow(self, rows: int) -> None:
        if rows > len(self._moments):
            rows = max(rows, 2 * len(self._moments))
            self._moments = grown(self._moments, rows)
            self._places = grown(self._places, rows)
            for queue in self._queues:
                queue.grow(rows)
            self._more_rows(rows)

    def _more_rows(self, rows: int) -> None:
        """For subclasses with columns of their own."""


def grown(column: npt.NDArray[_Number], rows: int) -> npt.NDArray[_Number]:
    """Return the column with zeros behind it, `rows` in all."""
    larger = np.zeros(rows, dtype=column.dtype)
    larger[: len(column)] = column
    return larger


def own_tail(view: EvictableView, ids: Ids) -> Ids:
    """Return the last of these blocks, one prefix, that nothing in the tier continues but each other."""
    own = len(ids)
    below = -1
    for block in ids[::-1].tolist():
        if view.children(block) > (below >= 0) or (below >= 0 and view.parent(below) != block):
            break
        own -= 1
        below = block
    return ids[own:]
