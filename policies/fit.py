"""Non-negative coefficients from few, noisy measurements, some of them wrong by a factor.

    seconds ≈ row · coefficients,  coefficients ≥ 0

Minimised is the relative error, so a step of 10 ms counts as much as one of 10 s. The start is a fit of the error
relative to what was measured, clipped (Huber, Robust Estimation of a Location Parameter, 1964): a measurement that is
five times too slow has a fifth of the say there. Then come rounds of Tukey's biweight, relative to what is predicted,
under which it has none. The measurements are joined by a prior, as a Bayesian would: its proportions, with the relative
doubt it is given, at the size that the measurements show. A direction that nothing was measured of stays as it was
known before, and the spread of a prediction tells how much of it is that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# A relative residual beyond this counts less and less in the first rounds.
_HUBER_DELTA: Final = 0.15
_HUBER_ROUNDS: Final = 2
# Beyond so many standard deviations a measurement counts nothing; 95% efficient on normal noise.
_BIWEIGHT: Final = 4.685
# The first rounds spare what a minority of another kind may be; the last one is free.
_BIWEIGHT_LEAST: Final = (1.5, 0.75, 0.4, 0.0, 0.0)
# A median of absolute residuals, as a standard deviation.
_MAD: Final = 1.4826
# Two steps of the same work differ by that much on any machine.
_LEAST_NOISE: Final = 0.02
# What is assumed of the noise before there is any, and for how many measurements that counts.
_PRIOR_NOISE: Final = 0.1
_PRIOR_NOISE_COUNT: Final = 2.0
# What lies within its bounds says little: that the prediction may stay.
_INSIDE_WEIGHT: Final = 0.1
# Of what was measured; only on the way to the answer.
_LEAST_PREDICTED: Final = 1e-6
# So much more than one on the diagonal keeps a system solvable whose terms are all but proportional.
_ROUNDING: Final = 1e-9
# Where it may be far from the prior: the share of the whole that a coefficient's doubt is at least.
_FAR_SHARE: Final = 0.5
_FARTHEST: Final = 1000.0
# Of what a coefficient might be: it may be wrong by as much though it was fitted to less.
_LEAST_SHARE: Final = 0.02


@dataclass(frozen=True, slots=True)
class Prior:
    """What is known beforehand: coefficients of at least 0, and how wrong each of them may be relative to the others.
    `units`: as large as that for this purpose where the coefficient itself is less, so that a zero may be wrong, too.

    `anchor` is how many measurements its size counts as; 0: only its proportions count. `may_be_far`: a coefficient
    that makes up little of what was measured may in truth be most of it.
    """

    coefficients: tuple[float, ...]
    doubt: float
    anchor: float = 0.0
    may_be_far: bool = False
    units: tuple[float, ...] = ()

    @property
    def scale(self) -> Floats:
        """What the doubt is relative to; above 0."""
        return np.maximum(self.coefficients, self.units or self.coefficients)


@dataclass(frozen=True, slots=True)
class Fitted:
    """`noise` is the relative standard deviation of a measurement; `covariance` of the coefficients, in s²."""

    coefficients: tuple[float, ...]
    covariance: Floats
    noise: float

    def slower(self, factor: float) -> "Fitted":
        coefficients = tuple(value * factor for value in self.coefficients)
        return Fitted(coefficients, self.covariance * factor**2, self.noise)

    def spread(self, row: Sequence[float]) -> float:
        """Return the relative standard error of the prediction for `row`; infinite where that is 0 s."""
        at = np.asarray(row, dtype=np.float64)
        seconds = float(at @ self.coefficients)
        return math.sqrt(max(0.0, float(at @ self.covariance @ at))) / seconds if seconds > 0 else math.inf


def unmeasured(prior: Prior) -> Fitted:
    """Return what the prior alone says."""
    return Fitted(prior.coefficients, np.diag((prior.doubt * prior.scale) ** 2), _PRIOR_NOISE)


def fit(rows: Floats, least: Floats, most: Floats, prior: Prior) -> Fitted:
    """Return the coefficients that predict closest to the `[n, k]` rows' seconds.

    Row i took between `least[i]` and `most[i]` seconds, equal where it was measured exactly; all are above 0.
    """
    if not len(rows):
        return unmeasured(prior)
    middle = np.sqrt(least * most)
    before, scale = np.asarray(prior.coefficients), prior.scale
    expected = rows @ before
    expected = np.where(expected > 0, expected, rows @ scale)
    size = np.exp(np.median(np.log(middle / expected)) * len(rows) / (len(rows) + prior.anchor))
    centre = before / scale
    scale = scale * size
    # Columns in units of the prior, so that its doubt is the same for each.
    columns = rows * scale
    doubts = np.full(len(scale), prior.doubt)
    if prior.may_be_far:
        doubts *= _farther(columns / middle[:, None])
    solution = _huber(columns, middle, centre, doubts)
    for least_cut in _BIWEIGHT_LEAST:
        predicted = np.maximum(columns @ solution, _LEAST_PREDICTED * middle)
        target = np.minimum(np.maximum(predicted, least), most) / predicted
        errors = target - 1.0
        noise = _noise(errors)
        weights = np.square(np.maximum(0.0, 1.0 - np.square(errors / max(_BIWEIGHT * noise, least_cut))))
        weights[(errors == 0.0) & (least < most)] = _INSIDE_WEIGHT
        design = columns / predicted[:, None]
        # What does not fit because of the prior is no noise, which would give the prior a say.
        pull = np.square(min(noise, _PRIOR_NOISE) / doubts)
        gram = _definite((design * weights[:, None]).T @ design, pull)
        solution = _non_negative(gram, design.T @ (weights * target) + pull * centre)
    covariance = np.asarray(np.linalg.inv(gram), np.float64) * noise**2 * np.outer(scale, scale)
    return Fitted(tuple((solution * scale).tolist()), covariance, noise)


def known(
    coefficients: tuple[float, ...], guess: Prior, doubt: float, anchor: float = 0.0, *, may_be_far: bool = False
) -> Prior:
    """Return what was found as the prior of what comes; `guess` tells how large a coefficient might be that is 0."""
    size = max(value / before for value, before in zip(coefficients, guess.scale.tolist(), strict=True))
    units = tuple((_LEAST_SHARE * size * guess.scale).tolist())
    return Prior(coefficients, doubt, anchor, may_be_far, units)


def _huber(columns: Floats, middle: Floats, centre: Floats, doubts: Floats) -> Floats:
    design = columns / middle[:, None]
    pull = np.square(_PRIOR_NOISE / doubts)
    weights = np.ones(len(middle))
    solution = centre
    for _ in range(_HUBER_ROUNDS):
        weighted = design * weights[:, None]
        solution = _non_negative(_definite(weighted.T @ design, pull), weighted.sum(axis=0) + pull * centre)
        weights = np.minimum(1.0, _HUBER_DELTA / np.maximum(np.abs(design @ solution - 1.0), 1e-12))
    return solution


def _farther(shares: Floats) -> Floats:
    """Return by how much to widen each coefficient's doubt, from its share of each measurement."""
    rows = np.count_nonzero(shares, axis=0)
    mean = shares.sum(axis=0) / np.maximum(rows, 1)
    return np.where(rows > 0, np.clip(_FAR_SHARE / np.maximum(mean, 1e-12), 1.0, _FARTHEST), 1.0)


