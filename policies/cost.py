"""What prefilling and what loading will cost, in seconds, learned from the engine's own steps and fetches.

    step(n tokens after p cached, d decodes) = c0 + a·n + b·(n·p + n²/2) + e·d
    step(d decodes alone)                    = d0 + e·d
    prefill(n | p)                           = c0·chunks + a·n + b·(n·p + n²/2)
    load(tier, bytes)                        = queue + latency + bytes / bandwidth

Decodes alone take another way through most engines (matrix times vector, recorded graphs), with less in front: one on
two cores took 45 ms and a step of 15 new tokens 95. Under one constant for both, the small steps at which an interval
plan ends were taken for a quarter too cheap, and long contexts for as much too dear.

How the coefficients are found is in `fit.py`, how they follow a machine that changes in `learner.py`, and when a tier's
are too old in `tier_load.py`. Every answer has a `Confidence` and a spread. Not thread-safe: the step loop owns it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.core.outcome import TierKind
from policies.confidence import Confidence
from policies.fit import Floats, Prior, known
from policies.learner import Learner
from policies.tier_load import TierLoad

Ints = npt.NDArray[np.int64]

# Newest steps with prefill that are kept, and newest with decodes alone.
_STEP_WINDOWS: Final = (96, 64)
_MIN_PREFILLS: Final = 3
_GOOD_PREFILLS: Final = 12
_GUESS_DOUBT: Final = 2.0
_SAVED_DOUBT: Final = 0.5
# Steps that the size of what an earlier run saved counts as: the machine may be another one today.
_SAVED_ANCHOR: Final = 1.5

# c0, a, b, e, d0 of a 0.1-billion-parameter model on two CPU cores; it only decides until the first measurements.
_STEP_GUESS: Final = (5e-2, 3e-3, 2e-7, 2e-2, 3e-2)
# Latency in s, s per byte; SSD and S3 as measured on the reference machine, see benchmarks.
_LOAD_GUESS: Final[Mapping[TierKind, tuple[float, float]]] = {
    TierKind.HBM: (1e-5, 1 / 50e9),
    TierKind.RAM: (1e-3, 1 / 2e9),
    TierKind.SSD: (5e-3, 1 / 0.4e9),
    TierKind.S3: (5e-2, 1 / 0.2e9),
}
# A load that stood behind others took a little of its time itself.
_LEAST_SHARE: Final = 0.05


# c0, a, b, e, d0.
StepCoefficients = tuple[float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step of the engine computed: `prefill_work` is the sum of n·p + n²/2 over its prefill slices."""

    prefill_tokens: int
    prefill_work: float
    num_decodes: int

    @property
    def terms(self) -> StepCoefficients:
        """What each coefficient of a step is multiplied by."""
        has_prefill = self.prefill_tokens > 0
        return float(has_prefill), self.prefill_tokens, self.prefill_work, self.num_decodes, float(not has_prefill)

    @classmethod
    def of(cls, prefills: Iterable[tuple[int, int]], num_decodes: int) -> "StepWork":
        """`prefills` holds (n, p) per slice: n new tokens after p cached ones."""
        tokens, work = 0, 0.0
        for new, cached in prefills:
            tokens += new
            work += attention_work(new, cached)
        return cls(tokens, work, num_decodes)


def attention_work(new_tokens: int, cached_tokens: int) -> float:
    """Return how many pairs of a new token and a token that it attends to there are."""
    return new_tokens * cached_tokens + new_tokens * new_tokens / 2


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """A fitted prefill cost, to be handed to another thread."""

    chunk_tokens: int
    per_step_s: float
    per_token_s: float
    per_pair_s: float

    def predict(self, new_tokens: int, cached_tokens: int) -> float:
        """Seconds to compute `new_tokens` after `cached_tokens`, in chunks, with nothing else in the steps."""
        if new_tokens <= 0:
            return 0.0
        chunks = math.ceil(new_tokens / self.chunk_tokens)
        pairs = attention_work(new_tokens, cached_tokens)
        return self.per_step_s * chunks + self.per_token_s * new_tokens + self.per_pair_s * pairs

    def predict_each(self, new_tokens: Ints, cached_tokens: Ints) -> Floats:
        """As `predict`, for each pair of [n] new and [n] cached tokens."""
        new, cached = np.maximum(new_tokens, 0).astype(np.float64), cached_tokens.astype(np.float64)
        steps = np.ceil(new / self.chunk_tokens)
        seconds: Floats = self.per_step_s * steps + self.per_token_s * new + self.per_pair_s * new * (cached + new / 2)
        return seconds


@dataclass(frozen=True, slots=True)
class LoadCost:
    """What bringing blocks of one tier into HBM costs, while others' bytes take `queue_s` before ours begin."""

    latency_s: float
    per_byte_s: float
    queue_s: float = 0.0

    def predict(self, num_bytes: int) -> float:
        """Seconds until the last byte is there; nothing takes no time."""
        return self.queue_s + self.latency_s + self.per_byte_s * num_bytes if num_bytes else 0.0


@dataclass(frozen=True, slots=True)
class SavedCosts:
    """What a run of the engine has learned: c0, a, b, e, d0 of its steps, and latency and s per byte of each tier.

    None, or a tier that is missing: it was not measured.
    """

    step: StepCoefficients | None = None
    loads: Mapping[TierKind, tuple[float, float]] = field(default_factory=dict)


