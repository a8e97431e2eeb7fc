"""ARC (Megiddo and Modha, ARC: a self-tuning, low overhead replacement cache, FAST 2003), leaf first.

    T1  used once      ──left──► B1, names alone: a block that comes back from here says that T1 is too small
    T2  used again     ──left──► B2, names alone: …that T2 is
    ended  what a client said will not be used again: goes first, and says nothing about T1 and T2
    target: how many blocks T1 should have; moves with each block that comes back

The size of the cache, which the paper calls c, is the number of blocks that stay when room was made.
"""

from collections.abc import Sequence

from policies.base import EvictableView, Ids
from policies.eviction.ghosts import Ghosts
from policies.eviction.leafwise import Leafwise

_ONCE, _AGAIN, _ENDED = 0, 1, 2


class Arc(Leafwise):
    """A block's moment is that of its last use; `target` as above."""

    def __init__(self, view: EvictableView) -> None:
        super().__init__(view, num_places=3)
        self._ghosts = Ghosts(), Ghosts()
        self._target = 0.0
        self._capacity = 0

    def victims(self, bytes_needed: int) -> list[int]:
        chosen = super().victims(bytes_needed)
        self._capacity = max(1, len(self) - len(chosen))
        return chosen

    def _enter(self, ids: Ids) -> None:
        self._touch(ids)
        once, again = self._ghosts
        for block in ids.tolist():
            name = self._view.name(block)
            self._places[block] = _AGAIN
            if name in once:
                self._target = min(self._capacity, self._target + max(1.0, len(again) / len(once)))
                once.discard(name)
            elif name in again:
                self._target = max(0.0, self._target - max(1.0, len(once) / len(again)))
                again.discard(name)
            else:
                self._places[block] = _ONCE

    def _use(self, ids: Ids) -> None:
        self._touch(ids)
        for block in ids[self._places[ids] != _AGAIN].tolist():
            self._move(block, _AGAIN)

    def _next_place(self, taken: Sequence[int]) -> int:
        if len(self._queues[_ENDED]):
            return _ENDED
        once = self._sizes[_ONCE] - taken[_ONCE]
        return _ONCE if once >= 1 and once > self._target else _AGAIN

    def _end(self, ids: Ids) -> None:
        super()._end(ids)
        for block in ids.tolist():
            self._move(block, _ENDED)

    def _shift(self, ids: Ids, steps: int) -> None:
        super()._shift(ids, steps)
        if steps > 0:
            for block in ids[self._places[ids] != _AGAIN].tolist():
                self._move(block, _AGAIN)

    def _leave(self, block: int) -> None:
        place = int(self._places[block])
        if place == _ENDED:
            return
        self._ghosts[place].add(self._view.name(block))
        capacity = max(self._capacity, len(self))
        once, again = self._ghosts
        # |T1| + |B1| ≤ c, and all four together ≤ 2c.
        once.keep(max(0, capacity - self._sizes[_ONCE] + 1))
        again.keep(max(0, 2 * capacity - len(self) + 1 - len(once)))
