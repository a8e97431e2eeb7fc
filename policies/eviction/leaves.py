"""The leaves of a tier, so that some of them can be drawn at random."""

import numpy as np

from policies.base import Ids
from policies.eviction.leafwise import grown

_NOWHERE = -1
_MIN_PLACES = 1024


class Leaves:
    """A set of block ids below `rows`, 8 bytes each; everything but `grow` and `some` takes constant time."""

    def __init__(self, rows: int) -> None:
        self._places: Ids = np.full(rows, _NOWHERE, dtype=np.int32)
        self._blocks: Ids = np.zeros(_MIN_PLACES, dtype=np.int32)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def grow(self, rows: int) -> None:
        old = len(self._places)
        self._places = grown(self._places, rows)
        self._places[old:] = _NOWHERE

    def add(self, block: int) -> None:
        if self._places[block] != _NOWHERE:
            return
        if self._count == len(self._blocks):
            self._blocks = grown(self._blocks, 2 * self._count)
        self._blocks[self._count] = block
        self._places[block] = self._count
        self._count += 1

    def discard(self, block: int) -> None:
        """The last one takes its place."""
        place = self._places[block]
        if place == _NOWHERE:
            return
        self._count -= 1
        last = self._blocks[self._count]
        self._blocks[place] = last
        self._places[last] = place
        self._places[block] = _NOWHERE

    def some(self, most: int, random: np.random.Generator) -> Ids:
        """Return all where there are at most `most`, else so many drawn at random, some twice."""
        if self._count <= most:
            return self._blocks[: self._count].copy()
        return self._blocks[random.integers(0, self._count, most)]