class CostModel:
    """The costs a plan weighs. `saved` is what an earlier run on this machine has learned; what is measured now soon
    counts for more."""

    def __init__(self, chunk_tokens: int, clock: Callable[[], float], saved: SavedCosts | None = None) -> None:
        saved = saved or SavedCosts()
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        self._saved = saved
        prior = Prior(_STEP_GUESS, _GUESS_DOUBT, may_be_far=True)
        if saved.step is not None:
            prior = known(saved.step, prior, _SAVED_DOUBT, _SAVED_ANCHOR)
        # What long contexts cost is not forgotten over many short prompts.
        self._steps = Learner(prior, _STEP_WINDOWS, may_be_far=False)
        self._loads = {tier: TierLoad(guess, clock, saved.loads.get(tier)) for tier, guess in _LOAD_GUESS.items()}

    # ------------------------------------------------------------ learning

    def observe_step(self, work: StepWork, seconds: float) -> None:
        if not 0 < seconds < math.inf or (work.prefill_tokens == 0 and work.num_decodes == 0):
            return
        self._steps.observe(work.terms, seconds, seconds, self._clock(), kind=0 if work.prefill_tokens else 1)

    def observe_load(self, tier: TierKind, num_bytes: int, seconds: float, least_s: float | None = None) -> None:
        """One completed load: `num_bytes` from `tier` were in HBM `seconds` after they were asked for.

        `least_s`: where others were in front or between, so that it would have taken less alone, what it would have
        taken at least. Anything between the two is taken for equally likely.
        """
        if 0 < seconds < math.inf and num_bytes > 0:
            least_s = seconds if least_s is None else min(max(least_s, _LEAST_SHARE * seconds), seconds)
            self._loads[tier].observe(num_bytes, least_s, seconds)

    def observe_unfinished(self, tier: TierKind, num_bytes: int, seconds: float) -> None:
        """Of a load of `num_bytes` nothing was in HBM after `seconds`, when it was given up: it takes longer."""
        if 0 < seconds < math.inf and num_bytes > 0:
            self._loads[tier].observe_unfinished(num_bytes, seconds)

    def observe_silence(self, tier: TierKind, seconds: float) -> None:
        """A load was given up after so many seconds without a block; the tier is expected to stay silent as long."""
        self._loads[tier].observe_silence(seconds)

    # ------------------------------------------------------------ answering

    @property
    def prefill_confidence(self) -> Confidence:
        count = self._steps.count(kind=0)
        if count >= _MIN_PREFILLS:
            return Confidence.MEASURED if count >= _GOOD_PREFILLS else Confidence.ROUGH
        return Confidence.GUESSED if self._saved.step is None else Confidence.SAVED

    def load_confidence(self, tier: TierKind) -> Confidence:
        return self._loads[tier].confidence()

    @property
    def prefill_known(self) -> bool:
        return self.prefill_confidence.is_known

    def load_known(self, tier: TierKind) -> bool:
        return self.load_confidence(tier).is_known

    def prefill(self, new_tokens: int, cached_tokens: int) -> float:
        """As `PrefillCost.predict`."""
        return self.prefill_cost().predict(new_tokens, cached_tokens)

    def prefill_cost(self) -> PrefillCost:
        per_step_s, per_token_s, per_pair_s, *_ = self.step_coefficients()
        return PrefillCost(self._chunk_tokens, per_step_s, per_token_s, per_pair_s)

    def prefill_spread(self, new_tokens: int, cached_tokens: int) -> float:
        """Return the relative standard error of `prefill`: large where nothing like it was measured."""
        chunks = math.ceil(new_tokens / self._chunk_tokens)
        return self._steps.fitted().spread((chunks, new_tokens, attention_work(new_tokens, cached_tokens), 0.0, 0.0))

    def load(self, num_bytes: Mapping[TierKind, int]) -> float:
        """Seconds to load so many bytes from each tier; the tiers work side by side, so the slowest one decides."""
        return max((self.load_cost(tier).predict(count) for tier, count in num_bytes.items()), default=0.0)

    def load_cost(self, tier: TierKind) -> LoadCost:
        """Return what loading from `tier` costs while nothing else is asked of it; `queue_s` is how much longer it is
        expected to stay silent. What stands in front otherwise is known to whoever asked for it."""
        return LoadCost(*self.load_coefficients(tier), queue_s=self._loads[tier].silence_s())

    def load_spread(self, tier: TierKind, num_bytes: int) -> float:
        """Return the relative standard error of a load's seconds, without the queue."""
        return self._loads[tier].fitted().spread((1.0, num_bytes))

    def step_coefficients(self) -> StepCoefficients:
        """Return c0, a, b, e, d0."""
        c0, a, b, e, d0 = self._steps.fitted().coefficients
        return c0, a, b, e, d0

    def step(self, work: StepWork) -> float:
        """Seconds of one step."""
        return sum(term * value for term, value in zip(work.terms, self.step_coefficients(), strict=True))

    def load_coefficients(self, tier: TierKind) -> tuple[float, float]:
        """Return latency in seconds, and seconds per byte."""
        latency_s, per_byte_s = self._loads[tier].fitted().coefficients
        return latency_s, per_byte_s

    def worth_saving(self) -> SavedCosts:
        """Return what the next run may begin with: what was measured, or was saved before and not measured since."""
        loads = {tier: load.worth_saving() for tier, load in self._loads.items()}
        return SavedCosts(
            self.step_coefficients() if self.prefill_known else None,
            {tier: figures for tier, figures in loads.items() if figures is not None},
        )
