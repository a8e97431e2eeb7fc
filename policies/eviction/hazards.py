"""Learns when blocks of a class are used again, and from that what it is worth to keep them.

A *life* begins when a block is used and ends when it is used again. Lives of a sample of blocks are remembered for a
while, also after their blocks were evicted, since else nothing could be learned about what is evicted. Ages are cut
into bins that grow by half an octave. For each class and bin it is counted how many lives were alive when the bin began
and how many ended in it; their ratio is the hazard. Classes with few lives lean on coarser ones: first on all classes
that share all features but the last, and so on.

The index of a block of some age is the best ratio, over all times to wait from now, of the probability that it is used
within that time to the mean time it stays for it (Gittins, Bandit processes and dynamic allocation indices, Journal of
the Royal Statistical Society B, 1979). What has the lowest index goes first.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

NUM_BINS: Final = 36
_EDGES_S: Final = np.concatenate([[0.0], 0.5 * 2.0 ** (np.arange(NUM_BINS - 1) / 2)])
_WIDTHS_S: Final = np.diff(np.append(_EDGES_S, _EDGES_S[-1] * 1.5))
# Lives remembered, at about 150 bytes.
_MAX_LIVES: Final = 1 << 16
# Counts are halved when so many lives have been counted, so that what is learned follows the load.
_HALVE_AT: Final = 1 << 18
# So many lives of a coarser class count as evidence for a finer one.
_LEANS_ON: Final = 25.0
_LEANS_ON_PRIOR: Final = 5.0
# Before anything was seen: a hazard that falls with age, which is the order of LRU.
_PRIOR_HAZARD: Final = 0.03
_PRIOR_FIRST: Final = 0.05
_MAX_HAZARD: Final = 0.999

Floats = npt.NDArray[np.float64]
Classes = npt.NDArray[np.int16]


class Hazards:
    """Not thread-safe. Bounded in what it holds, whatever comes."""

    def __init__(self, shape: Sequence[int], prior_factors: Sequence[float] | None = None) -> None:
        """A class is an index into `shape`, one axis per feature, the one to lean on first last. Before anything was
        seen the hazards along the first axis are as these factors."""
        self._shape = tuple(shape)
        self._prior_factors: Floats = np.ones(self._shape[0]) if prior_factors is None else np.array(prior_factors)
        self._num_classes = int(np.prod(self._shape))
        self._ended: Floats = np.zeros((self._num_classes, NUM_BINS))
        self._alive: Floats = np.zeros((self._num_classes, NUM_BINS))
        self._seen = np.zeros(self._num_classes, dtype=np.bool_)
        # A ring of lives in order of their beginning.
        self._names = [-1] * _MAX_LIVES
        self._turns = [0] * _MAX_LIVES
        self._began_s: Floats = np.zeros(_MAX_LIVES)
        self._lasted_s: Floats = np.full(_MAX_LIVES, np.inf)
        self._classes: Classes = np.zeros(_MAX_LIVES, dtype=np.int16)
        self._head = 0
        self._counted = [0] * NUM_BINS  # up to which life it is counted who was alive at each bin's beginning
        self._newest: dict[int, int] = {}  # where in the ring the newest life of a name is
        self._index: Floats = np.zeros((self._num_classes, NUM_BINS))
        self._seen[:] = True
        self.learn(0.0)
        self._seen[:] = False

    def last_seen(self, name: int) -> tuple[float, int] | None:
        """Return when the newest life of a name began and in which turn, or None where none is remembered."""
        at = self._newest.get(name)
        return None if at is None else (float(self._began_s[at]), self._turns[at])

    def begin(self, name: int, now_s: float) -> None:
        """The block is used: its last life, if any, ends, and one begins, whose class `classify` sets."""
        at = self._newest.get(name)
        if at is not None:
            lasted_s = now_s - float(self._began_s[at])
            self._lasted_s[at] = lasted_s
            self._ended[self._classes[at], _bin(lasted_s)] += 1
        at = self._head % _MAX_LIVES
        old = self._names[at]
        if self._newest.get(old) == at:
            del self._newest[old]
        self._names[at] = name
        self._turns[at] = 0
        self._began_s[at] = now_s
        self._lasted_s[at] = np.inf
        self._classes[at] = 0
        self._newest[name] = at
        self._head += 1

    def classify(self, name: int, kind: int, turn: int) -> None:
        """Set, or correct, the class and the turn of the newest life of a name."""
        at = self._newest.get(name)
        if at is not None:
            self._classes[at] = kind
            self._turns[at] = turn
            self._seen[kind] = True

    def index(self, kinds: Classes, ages_s: Floats) -> Floats:
        """Return per block of such class and age its index, uses per second."""
        bins = np.searchsorted(_EDGES_S, ages_s, side="right") - 1
        values: Floats = self._index[kinds, np.maximum(bins, 0)]
        return values

    def learn(self, now_s: float) -> None:
        """Bring the index up to date: some milliseconds."""
        self._count(now_s)
        if self._alive[:, 0].sum() > _HALVE_AT:
            self._alive /= 2
            self._ended /= 2
        kinds = np.flatnonzero(self._seen)
        if len(kinds):
            self._index[kinds] = _best_ratio(self._hazards()[kinds])

    # ------------------------------------------------------------ private

    def _count(self, now_s: float) -> None:
        """Count in each bin the lives that reached its beginning since the last time."""
        oldest = max(0, self._head - _MAX_LIVES)
        for number, edge_s in enumerate(_EDGES_S):
            first = max(self._counted[number], oldest)
            places = np.arange(first, self._head) % _MAX_LIVES
            reached = int(np.searchsorted(self._began_s[places], now_s - edge_s, side="right"))
            places = places[:reached]
            alive = places[self._lasted_s[places] >= edge_s]
            self._alive[:, number] += np.bincount(self._classes[alive], minlength=self._num_classes)
            self._counted[number] = first + reached

    def _hazards(self) -> Floats:
        """Return [num_classes, NUM_BINS] hazards, each class leaning on the coarser ones."""
        ended = self._ended.reshape(*self._shape, NUM_BINS)
        alive = self._alive.reshape(*self._shape, NUM_BINS)
        hazards = np.full((1,) * len(self._shape) + (NUM_BINS,), _PRIOR_HAZARD)
        hazards[..., 0] = _PRIOR_FIRST
        hazards = hazards * self._prior_factors.reshape(-1, *(1,) * len(self._shape))
        for level in range(1, len(self._shape) + 1):
            finer = tuple(range(level, len(self._shape)))
            leans_on = _LEANS_ON if level > 1 else _LEANS_ON_PRIOR
            hazards = (ended.sum(axis=finer, keepdims=True) + leans_on * hazards) / (
                alive.sum(axis=finer, keepdims=True) + leans_on
            )
        capped: Floats = np.minimum(hazards.reshape(self._num_classes, NUM_BINS), _MAX_HAZARD)
        return capped


def _bin(age_s: float) -> int:
    return max(0, int(np.searchsorted(_EDGES_S, age_s, side="right")) - 1)


def _best_ratio(hazards: Floats) -> Floats:
    """Return for each row and bin i the greatest, over j ≥ i, of P(used in bins i … j) / E[time spent in them]."""
    alive = np.cumprod(1 - hazards, axis=1)
    alive = np.hstack([np.ones((len(hazards), 1)), alive[:, :-1]])
    zero = np.zeros((len(hazards), 1))
    used = np.hstack([zero, np.cumsum(alive * hazards, axis=1)])
    spent_s = np.hstack([zero, np.cumsum(alive * (1 - hazards / 2) * _WIDTHS_S, axis=1)])
    best: Floats = np.zeros(hazards.shape)
    for start in range(NUM_BINS):
        ratios = (used[:, start + 1 :] - used[:, start, None]) / (spent_s[:, start + 1 :] - spent_s[:, start, None])
        best[:, start] = ratios.max(axis=1)
    return best
