"""What some kind of work takes, learned from a stream of measurements that may drift.

A fit over a window of the newest (`fit.py`) knows the proportions. That all of it became faster or slower is seen
sooner (`speed.py`), and then what is older is rescaled to the new speed and stays of use.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from policies.fit import Fitted, Floats, Prior, fit, known, unmeasured
from policies.speed import Speed

# Measurements between two looks at what is known by now, which is then the prior of what comes.
_SETTLE_EVERY: Final = 32
_SETTLED_DOUBT: Final = 0.5
# At most so many measurements wait for the next fit.
_MAX_PENDING: Final = 8

# Columns behind the terms of a measurement: bounds in s, when, and its number.
_LEAST, _MOST, _AT, _NUMBER = range(-4, 0)


class Learner:
    """One linear cost over rows of at most 5 terms. `windows` are how many of the newest are kept, by kind: what is
    frequent must not push out what is rare. `may_be_far`: see `Prior`; of what was learned. Not thread-safe."""

    def __init__(self, prior: Prior, windows: Sequence[int], *, may_be_far: bool) -> None:
        self._first = prior
        self._may_be_far = may_be_far
        self.prior = prior
        self._rings = [_Ring(size, len(prior.coefficients)) for size in windows]
        self._speed = Speed()
        self._seen = 0
        self._settled_at = 0
        self._pending = 0
        self._fitted = unmeasured(prior)
        self._fitted_count = 0

    def observe(self, row: Sequence[float], least_s: float, most_s: float, now: float, kind: int = 0) -> None:
        """The work of `row` took between so many seconds, both above 0."""
        self._seen += 1
        self._pending += 1
        self._rings[kind].append((*row, least_s, most_s, now, self._seen))
        if self._fitted_count:
            predicted_s = sum(term * value for term, value in zip(row, self._fitted.coefficients, strict=True))
            nearest_s = min(max(predicted_s, least_s), most_s)
            self._speed.observe(math.log(nearest_s / predicted_s) if predicted_s > 0 else 0.0, kind)
            if self._seen % _MAX_PENDING == 0:
                # Not only when somebody asks: what came before the change must not have left the window by then.
                self._follow()

    def count(self, since: float = -math.inf, kind: int = 0) -> int:
        """Return how many of the window were measured at or after `since`."""
        return self._rings[kind].count(since)

    def fitted(self, since: float = -math.inf) -> Fitted:
        """Return what is known, from measurements at or after `since`; may lack the newest few."""
        count = sum(ring.count(since) for ring in self._rings)
        # With nothing new, fewer means that some are too old by now.
        if self._pending >= max(1, min(_MAX_PENDING, count // 8)) or count < self._fitted_count:
            self._fit(since)
        return self._fitted

    def forget(self, prior: Prior) -> None:
        """Begin anew from `prior`."""
        for ring in self._rings:
            ring.clear()
        self._speed = Speed()
        self.prior, self._fitted, self._fitted_count, self._pending = prior, unmeasured(prior), 0, 0

    def _fit(self, since: float) -> None:
        samples = np.concatenate([ring.newest(since) for ring in self._rings])
        self._pending, self._fitted_count = 0, len(samples)
        if not len(samples):
            self._fitted = unmeasured(self.prior)
            return
        try:
            fitted = fit(samples[:, :_LEAST], samples[:, _LEAST], samples[:, _MOST], self.prior)
        except np.linalg.LinAlgError:
            # Nothing is known to bring this about; whoever computes must not stop because of it.
            return
        self._fitted = fitted
        if self._seen - self._settled_at >= _SETTLE_EVERY:
            self._settled_at = self._seen
            far = self._may_be_far
            self.prior = known(self._fitted.coefficients, self._first, _SETTLED_DOUBT, may_be_far=far)

    def _follow(self) -> None:
        """Rescale what is known from before the speed changed, if it did."""
        change, num_since = self._speed.change()
        if not change:
            return
        for ring in self._rings:
            ring.rescale(self._seen - num_since, math.exp(change))
        self._fitted = self._fitted.slower(math.exp(change))
        self._pending = _MAX_PENDING


class _Ring:
    """The newest measurements of one kind, one row each: terms, then the columns above."""

    def __init__(self, size: int, terms: int) -> None:
        self._samples = np.zeros((size, terms - _LEAST))
        self._num = 0

    def append(self, sample: Sequence[float]) -> None:
        self._samples[self._num % len(self._samples)] = sample
        self._num += 1

    def newest(self, since: float) -> Floats:
        samples = self._samples[: self._num]
        return samples if since == -math.inf else samples[samples[:, _AT] >= since]

    def count(self, since: float) -> int:
        if since == -math.inf:
            return min(self._num, len(self._samples))
        return int(np.count_nonzero(self._samples[: self._num, _AT] >= since))

    def rescale(self, number: int, factor: float) -> None:
        """Multiply the seconds of the measurements up to `number`."""
        samples = self._samples[: self._num]
        samples[samples[:, _NUMBER] <= number, _LEAST:_AT] *= factor

    def clear(self) -> None:
        self._num = 0
