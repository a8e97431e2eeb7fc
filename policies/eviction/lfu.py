"""Least frequently used, leaf first; of equally often used blocks the least recently used goes.

Counts are not aged, as in the textbook: what was used often once stays. On agentic traces that is its ruin.
"""

import numpy as np

from policies.base import EvictableView, Ids
from policies.eviction.leafwise import Leafwise, grown
from policies.eviction.queue import Moments

_ONE_USE = 1 << 44
_MAX_USES = (1 << 18) - 1


class Lfu(Leafwise):
    """A block's moment is how often it was used, in units of _ONE_USE, plus the clock at its last use."""

    _enters_last = False

    def __init__(self, view: EvictableView) -> None:
        super().__init__(view)
        self._uses: Moments = np.zeros(len(self._moments), dtype=np.int64)

    def _enter(self, ids: Ids) -> None:
        self._uses[ids] = 0
        self._use(ids)

    def _use(self, ids: Ids) -> None:
        self._uses[ids] = np.minimum(self._uses[ids] + 1, _MAX_USES)
        self._touch(ids)
        self._moments[ids] += self._uses[ids] * _ONE_USE

    def _renew(self, ids: Ids) -> None:
        self._moments[ids] = self._moments[ids] % _ONE_USE + self._uses[ids] * _ONE_USE

    def _shift(self, ids: Ids, steps: int) -> None:
        """By so many uses."""
        self._moments[ids] = np.maximum(self._moments[ids] + steps * _ONE_USE, 1)

    def _more_rows(self, rows: int) -> None:
        self._uses = grown(self._uses, rows)
