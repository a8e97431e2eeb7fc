"""Whether everything became faster or slower, seen in the newest measurements alone.

Each is compared with what was predicted for it. A change of up to about twice is believed once most of the last 24 show
it; a larger one, which may also be a hiccup, once most of the last 48 do. So up to half of these may be wrong without
consequence.
"""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from policies.fit import Floats

_RECENT: Final = 24
_RECENT_IF_LARGE: Final = 48
_LARGE: Final = math.log(2.2)
# A change of less is left to the fit, and so is what lies within so many standard errors of none.
_LEAST_CHANGE: Final = 0.03
_CHANCE: Final = 3.5
_LEAST_DEVIATION: Final = 0.01
# Of each kind so many must have been measured to have a say of their own.
_LEAST_OF_KIND: Final = 3


class Speed:
    """The last 48 ratios of measured to predicted seconds, as logarithms, each of a kind of work."""

    def __init__(self) -> None:
        self._ratios = np.zeros(_RECENT_IF_LARGE)
        self._kinds = np.zeros(_RECENT_IF_LARGE, dtype=np.int8)
        self._num = 0

    def observe(self, ratio: float, kind: int) -> None:
        at = self._num % _RECENT_IF_LARGE
        self._ratios[at], self._kinds[at] = ratio, kind
        self._num += 1

    def change(self) -> tuple[float, int]:
        """Return the logarithm of the factor by which all became slower, and how many measurements ago; (0, 0): it did
        not. What came since then is compared with slower predictions from now on."""
        if self._num < _RECENT:
            return 0.0, 0
        count = min(self._num, _RECENT_IF_LARGE)
        newest = (np.arange(self._num - count, self._num)) % _RECENT_IF_LARGE
        change = _change(self._ratios[newest[-_RECENT:]])
        if abs(change) < _LARGE:
            newest = newest[-_RECENT:]
        else:
            change = _change(self._ratios[newest]) if count == _RECENT_IF_LARGE else 0.0
        ratios = self._ratios[newest]
        if abs(change) < _LEAST_CHANGE or not _agree(ratios, self._kinds[newest], change):
            return 0.0, 0
        since = _change_point(ratios, change)
        self._ratios[newest[since:]] -= change
        return change, len(ratios) - since


def _change(ratios: Floats) -> float:
    """Return by how much the ratios lie above 0 as a whole; 0 if that may be chance."""
    middle = _median(ratios)
    if abs(middle) < _LEAST_CHANGE / 2:
        return 0.0
    away = np.abs(ratios - middle)
    deviation = max(1.4826 * _median(away), _LEAST_DEVIATION)
    inner = ratios[away <= 2.5 * deviation]
    change = float(inner.mean())
    return change if abs(change) > _CHANCE * deviation / math.sqrt(len(inner)) else 0.0


def _agree(ratios: Floats, kinds: npt.NDArray[np.int8], change: float) -> bool:
    """Return whether no kind of work contradicts: that one of them became slower is for the fit to find out."""
    for kind in np.unique(kinds):
        of_kind = ratios[kinds == kind]
        if len(of_kind) >= _LEAST_OF_KIND and _median(of_kind) / change < 0.5:
            return False
    return True


def _change_point(ratios: Floats, change: float) -> int:
    """Return from which ratio on they lie nearer to `change` than to 0, with the least contradiction."""
    # Bounded, so that one that fits neither has one voice.
    votes = np.clip(2 * ratios / change - 1, -1, 1)
    return int(np.argmax(np.cumsum(votes[::-1])[::-1]))


def _median(values: Floats) -> float:
    # Half as fast again as numpy's, which looks for what is not a number.
    middle = len(values) // 2
    return float(np.partition(values, middle)[middle])
