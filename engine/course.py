"""What comes of a request's plan, written down as it happens, for the record of its decision.

Covers collecting; the record is `policies/decision.py`, its regret is worked out by whoever reports it, since that
takes longer than the step loop should.
"""

from dataclasses import dataclass, field, replace
from typing import Protocol

from kvstore.core.outcome import Outcome, TierKind
from policies.cost import LoadCost, PrefillCost
from policies.decision import Decision, Happened, Why
from policies.hindsight import judged
from policies.interval import Question
from policies.plan import Plan

_PLANNED = "plan"
# Reasons that say nothing against the blocks: they did not come in time.
_LATE = (Outcome.TIMED_OUT.label, Outcome.BUSY.label)


class Costs(Protocol):
    def prefill_cost(self) -> PrefillCost: ...

    def load_cost(self, tier: TierKind) -> LoadCost: ...


class Finished(Protocol):
    """`engine.loading.Load`, once it is over: blocks count from the beginning of the prompt."""

    first: int
    cached: int
    served: dict[TierKind, int]
    computed: dict[str, int]
    runs: list[tuple[int, int]]
    num_abandoned: int

    def last_landed_s(self) -> dict[TierKind, float]: ...

    def missing_from(self) -> int | None: ...


@dataclass(eq=False, slots=True)
class Course:
    """Seconds are of the engine's clock, fields as in `Happened`."""

    decided_s: float
    start: int
    end: int
    usable: int
    compute_s: float = 0.0
    loaded: dict[TierKind, int] = field(default_factory=dict)
    load_s: dict[TierKind, float] = field(default_factory=dict)
    late: int = 0
    failed: int = 0
    abandoned: int = 0
    # As known at the first token.
    prefill: PrefillCost | None = None
    loads: dict[TierKind, LoadCost] = field(default_factory=dict)

    def loaded_up(self, load: Finished) -> None:
        """The last cached block is there or computed."""
        self.loaded = dict(load.served)
        self.load_s = {tier: max(0.0, at_s - self.decided_s) for tier, at_s in load.last_landed_s().items()}
        self.start = self.end = load.cached - load.first
        if load.runs:
            self.start, self.end = load.runs[0][0] - load.first, load.runs[-1][1] - load.first
        self.late = sum(load.computed.get(why, 0) for why in _LATE)
        self.abandoned = load.num_abandoned
        self.failed = sum(load.computed.values()) - self.late - load.computed.get(_PLANNED, 0)
        missing_from = load.missing_from()
        if missing_from is not None:
            self.usable = missing_from - load.first

    def ended(
        self, decision: Decision, now_s: float, arrival_s: float, saved_prefill_s: float, costs: Costs
    ) -> Decision:
        """Return the record with what happened up to the first token, at `now_s`; keeps the costs for `judge`."""
        self.prefill = costs.prefill_cost()
        self.loads = {tier: costs.load_cost(tier) for tier in {run.tier for run in decision.situation.cached}}
        happened = Happened(
            ttft_s=now_s - arrival_s,
            waited_s=max(0.0, self.decided_s - arrival_s),
            start=self.start,
            end=self.end,
            loaded=self.loaded,
            load_s=self.load_s,
            compute_s=self.compute_s,
            late=self.late,
            failed=self.failed,
            abandoned=self.abandoned,
            usable=self.usable,
            saved_prefill_s=saved_prefill_s,
        )
        return replace(decision, happened=happened)

    def judge(self, decision: Decision) -> Decision:
        """Return the ended decision with its regret; from any thread, once the first token is out."""
        return decision if self.prefill is None else judged(decision, self.prefill, self.loads)


def why_of(is_pinned: bool, asked: bool, question: Question, plan: Plan | None, is_priced: bool) -> Why:
    """Return why the plan for `question` is what it is; None where there was nothing to choose."""
    if is_pinned:
        return Why.PINNED
    if question.tiers and plan is not None:
        if not plan.measured:
            return Why.NOT_MEASURED
        return Why.THROUGHPUT if is_priced else Why.LATENCY
    if not asked:
        return Why.NOT_ASKED
    return Why.ALL_IN_HBM if question.resident_blocks else Why.NOTHING_CACHED
