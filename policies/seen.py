"""How often blocks were seen, by name, in a table of fixed size: what comes in pushes out what lies in its place."""

from typing import Final

import numpy as np
import numpy.typing as npt

Names = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

_MOST: Final = 255
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)


class Seen:
    """5 bytes a place. Two blocks in one place: the later is remembered."""

    def __init__(self, num_places: int = 1 << 20) -> None:
        """`num_places` is a power of two."""
        self.num_places = num_places
        self._tags: npt.NDArray[np.uint32] = np.zeros(num_places, dtype=np.uint32)
        self._times: npt.NDArray[np.uint8] = np.zeros(num_places, dtype=np.uint8)

    def see(self, names: Names) -> tuple[Places, Places]:
        """Count these; return the place of each, and how often it was seen before."""
        places, tags = self._at(names)
        is_known = self._tags[places] == tags
        times = np.where(is_known, self._times[places], 0).astype(np.int64)
        self._tags[places] = tags
        self._times[places] = np.minimum(times + 1, _MOST)
        return places, times

    def find(self, names: Names) -> Places:
        """Return the places of those that are remembered."""
        places, tags = self._at(names)
        found: Places = places[self._tags[places] == tags]
        return found

    def times(self, names: Names) -> Places:
        """Return how often each was seen, without counting it."""
        places, tags = self._at(names)
        return np.where(self._tags[places] == tags, self._times[places], 0).astype(np.int64)

    def _at(self, names: Names) -> tuple[Places, npt.NDArray[np.uint32]]:
        mixed = names * _MIX
        places = (mixed >> np.uint64(32)).astype(np.int64) & (self.num_places - 1)
        return places, (mixed & np.uint64(0xFFFFFFFF)).astype(np.uint32) | np.uint32(1)
