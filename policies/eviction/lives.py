"""Remembers when runs of blocks were used, as what, and when again; also after they left the tier."""

from array import array
from typing import Final

import numpy as np
import numpy.typing as npt

# At 18 bytes each.
MAX_LIVES: Final = 1 << 17

Floats = npt.NDArray[np.float64]
Kinds = npt.NDArray[np.int16]


class Lives:
    """A ring of lives in order of their beginning; what is older is forgotten. A *life* begins when a run is used and
    ends when it is used again. Lives go by a number that rises by one with each."""

    def __init__(self) -> None:
        self._began = array("d", bytes(8 * MAX_LIVES))
        self._lasted = array("d", bytes(8 * MAX_LIVES))
        self._kinds = array("h", bytes(2 * MAX_LIVES))
        # The same memory, as columns.
        self.began_s: Floats = np.frombuffer(self._began, dtype=np.float64)
        self.lasted_s: Floats = np.frombuffer(self._lasted, dtype=np.float64)
        self.kinds: Kinds = np.frombuffer(self._kinds, dtype=np.int16)
        self.end = 0

    def begin(self, kind: int, now_s: float) -> int:
        """Return the number of a new life."""
        place = self.end % MAX_LIVES
        self._began[place] = now_s
        self._lasted[place] = np.inf
        self._kinds[place] = kind
        self.end += 1
        return self.end - 1

    def began(self, number: int) -> float:
        """Return when a life that is remembered began."""
        return self._began[number % MAX_LIVES]

    def finish(self, number: int, now_s: float) -> tuple[int, float] | None:
        """Return of which kind the life was and how long it lasted; None where it had ended or was forgotten."""
        place = number % MAX_LIVES
        if number < self.end - MAX_LIVES or self._lasted[place] != np.inf:
            return None
        lasted_s = self._lasted[place] = now_s - self._began[place]
        return self._kinds[place], lasted_s

    def void(self, number: int) -> None:
        """Let a life not count, where that is not too late."""
        if number >= self.end - MAX_LIVES:
            self._lasted[number % MAX_LIVES] = -1.0

    def set_kind(self, number: int, kind: int) -> None:
        """Correct what a life is, where it is remembered."""
        if number >= self.end - MAX_LIVES:
            self._kinds[number % MAX_LIVES] = kind
