"""What prefilling and what loading will cost, in seconds, learned from the engine's own steps and fetches.

    step(n tokens after p cached, d decodes) = c0 + a·n + b·(n·p + n²/2) + e·d
    prefill(n | p)                           = c0·chunks + a·n + b·(n·p + n²/2)
    load(tier, bytes)                        = latency + bytes / bandwidth

Each is a least-squares fit of the relative error over the newest observations, with coefficients kept at or above
zero, outliers clipped (Huber, Robust Estimation of a Location Parameter, 1964) and a weak pull towards a prior whose
size is set by the observations too, so that a coefficient which nothing has shown yet has a sane value for this
machine. Not thread-safe: the step loop owns it.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import numpy.typing as npt

from kvstore.core.outcome import TierKind

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# A relative residual beyond this counts less and less: other load on the machine must not move the fit.
_HUBER_DELTA = 0.15
_HUBER_ROUNDS = 3
# Weight of the prior against one observation: 1% of it.
_PRIOR_WEIGHT = 0.01
_STEP_WINDOW = 64
_LOAD_WINDOW = 32
_MIN_PREFILLS = 3
_MIN_LOADS = 2
# A tier that was once slow must get another chance though the plan avoids it: what is older is forgotten.
_LOAD_MAX_AGE_S = 120.0

# c0, a, b, e of a 0.1-billion-parameter model on two CPU cores; it only decides until the first measurements.
_STEP_PRIOR = (5e-2, 3e-3, 2e-7, 2e-2)
# Latency in s, s per byte; SSD and S3 as measured on the reference machine, see benchmarks.
_LOAD_PRIOR: Mapping[TierKind, tuple[float, float]] = {
    TierKind.HBM: (1e-5, 1 / 50e9),
    TierKind.RAM: (1e-3, 1 / 2e9),
    TierKind.SSD: (5e-3, 1 / 0.4e9),
    TierKind.S3: (5e-2, 1 / 0.2e9),
}


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step of the engine computed: `prefill_work` is the sum of n·p + n²/2 over its prefill slices."""

    prefill_tokens: int
    prefill_work: float
    num_decodes: int

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


