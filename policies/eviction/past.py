"""What blocks were when they left, by name, in a table of fixed size: what comes in pushes out what lies in its place.

gittins.py remembers by the name of its last block what left. This is for the others: a prefix that two requests share
is known by the second, also where the first had more behind it and left before.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from policies.base import Names
from policies.eviction.worth import LIFE_BITS, Numbers

# In place of a number, where nothing is to be known of a block.
FORGOTTEN: Final = -1
_NUM_PLACES: Final = 1 << 18
_MIX: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1


class Past:
    """16 bytes a place."""

    def __init__(self, num_places: int = _NUM_PLACES) -> None:
        """`num_places` is a power of two."""
        self._last_place = num_places - 1
        # Of each place the name, mixed, and one more than what is known of it: side by side, as they are asked for.
        self._rows: npt.NDArray[np.uint64] = np.zeros((num_places, 2), dtype=np.uint64)

    def put(self, names: Names, numbers: Numbers) -> None:
        """Blocks of these names leave, which are so in one number (worth.py)."""
        rows = np.empty((len(names), 2), dtype=np.uint64)
        rows[:, 0] = names * np.uint64(_MIX)
        rows[:, 1] = numbers + 1
        self._rows[self._places(rows[:, 0])] = rows

    def parts(self, names: Names, oldest_life: int = 0) -> list[tuple[int, int]]:
        """Return what these were, in their order, up to the first that is not known or was in an older life: of those
        that were in one life the first one's number, and at which of the names the last is, and one more."""
        mixed = int(names[0]) * _MIX & _WORD
        if int(self._rows[mixed >> 32 & self._last_place, 0]) != mixed:
            return []  # most are new, and this is quicker
        tags = names * np.uint64(_MIX)
        rows = self._rows[self._places(tags)]
        is_known = (rows[:, 0] == tags) & (rows[:, 1] > np.uint64(oldest_life << LIFE_BITS))
        count = len(names) if np.count_nonzero(is_known) == len(names) else int(is_known.argmin())
        if not count:
            return []
        numbers = rows[:count, 1] - np.uint64(1)
        lives = numbers >> np.uint64(LIFE_BITS)
        starts = [0, *((lives[1:] != lives[:-1]).nonzero()[0] + 1).tolist()]
        return list(zip(numbers[starts].tolist(), [*starts[1:], count], strict=True))

    def _places(self, mixed: Names) -> Numbers:
        places: Numbers = (mixed >> np.uint64(32)).astype(np.int64) & self._last_place
        return places
