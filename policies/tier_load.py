"""What loading from one tier takes: its latency and its rate, as long as it answers.

A tier that said nothing for x seconds is left alone for as long, and twice as long the next time; then somebody tries
it again.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from policies.confidence import Confidence
from policies.fit import Fitted, Prior, known
from policies.learner import Learner

_WINDOW: Final = 48
# A tier that was once slow must get another chance though the plan avoids it: what is older counts half from then on.
MAX_AGE_S: Final = 120.0
_SAVED_MAX_AGE_S: Final = 600.0
_MIN_LOADS: Final = 2
_GOOD_LOADS: Final = 8
_GUESS_DOUBT: Final = 2.0
_SAVED_DOUBT: Final = 0.5
_STALE_DOUBT: Final = 1.0
# Loads that a saved prior's size counts as.
_SAVED_ANCHOR: Final = 1.5
_MAX_SILENCE_S: Final = 60.0
# A load that was given up is taken to need up to so many times as long.
_UNFINISHED: Final = 2.0


class TierLoad:
    """One tier's. `guess` and `saved`, from an earlier run, are latency in s and s per byte. Not thread-safe."""

    def __init__(
        self, guess: tuple[float, float], clock: Callable[[], float], saved: tuple[float, float] | None = None
    ) -> None:
        self._clock = clock
        self._saved_at_s = None if saved is None else clock()
        self._guess = prior = Prior(guess, _GUESS_DOUBT, may_be_far=True)
        if saved is not None:
            prior = known(saved, prior, _SAVED_DOUBT, _SAVED_ANCHOR, may_be_far=True)
        self._learner = Learner(prior, [_WINDOW], may_be_far=True)
        # What was measured last, however long ago.
        self._last = saved
        self._was_measured = False
        self._silence_s = 0.0
        self._silent_until_s = 0.0

    # ------------------------------------------------------------ learning

    def observe(self, num_bytes: int, least_s: float, most_s: float) -> None:
        self._refresh()
        self._learner.observe((1.0, num_bytes), least_s, most_s, self._clock())
        self._silence_s = self._silent_until_s = 0.0

    def observe_unfinished(self, num_bytes: int, seconds: float) -> None:
        """The load takes longer than that. Where that was expected beforehand, it says nothing."""
        latency_s, per_byte_s = self.fitted().coefficients
        expected_s = latency_s + per_byte_s * num_bytes
        if expected_s < seconds or (self._learner.count() and expected_s < _UNFINISHED * seconds):
            self._learner.observe((1.0, num_bytes), seconds, _UNFINISHED * seconds, self._clock())

    def observe_silence(self, seconds: float) -> None:
        self._silence_s = min(_MAX_SILENCE_S, max(seconds, 2 * self._silence_s))
        self._silent_until_s = self._clock() + self._silence_s

    # ------------------------------------------------------------ answering

    def silence_s(self) -> float:
        return max(0.0, self._silent_until_s - self._clock())

    def fitted(self) -> Fitted:
        self._refresh()
        return self._learner.fitted(self._clock() - MAX_AGE_S)

    def confidence(self) -> Confidence:
        self._refresh()
        count = self._learner.count(self._clock() - MAX_AGE_S)
        if count >= _GOOD_LOADS:
            return Confidence.MEASURED
        if count >= (1 if self._was_measured or self._saved_at_s is not None else _MIN_LOADS):
            return Confidence.ROUGH
        if self._saved_at_s is not None and self._clock() - self._saved_at_s <= _SAVED_MAX_AGE_S:
            return Confidence.SAVED
        return Confidence.STALE if self._was_measured or self._saved_at_s is not None else Confidence.GUESSED

    def worth_saving(self) -> tuple[float, float] | None:
        """Return what a later run may begin with: what was measured last, however long ago; None: nothing was."""
        if self.confidence() < Confidence.ROUGH:
            return self._last
        latency_s, per_byte_s = self.fitted().coefficients
        return latency_s, per_byte_s

    def _refresh(self) -> None:
        """Let what was measured last become, halfway, what is assumed, once all of it is too old."""
        if not self._learner.count() or self._learner.count(self._clock() - MAX_AGE_S):
            return
        latency_s, per_byte_s = self._learner.fitted().coefficients
        self._last = latency_s, per_byte_s
        last = known(self._last, self._guess, _STALE_DOUBT)
        middle = np.sqrt(last.scale * self._learner.prior.scale)
        self._learner.forget(Prior(tuple(middle.tolist()), _STALE_DOUBT, may_be_far=True))
        self._was_measured = True
        self._saved_at_s = None