def _noise(errors: Floats) -> float:
    measured = _MAD * float(np.median(np.abs(errors)))
    count = len(errors)
    variance = (count * measured**2 + _PRIOR_NOISE_COUNT * _PRIOR_NOISE**2) / (count + _PRIOR_NOISE_COUNT)
    # The longer nothing contradicts, the less of the first assumption is left.
    return float(max(_LEAST_NOISE, np.sqrt(variance))) if count < 16 else max(_LEAST_NOISE, measured)


def _definite(gram: Floats, pull: Floats) -> Floats:
    gram.flat[:: len(gram) + 1] += pull + _ROUNDING * gram.diagonal()
    return gram


def _non_negative(gram: Floats, moment: Floats) -> Floats:
    """Minimise x·gram·x - 2·x·moment over x ≥ 0; `gram` is positive definite.

    At most 5 coefficients, so that all sets of those that may be above zero can be tried at once: exact, unlike
    clipping the free solution.
    """
    free = np.asarray(np.linalg.solve(gram, moment), np.float64)
    if (free >= 0).all():
        return free
    masks = _masks(len(moment))
    # Rows and columns of the others are those of the identity, and their moment is 0.
    systems = np.where(masks[:, :, None] & masks[:, None, :], gram, np.eye(len(moment)))
    moments = np.where(masks, moment, 0.0)
    solutions: Floats = np.linalg.solve(systems, moments[:, :, None])[:, :, 0]
    # At a stationary point of its set the value is -x·moment.
    values = np.where((solutions >= 0).all(axis=1), -(solutions * moments).sum(axis=1), np.inf)
    best = int(np.argmin(values))
    return solutions[best] if values[best] < np.inf else np.zeros(len(moment))


@cache
def _masks(size: int) -> npt.NDArray[np.bool_]:
    return (np.arange(1, 1 << size)[:, None] >> np.arange(size) & 1).astype(np.bool_)
