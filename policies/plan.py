"""What the engine does with the blocks that are cached for a prompt, and how long it waits for them.

    0          resident     start            end         cached      prompt
    | in HBM   | fetched    | computed       | fetched   | computed  |
               |<- first -->|<- meanwhile -->|<- from the end backwards

`interval.py` finds the best interval. This module says what that means for a fetch: which blocks are asked for, in
which order, and until when the request may wait. Since the tail is asked for from its end backwards, and on through
what the plan computes, both ends meet wherever they meet: how far to compute is decided anew before each chunk
(`meeting.py`). So the plan made at the start decides little more than where computing begins.

Pure: equal costs and equal questions give equal plans.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from kvstore.core.outcome import TierKind
from policies.cost import LoadCost, PrefillCost
from policies.interval import Comparison, Interval, Question, compare, predict

# Promised is 1.2 times the time of recomputing everything; the rest is room for what the model gets wrong.
_MAX_SLOWDOWN = 1.15
# A load that is silent for longer than this share of recomputing everything, after it should have come, is not waited
# for any more.
_MAX_SILENCE = 0.1
# Shorter waits would give up on healthy fetches: a thread may have to wait for the interpreter that long.
_MIN_PATIENCE_S = 0.05
UNKNOWN_PATIENCE_S = 2.0
# Two sides that must meet have more that can go wrong than one: of what they were predicted to save on a CPU, where the
# load takes cores from the computing, about 60% came true (kvstore bench plan). Below this share they lost.
_WORTH = 0.1


class Costs(Protocol):
    """What a plan asks of the cost model, see `policies/cost.py`."""

    @property
    def prefill_known(self) -> bool: ...

    def load_known(self, tier: TierKind) -> bool: ...

    def load_cost(self, tier: TierKind) -> LoadCost: ...


@dataclass(frozen=True, slots=True)
class Backlog:
    """What else goes on: seconds that stand in front of each tier, and what the GPU's seconds are worth to others."""

    tiers_s: Mapping[TierKind, float]
    gpu_price: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Compute blocks [start, end) of `num_blocks`, counted from the first that is not resident; `is_exact`: no more and
    no fewer.

    `measured` False: the costs are guesses, so everything is asked for and both ends start, which measures both.
    `asked_for`: where somebody asked for this plan, what it was predicted to take.
    """

    num_blocks: int
    start: int
    end: int
    is_exact: bool
    measured: bool
    compared: Comparison
    loads: Mapping[TierKind, LoadCost]
    asked_for: Interval | None = None

    @property
    def is_cut(self) -> bool:
        """Whether everything from `start` on is computed, nothing of it loaded."""
        return self.end == self.num_blocks and self.start < self.end

    def order(self) -> list[int]:
        """Return the blocks to ask for, in that order: the head, then the tail from its end backwards."""
        if self.is_cut:
            return list(range(self.start))
        last = self.end if self.is_exact else self.start
        return [*range(self.start), *range(self.num_blocks - 1, last - 1, -1)]

    def runs(self) -> list[tuple[int, int]]:
        """Return what is to be computed, as none or one run of blocks."""
        return [(self.start, self.end)] if self.start < self.end else []


def choose(question: Question, prefill: PrefillCost, costs: Costs, backlog: Backlog) -> Plan:
    """Return the best interval, or, until both times were measured, to compute and to load at once."""
    tiers = set(question.tiers)
    loads = {tier: _queued(costs.load_cost(tier), backlog.tiers_s.get(tier, 0.0)) for tier in tiers}
    measured = costs.prefill_known and all(costs.load_known(tier) for tier in tiers)
    plans = compare(question, prefill, loads, backlog.gpu_price)
    best = _worth_it(plans, backlog.gpu_price)
    if not measured or best.start == best.end:
        # Nothing to compute meanwhile, or nobody knows: from the end backwards leaves the front to the GPU, should it
        # come to that.
        best = replace(plans.two_ended, start=0, end=0)
    if not measured:
        # But for a head in RAM before a slower tail: there before a chunk could be, computed it would not be measured.
        head = next((at for at, tier in enumerate(question.tiers) if tier is not TierKind.RAM), 0)
        best = replace(best, start=head, end=head)
    return Plan(len(question.tiers), best.start, best.end, False, measured, plans, loads)


def _worth_it(plans: Comparison, gpu_price: float) -> Interval:
    """Return the best plan, but one that does not load and compute at once where that is hardly worse."""

    def price(plan: Interval) -> float:
        return plan.seconds + gpu_price * plan.gpu_s

    simple = min((plans.load_all, plans.prefix_cut, plans.recompute_all), key=price)
    return plans.best if price(plans.best) < (1 - _WORTH) * price(simple) else simple


def pinned(question: Question, prefill: PrefillCost, costs: Costs, backlog: Backlog, start: int, end: int) -> Plan:
    """Return the plan that somebody asked for; [start, end) counts from the first block that is not resident."""
    plan = choose(question, prefill, costs, backlog)
    count = len(question.tiers)
    start = min(max(start, 0), count)
    end = min(max(end, start), count)
    if start == end:
        start = end = 0
    asked_for = predict(question, prefill, plan.loads, start, end)
    return replace(plan, start=start, end=end, is_exact=True, asked_for=asked_for)


@dataclass(frozen=True, slots=True)
class Promise:
    """Until when a request may wait for its loads. `recompute_s` is what recomputing everything would have taken from
    its arrival on, None where nobody knows."""

    arrival_s: float
    recompute_s: float | None

    def may_wait_until(self, rest_s: float) -> float:
        """Return when to begin to compute what is not there, which takes `rest_s`, to keep the promise."""
        if self.recompute_s is None:
            return self.arrival_s + UNKNOWN_PATIENCE_S
        return self.arrival_s + max(_MIN_PATIENCE_S, _MAX_SLOWDOWN * self.recompute_s - rest_s)

    def is_silent(self, overdue_s: float) -> bool:
        """Whether a load has been overdue for too long to wait for it any more."""
        if self.recompute_s is None:
            return overdue_s > UNKNOWN_PATIENCE_S
        return overdue_s > max(_MIN_PATIENCE_S, _MAX_SILENCE * self.recompute_s)

    def tells(self, overdue_s: float) -> bool:
        """Whether it has been overdue for so long that the next request should not wait for the tier either. Computing
        slows loads down, so what was silent for a chunk says nothing."""
        return overdue_s > max(0.5, 0.5 * (self.recompute_s or UNKNOWN_PATIENCE_S))

    def look_again_s(self) -> float:
        """Return after how many seconds of waiting to decide anew."""
        return 0.02 if self.recompute_s is None else max(0.005, 0.02 * self.recompute_s)


def _queued(load: LoadCost, others_s: float) -> LoadCost:
    """Put what others have asked for in front; a tier that is silent has a queue of its own."""
    return replace(load, queue_s=load.queue_s + others_s)
