"""Learns when blocks of a class are used again, and from that what it is worth to keep them.

Of lives (lives.py) it is counted per class and age, in bins that grow by half an octave, how many were alive when the
bin began and how many ended in it; their ratio is the hazard. It corrects what was thought before: of all classes
together, then of those that share the first feature, and so on to each by itself, so that classes with few lives are
as those like them, and differ from those as they did before anything was seen.

The index of a block of some age is the best ratio, over all times to wait from now, of the probability that it is used
within that time to the mean time it stays for it (Gittins, Bandit processes and dynamic allocation indices, Journal of
the Royal Statistical Society B, 1979). What has the lowest index goes first.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from policies.eviction.lives import MAX_LIVES, Floats, Kinds, Lives

_PER_OCTAVE: Final = 2
NUM_BINS: Final = 18 * _PER_OCTAVE
EDGES_S: Final = np.concatenate([[0.0], 0.5 * 2.0 ** (np.arange(NUM_BINS - 1) / _PER_OCTAVE)])
WIDTHS_S: Final = np.diff(np.append(EDGES_S, EDGES_S[-1] * 1.5))
# Counts are halved when so many lives have been counted, so that what is learned follows the load.
_HALVE_AT: Final = 1 << 18
_LEAST: Final = 1e-6
# So many lives of a coarser class count as evidence for a finer one: for how much more often it is used at all ages
# together, and for each age. With fewer, a short trace of chats that are all alike (2,400 requests) loses 0.5 points
# to noise; with more, classes that differ are told apart too late.
_LEANS_ON_FACTOR: Final = 40.0
_LEANS_ON: Final = 150.0
_LEANS_ON_PRIOR_FACTOR: Final = 5.0
_LEANS_ON_PRIOR: Final = 30.0
# Of what no more is known of: a hazard that falls with age, which is the order of LRU.
PRIOR_HAZARD: Final = 0.03
PRIOR_FIRST: Final = 0.05
MAX_HAZARD: Final = 0.999


class Hazards:
    """Not thread-safe. Bounded in what it holds, whatever comes."""

    def __init__(self, shape: Sequence[int], prior: Floats | None = None) -> None:
        """A class is an index into `shape`, one axis per feature, the one to lean on first last. `prior`: hazards
        [*shape, NUM_BINS], up to MAX_HAZARD, as they are thought to be before anything was seen."""
        self._shape = tuple(shape)
        if prior is None:
            prior = np.full((*shape, NUM_BINS), PRIOR_HAZARD)
            prior[..., 0] = PRIOR_FIRST
        self._prior = prior
        self._num_classes = int(np.prod(self._shape))
        self._ended: Floats = np.zeros((self._num_classes, NUM_BINS))
        self._alive: Floats = np.zeros((self._num_classes, NUM_BINS))
        self._seen = np.ones(self._num_classes, dtype=np.bool_)
        self._counted = [0] * NUM_BINS  # up to which life it is counted who was alive at each bin's beginning
        self._index: Floats = np.zeros((self._num_classes, NUM_BINS))
        self._learn()
        self._seen[:] = False

    def saw(self, kind: int) -> None:
        """There are blocks of this class."""
        self._seen[kind] = True

    def end(self, kind: int, lasted_s: float) -> None:
        """A life ended."""
        self._ended[kind, _bin(lasted_s)] += 1

    def index(self, kinds: Kinds, ages_s: Floats) -> Floats:
        """Return per block of such class and age its index, uses per second."""
        bins = EDGES_S.searchsorted(ages_s, side="right") - 1
        values: Floats = self._index[kinds, np.maximum(bins, 0)]
        return values

    def index_of(self, kind: int, age_s: float) -> float:
        """`index` for one block."""
        return float(self._index[kind, _bin(age_s)])

    def worth(self, lives: Lives, numbers: npt.NDArray[np.int64], now_s: float) -> Floats:
        """Return `index` for blocks that are in these lives; -1 where that began too long ago to be remembered."""
        places = numbers % MAX_LIVES
        values = self.index(lives.kinds[places], now_s - lives.began_s[places])
        values[numbers < lives.end - MAX_LIVES] = -1.0
        return values

    def learn(self, lives: Lives, now_s: float) -> None:
        """Bring the index up to date: some milliseconds."""
        self._count(lives, now_s)
        if self._alive[:, 0].sum() > _HALVE_AT:
            for counts in self._alive, self._ended:
                counts /= 2
                # In years of halving they would become so small that nothing can be divided by them.
                counts[counts < _LEAST] = 0
        self._learn()

    # ------------------------------------------------------------ private

    def _learn(self) -> None:
        kinds = self._seen.nonzero()[0]
        if len(kinds):
            self._index[kinds] = _best_ratio(self._hazards()[kinds])

    def _count(self, lives: Lives, now_s: float) -> None:
        """Count in each bin the lives that reached its beginning since the last time."""
        oldest = max(0, lives.end - MAX_LIVES)
        found = []
        for number, edge_s in enumerate(EDGES_S.tolist()):
            first = max(self._counted[number], oldest)
            if first == lives.end or lives.began(first) > now_s - edge_s:
                self._counted[number] = first
                continue
            places = np.arange(first, lives.end) % MAX_LIVES
            reached = int(lives.began_s[places].searchsorted(now_s - edge_s, side="right"))
            places = places[:reached]
            alive = places[lives.lasted_s[places] >= edge_s]
            found.append(lives.kinds[alive].astype(np.int64) * NUM_BINS + number)
            self._counted[number] = first + reached
        if found:
            counts = np.bincount(np.concatenate(found), minlength=self._alive.size)
            self._alive += counts.reshape(self._alive.shape)

    def _hazards(self) -> Floats:
        """Return [classes up to the last that was seen, NUM_BINS] hazards."""
        # Of the first axis only so much as was seen: without hints a third.
        per_first = self._num_classes // self._shape[0]
        num_first = int(self._seen.nonzero()[0][-1]) // per_first + 1
        rows = (num_first, *self._shape[1:], NUM_BINS)
        uses = self._ended[: num_first * per_first].reshape(rows)
        chances = self._alive[: num_first * per_first].reshape(rows)
        hazards = self._prior[:num_first]
        on_factor, on_age = _LEANS_ON_PRIOR_FACTOR, _LEANS_ON_PRIOR
        for axis in range(len(self._shape) + 1):
            together = tuple(range(axis, len(self._shape)))
            used, lived = (counts.sum(axis=together, keepdims=True) for counts in (uses, chances))
            expected = (chances * hazards).sum(axis=together, keepdims=True)
            # First how much more often than expected at all ages together, then at each age.
            factor = (used.sum(axis=-1, keepdims=True) + on_factor) / (expected.sum(axis=-1, keepdims=True) + on_factor)
            expected = factor * expected
            leans = on_age * np.divide(expected, lived, out=np.ones_like(lived), where=lived > 0)
            hazards = np.minimum(hazards * (factor * (used + leans) / (expected + leans)), MAX_HAZARD)
            on_factor, on_age = _LEANS_ON_FACTOR, _LEANS_ON
        return hazards.reshape(-1, NUM_BINS)


def _bin(age_s: float) -> int:
    """The same as np.searchsorted(EDGES_S, age_s, side="right") - 1."""
    if age_s < 0.5:
        return 0
    bin = min(int(_PER_OCTAVE * math.log2(2 * age_s)) + 1, NUM_BINS - 1)
    return bin if age_s >= EDGES_S[bin] else bin - 1


def _best_ratio(hazards: Floats) -> Floats:
    """Return for each row and bin i the greatest, over j ≥ i, of P(used in bins i … j) / E[time spent in them]."""
    used, spent_s = np.zeros((2, *hazards.shape))
    best: Floats = np.zeros(hazards.shape)
    for start in reversed(range(NUM_BINS)):
        first, rest = hazards[:, start, None], slice(start + 1, NUM_BINS)
        used[:, rest] = first + (1 - first) * used[:, rest]
        spent_s[:, rest] = WIDTHS_S[start] * (1 - first / 2) + (1 - first) * spent_s[:, rest]
        used[:, start] = first[:, 0]
        spent_s[:, start] = WIDTHS_S[start] * (1 - first[:, 0] / 2)
        best[:, start] = (used[:, start:] / spent_s[:, start:]).max(axis=1)
    return best
