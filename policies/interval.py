"""The best compute interval: which cached blocks to load and which to compute meanwhile, for the least time to first
token, from what lies where and what stands in front of each queue.

    0        resident      start            end           cached      prompt
    | in HBM | loaded      | computed       | loaded      | computed  |
             |<-- first -->|<-- meanwhile ->|<- with it ->|<- last -->|

Every plan is one interval [start, end) of the blocks that are cached beyond HBM: nothing (load all), everything
(recompute all), an end piece (a prefix cut), a front piece (two-ended, as in Cake, arXiv 2410.03065), or one in the
middle, which is best where the head lies near and the tail far away. Attention is causal, so the interval can begin
only once everything before it is in HBM, and the rest only once everything is.

    head(s)     = max over tiers of load(bytes of [resident, s) in the tier)
    loaded(s,e) = max over tiers of load(bytes of [resident, s) and [e, cached) in the tier)
    begin(s)    = max(GPU's queue, head(s))
    time(s,e)   = max(begin(s) + prefill(e - s | s), loaded(s,e)) + prefill(prompt - cached | cached)

and where the interval reaches the last cached block, it is computed in one go with what comes after it:

    time(s,n)   = begin(s) + prefill(prompt - s | s)

For each s the computed side grows with e and the loaded side falls, so the best e lies where they cross: found for
all s at once by bisection, O(n log n) for n blocks, and exact. With a price on GPU seconds the best e may come before
the crossing, and is searched for on a grid that is refined where it is cheapest; 10,000 random cases stayed within 1%
of the optimum (tests/policies/test_interval.py). Pure and deterministic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.core.outcome import TierKind
from policies.cost import Ints, LoadCost, PrefillCost
from policies.fit import Floats

# Of plans that differ by less than this share the one that computes less is taken: it leaves the GPU to others.
_TIE: Final = 1e-9
# Starts and ends of the first grid, and how many of its cheapest plans are looked around.
_GRID: Final = 56
_REFINED: Final = 2
_MAX_BORDERS: Final = 16


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt. Its first `resident_blocks` are in HBM, block resident_blocks + i is in `tiers[i]`; the GPU is busy
    with others for `gpu_queue_s`."""

    prompt_tokens: int
    block_tokens: int
    block_bytes: int
    resident_blocks: int
    tiers: Sequence[TierKind]
    gpu_queue_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    """Blocks [start, end), counted from the first that is not resident, are computed; the others of the cached ones are
    loaded. `seconds` until the first token, `gpu_s` of them computing."""

    start: int
    end: int
    seconds: float
    gpu_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The best plan of each kind; `best` is the one to take."""

    best: Interval
    load_all: Interval
    recompute_all: Interval
    prefix_cut: Interval
    two_ended: Interval


def compare(
    question: Question, prefill: PrefillCost, loads: Mapping[TierKind, LoadCost], gpu_price: float = 0.0
) -> Comparison:
    """Return the plan of each kind with the least seconds + gpu_price · gpu_s.

    `loads` has an entry for each of the question's tiers. `gpu_price` 0 asks for the least latency of this request;
    above it, GPU seconds are saved for the throughput of all.
    """
    times = _Times(question, prefill, loads)
    starts = np.arange(times.num_blocks + 1, dtype=np.int64)
    cuts = times.evaluate(starts, np.full_like(starts, times.num_blocks))
    two_ended = times.evaluate(np.zeros_like(starts), starts)
    crossings = times.crossings(starts)
    at, before = times.evaluate(starts, crossings), times.evaluate(starts, np.maximum(crossings - 1, starts))
    others = _on_grid(times, gpu_price) if gpu_price > 0 else []
    return Comparison(
        best=_best([cuts, two_ended, at, before, *others], gpu_price),
        load_all=cuts.interval(-1),
        recompute_all=cuts.interval(0),
        prefix_cut=_best([cuts], gpu_price),
        two_ended=_best([two_ended], gpu_price),
    )


def predict(
    question: Question, prefill: PrefillCost, loads: Mapping[TierKind, LoadCost], start: int, end: int
) -> Interval:
    """Return the plan that computes blocks [start, end), with its seconds; `loads` as in `compare`."""
    times = _Times(question, prefill, loads)
    return times.evaluate(np.array([start], dtype=np.int64), np.array([end], dtype=np.int64)).interval(0)


class _Times:
    """time(s, e) of one question, for arrays of s and e. What depends on one of them only is tabulated."""

    def __init__(self, question: Question, prefill: PrefillCost, loads: Mapping[TierKind, LoadCost]) -> None:
        num_blocks = self.num_blocks = len(question.tiers)
        kinds = np.fromiter(question.tiers, dtype=np.int8, count=num_blocks)
        # Where another tier begins.
        self.borders = np.flatnonzero(np.diff(kinds)) + 1
        self._tiers = [
            _TierTimes(loads[TierKind(kind)], kinds == kind, question.block_bytes) for kind in np.unique(kinds)
        ]
        counts = np.arange(num_blocks + 1, dtype=np.int64)
        positions = (question.resident_blocks + counts) * question.block_tokens
        # Seconds for k blocks are fresh_s[k] where nothing is before them, and context_s[s] · k more after s.
        self._fresh_s = prefill.predict_each(counts * question.block_tokens, np.zeros_like(counts))
        self._context_s = prefill.per_pair_s * question.block_tokens * positions.astype(np.float64)
        # From block s to the end of the prompt in one go.
        self._through_s = prefill.predict_each(question.prompt_tokens - positions, positions)
        self._begin_s = np.full(num_blocks + 1, float(question.gpu_queue_s))
        for tier in self._tiers:
            np.maximum(self._begin_s, tier.head_s, out=self._begin_s)

    def evaluate(self, starts: Ints, ends: Ints) -> "_Evaluated":
        whole = ends == self.num_blocks
        interval_s = self._interval_s(starts, ends)
        begin_s, through_s, last_s = self._begin_s[starts], self._through_s[starts], self._through_s[-1]
        ready_s = np.maximum(begin_s + interval_s, self._loaded(starts, ends))
        seconds = np.where(whole, begin_s + through_s, ready_s + last_s)
        return _Evaluated(starts, ends, seconds, np.where(whole, through_s, interval_s + last_s))

    def crossings(self, starts: Ints) -> Ints:
        """Return per start the first end at which computing takes as long as loading, at most num_blocks."""
        low, high = starts.copy(), np.full_like(starts, self.num_blocks)
        for _ in range(self.num_blocks.bit_length()):
            middle = (low + high) // 2
            computed_s = self._begin_s[starts] + self._interval_s(starts, middle)
            is_reached = computed_s >= self._loaded(starts, middle)
            high = np.where(is_reached, middle, high)
            low = np.where(is_reached, low, np.minimum(middle + 1, high))
        return high

    def _loaded(self, starts: Ints, ends: Ints) -> Floats:
        """When everything that is to be loaded is there."""
        done = np.zeros(len(starts))
        for tier in self._tiers:
            np.maximum(done, tier.around(starts, ends), out=done)
        return done

    def _interval_s(self, starts: Ints, ends: Ints) -> Floats:
        counts = ends - starts
        seconds: Floats = self._fresh_s[counts] + self._context_s[starts] * counts
        return seconds


class _TierTimes:
    """When the blocks of one tier are in HBM; `is_there[i]`: block i lies in it."""

    def __init__(self, load: LoadCost, is_there: npt.NDArray[np.bool_], block_bytes: int) -> None:
        self._before = np.concatenate(([0], np.cumsum(is_there, dtype=np.int64)))
        self._before_and_all = self._before + self._before[-1]
        counts = np.arange(self._before[-1] + 1)
        first_s, each_s = load.predict(block_bytes), load.per_byte_s * block_bytes
        # By number of blocks; nothing takes no time.
        self._seconds = np.where(counts > 0, first_s + each_s * (counts - 1), 0.0)
        self.head_s = self._seconds[self._before]

    def around(self, starts: Ints, ends: Ints) -> Floats:
        """Of the blocks before `starts` and from `ends` on."""
        seconds: Floats = self._seconds[self._before_and_all[starts] - self._before[ends]]
        return seconds


@dataclass(frozen=True, slots=True)
class _Evaluated:
    """Plans side by side; element i of each array belongs to plan i."""

    starts: Ints
    ends: Ints
    seconds: Floats
    gpu_s: Floats

    def interval(self, index: int) -> Interval:
        return Interval(
            int(self.starts[index]), int(self.ends[index]), float(self.seconds[index]), float(self.gpu_s[index])
        )


def _on_grid(times: _Times, gpu_price: float) -> list[_Evaluated]:
    """Return plans among which one is close to the cheapest: a grid over all, and everything around its cheapest."""
    count = times.num_blocks
    stride = -(-count // _GRID) or 1
    borders = times.borders[:: -(-len(times.borders) // _MAX_BORDERS) or 1]
    marks = np.unique(np.concatenate((np.arange(0, count + 1, stride), borders, [count])))
    coarse = times.evaluate(*_pairs(marks, marks))
    if stride == 1:
        return [coarse]
    price = coarse.seconds + gpu_price * coarse.gpu_s
    cheapest = np.argsort(price, kind="stable")[:_REFINED]
    around = np.arange(-stride, stride + 1)
    near = [
        _pairs(np.clip(start + around, 0, count), np.clip(end + around, 0, count))
        for start, end in zip(coarse.starts[cheapest], coarse.ends[cheapest], strict=True)
    ]
    return [coarse, times.evaluate(np.concatenate([s for s, _ in near]), np.concatenate([e for _, e in near]))]


def _pairs(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Return all (start, end) with start ≤ end."""
    all_starts, all_ends = np.repeat(starts, len(ends)), np.tile(ends, len(starts))
    fits = all_starts <= all_ends
    return all_starts[fits], all_ends[fits]


def _best(parts: Sequence[_Evaluated], gpu_price: float) -> Interval:
    plans = _Evaluated(
        np.concatenate([part.starts for part in parts]),
        np.concatenate([part.ends for part in parts]),
        np.concatenate([part.seconds for part in parts]),
        np.concatenate([part.gpu_s for part in parts]),
    )
    price = plans.seconds + gpu_price * plans.gpu_s
    near = np.flatnonzero(price <= price.min() * (1 + _TIE))
    return plans.interval(near[np.lexsort((plans.starts[near], plans.ends[near] - plans.starts[near]))[0]])
