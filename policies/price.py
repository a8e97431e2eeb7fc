"""What a GPU second that is taken now costs all others, in seconds of their waiting: the price for `interval.compare`.

A second of computing that is added to a GPU's queue delays everyone who comes before that queue is empty again. Work of
w seconds is gone after w / (1 - ρ) on average at utilisation ρ (the busy period of a single-server queue, Kleinrock,
Queueing Systems I, 1975, section 5.8). So

    price = arrivals per GPU within w / (1 - ρ) seconds after an arrival

where w is the work in front of the GPUs, on average since whoever comes takes the one with the least, and our own: a
planner that pays it minimises the mean time to first token of all requests, not of its own alone. How many arrivals
follow within so many seconds is counted over the last requests instead of taken for their mean rate times the seconds:
they come in bursts, and the rest of a burst waits for whoever came first in it.
"""

import math
from collections import deque
from typing import Final

import numpy as np

# Utilisation is measured over the last minutes, older times counting exponentially less.
_MEMORY_S: Final = 120.0
_NUM_ARRIVALS: Final = 256
# A queue that never empties would have no price at all; and what is measured at the limit is not exact.
_MAX_UTILISATION: Final = 0.9


class GpuPrice:
    """Measures the load of `num_gpus` that share the requests. `now` never goes back. Not thread-safe."""

    def __init__(self, num_gpus: int, now: float) -> None:
        self._num_gpus = num_gpus
        self._began = self._at = now
        self._arrivals_s: deque[float] = deque(maxlen=_NUM_ARRIVALS)
        self._busy_s = 0.0

    def arrived(self, now: float) -> None:
        self._arrivals_s.append(now)

    def computed(self, seconds: float, now: float) -> None:
        """One GPU was busy for `seconds`."""
        self._age(now)
        self._busy_s += seconds

    def ask(self, work_s: float, now: float) -> float:
        """Return the price where `work_s` is what stands in front of a GPU, on average, and what our own may add."""
        self._age(now)
        # So much time is remembered: at the start not all of _MEMORY_S has passed.
        span_s = _MEMORY_S * -math.expm1((self._began - now) / _MEMORY_S) * self._num_gpus
        if span_s <= 0 or not self._arrivals_s:
            return 0.0
        utilisation = min(self._busy_s / span_s, _MAX_UTILISATION)
        return self._followers(work_s / (1.0 - utilisation), now) / self._num_gpus

    def _followers(self, within_s: float, now: float) -> float:
        """Return how many arrivals followed each one within so many seconds, on average over the last ones."""
        arrivals_s = np.array(self._arrivals_s)
        # Of the newest it is not known yet; where it is of none, the time that has passed since the oldest must do.
        within_s = min(within_s, now - arrivals_s[0])
        known = max(1, int(np.searchsorted(arrivals_s, now - within_s, side="right")))
        last = np.searchsorted(arrivals_s, arrivals_s[:known] + within_s, side="right")
        return float(np.mean(last - np.arange(1, known + 1)))

    def _age(self, now: float) -> None:
        factor = math.exp((self._at - now) / _MEMORY_S)
        self._at = now
        self._busy_s *= factor