class CostModel:
    """The two costs a plan weighs. `known` tells whether enough was measured to rely on them."""

    def __init__(self, chunk_tokens: int, clock: Callable[[], float]) -> None:
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        self._prefills: deque[tuple[StepWork, float]] = deque(maxlen=_STEP_WINDOW)
        self._decodes: deque[tuple[StepWork, float]] = deque(maxlen=_STEP_WINDOW // 2)
        self._step_fit: tuple[float, ...] | None = None
        self._loads: dict[TierKind, deque[tuple[float, int, float]]] = {}
        self._load_fits: dict[TierKind, tuple[int, tuple[float, float]]] = {}

    # ------------------------------------------------------------ learning

    def observe_step(self, work: StepWork, seconds: float) -> None:
        if seconds <= 0 or (work.prefill_tokens == 0 and work.num_decodes == 0):
            return
        (self._prefills if work.prefill_tokens else self._decodes).append((work, seconds))
        self._step_fit = None

    def observe_load(self, tier: TierKind, num_bytes: int, seconds: float) -> None:
        """One completed fetch: `num_bytes` from `tier` were in HBM `seconds` after they were asked for."""
        if seconds > 0 and num_bytes > 0:
            window = self._loads.setdefault(tier, deque(maxlen=_LOAD_WINDOW))
            window.append((self._clock(), num_bytes, seconds))
            self._load_fits.pop(tier, None)

    # ------------------------------------------------------------ answering

    @property
    def prefill_known(self) -> bool:
        return len(self._prefills) >= _MIN_PREFILLS

    def load_known(self, tier: TierKind) -> bool:
        return len(self._fresh_loads(tier)) >= _MIN_LOADS

    def prefill(self, new_tokens: int, cached_tokens: int) -> float:
        """As `PrefillCost.predict`."""
        return self.prefill_cost().predict(new_tokens, cached_tokens)

    def prefill_cost(self) -> PrefillCost:
        per_step_s, per_token_s, per_pair_s, _ = self.step_coefficients()
        return PrefillCost(self._chunk_tokens, per_step_s, per_token_s, per_pair_s)

    def load(self, num_bytes: Mapping[TierKind, int]) -> float:
        """Seconds to load so many bytes from each tier; the tiers work side by side, so the slowest one decides."""
        return max((self.load_cost(tier).predict(count) for tier, count in num_bytes.items()), default=0.0)

    def load_cost(self, tier: TierKind) -> LoadCost:
        return LoadCost(*self.load_coefficients(tier))

    def step_coefficients(self) -> tuple[float, ...]:
        """Return c0, a, b, e."""
        if self._step_fit is None:
            observed = [*self._prefills, *self._decodes]
            rows = [(1.0, w.prefill_tokens, w.prefill_work, w.num_decodes) for w, _ in observed]
            self._step_fit = fit(rows, [seconds for _, seconds in observed], _STEP_PRIOR)
        return self._step_fit

    def load_coefficients(self, tier: TierKind) -> tuple[float, float]:
        """Return latency in seconds, and seconds per byte."""
        fresh = self._fresh_loads(tier)
        cached = self._load_fits.get(tier)
        if cached is None or cached[0] != len(fresh):
            rows = [(1.0, float(count)) for _, count, _ in fresh]
            latency_s, per_byte_s = fit(rows, [seconds for _, _, seconds in fresh], _LOAD_PRIOR[tier])
            cached = len(fresh), (latency_s, per_byte_s)
            self._load_fits[tier] = cached
        return cached[1]

    def _fresh_loads(self, tier: TierKind) -> Sequence[tuple[float, int, float]]:
        window = self._loads.get(tier)
        if window is None:
            return ()
        oldest = self._clock() - _LOAD_MAX_AGE_S
        while window and window[0][0] < oldest:
            window.popleft()
        return window


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float], prior: Sequence[float]) -> tuple[float, ...]:
    """Return the non-negative coefficients c that make rows[i]·c closest to seconds[i], relatively.

    `prior` holds their positive values where nothing was observed; with observations only its proportions count.
    """
    if not rows:
        return tuple(prior)
    target = np.asarray(seconds, dtype=np.float64)
    matrix = np.asarray(rows, dtype=np.float64)
    scale = np.asarray(prior, dtype=np.float64)
    scale = scale * np.median(target / (matrix @ scale))
    # Columns in units of the prior, so that the pull towards it is the same for each; rows relative to the target.
    design = matrix * scale / target[:, None]
    weights = np.ones(len(target))
    solution = np.ones(len(scale))
    for _ in range(_HUBER_ROUNDS):
        weighted = design * weights[:, None]
        gram = weighted.T @ design + _PRIOR_WEIGHT**2 * np.eye(len(scale))
        moment = weighted.sum(axis=0) + _PRIOR_WEIGHT**2
        solution = _non_negative(gram, moment)
        residuals = np.abs(design @ solution - 1.0)
        weights = np.minimum(1.0, _HUBER_DELTA / np.maximum(residuals, 1e-12))
    return tuple(float(value) for value in solution * scale)


def _non_negative(gram: npt.NDArray[np.float64], moment: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Minimise x·gram·x - 2·x·moment over x ≥ 0 by trying every set of coefficients that may be above zero.

    At most 4 coefficients, so at most 15 small systems; exact, unlike clipping the free solution.
    """
    size = len(moment)
    best, best_value = np.zeros(size), 0.0
    for mask in range(1, 1 << size):
        chosen = list(compress(range(size), [mask >> i & 1 for i in range(size)]))
        part = np.linalg.solve(gram[np.ix_(chosen, chosen)], moment[chosen])
        if (part < 0).any():
            continue
        value = float(part @ gram[np.ix_(chosen, chosen)] @ part - 2 * part @ moment[chosen])
        if value < best_value:
            best_value = value
            best = np.zeros(size)
            best[chosen] = part
    return best
