"""S3-FIFO (Yang et al., FIFO queues are all you need for cache eviction, SOSP 2023), for prefixes.

    new ──► small ──used again──► main ◄──┐ once more, one use less
              │                    │ └────┘
              └──► out, remembered └──► out
    new, but remembered ──► main

The small queue is a tenth of the tier, and a block's uses count up to 3. What comes up with no use is to go out, but an
inner block stays until its children are gone; if it is used meanwhile, it is in the main queue again. That all blocks
stand in the queues and not leaves alone matters: with leaves alone each block of a cold prefix had its further chance
after its child had left, which cost 2.6 points of token hit ratio on a Mooncake trace (conversation, 3%).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from policies.base import EvictableView, Ids
from policies.eviction.ghosts import Ghosts
from policies.eviction.leafwise import Leafwise, grown
from policies.eviction.queue import MomentQueue

_SMALL, _MAIN, _OUT = 0, 1, 2
_SMALL_SHARE = 0.1
_MAX_USES = 3
# So many blocks may come up in one search, and so many more per victim, before any leaf has to do.
_MAX_UP = 10_000
_MAX_UP_PER_VICTIM = 8


class S3Fifo(Leafwise):
    """Where a block is says in which queue it stands; the leaves of `_OUT` go first."""

    def __init__(self, view: EvictableView) -> None:
        super().__init__(view, num_places=3)
        self._uses: npt.NDArray[np.int8] = np.zeros(len(self._moments), dtype=np.int8)
        self._fifos = MomentQueue(len(self._moments)), MomentQueue(len(self._moments))
        self._ghosts = Ghosts()
        self._ups_left = 0

    def victims(self, bytes_needed: int) -> list[int]:
        self._ups_left = _MAX_UP
        return super().victims(bytes_needed)

    def _enter(self, ids: Ids) -> None:
        self._touch(ids)
        self._uses[ids] = 0
        names = [self._view.name(block) for block in ids.tolist()]
        self._places[ids] = [_MAIN if name in self._ghosts else _SMALL for name in names]
        for name in names:
            self._ghosts.discard(name)
        for place, fifo in enumerate(self._fifos):
            own = ids[self._places[ids] == place][::-1]
            fifo.append(own, self._moments[own])

    def _use(self, ids: Ids) -> None:
        self._uses[ids] = np.minimum(self._uses[ids] + 1, _MAX_USES)
        for block in ids[self._places[ids] == _OUT][::-1].tolist():
            self._ghosts.discard(self._view.name(block))
            self._to_main(block)

    def _next_place(self, taken: Sequence[int]) -> int:
        self._ups_left += _MAX_UP_PER_VICTIM
        while not len(self._queues[_OUT]) and self._ups_left > 0 and self._come_up():
            self._ups_left -= 1
        return _OUT

    def _renew(self, ids: Ids) -> None:
        """A hint is spent when the block comes up."""

    def _end(self, ids: Ids) -> None:
        super()._end(ids)
        self._to_out(ids)

    def _shift(self, ids: Ids, steps: int) -> None:
        """By so many uses, and what gains some is in the main queue; what has none to lose is to go out."""
        self._to_out(ids[self._uses[ids] + steps < 0])
        self._uses[ids] = np.clip(self._uses[ids] + steps, 0, _MAX_USES)
        if steps > 0:
            for block in ids[self._places[ids] != _MAIN][::-1].tolist():
                if self._places[block] == _SMALL:
                    self._fifos[_SMALL].remove(block)
                self._to_main(block)

    def _leave(self, block: int) -> None:
        place = self._places[block]
        if place == _SMALL:
            self._remember(block)
        if place != _OUT:
            self._fifos[place].remove(block)

    def _more_rows(self, rows: int) -> None:
        self._uses = grown(self._uses, rows)
        for fifo in self._fifos:
            fifo.grow(rows)

    # ------------------------------------------------------------ private

    def _come_up(self) -> bool:
        """Decide about the block that comes up next; False where there is none."""
        small, main = len(self._fifos[_SMALL]), len(self._fifos[_MAIN])
        place = _SMALL if small and (small > _SMALL_SHARE * (small + main) or not main) else _MAIN
        first = self._fifos[place].pop()
        if first is None:
            return False
        _, block = first
        if self._uses[block]:
            self._uses[block] = 0 if place == _SMALL else self._uses[block] - 1
            self._to_main(block)
        else:
            if place == _SMALL:
                self._remember(block)
            self._move(block, _OUT)
        return True

    def _to_out(self, ids: Ids) -> None:
        self._uses[ids] = 0
        for block in ids[self._places[ids] != _OUT].tolist():
            self._fifos[self._places[block]].remove(block)
            self._move(block, _OUT)

    def _to_main(self, block: int) -> None:
        self._clock += 1
        self._moments[block] = self._clock
        self._move(block, _MAIN)
        self._fifos[_MAIN].append_one(block, self._clock)

    def _remember(self, block: int) -> None:
        self._ghosts.add(self._view.name(block))
        self._ghosts.keep(len(self))
