"""What comes of a request's plan, written down as it happens, for the record of its decision.

Covers collecting; the record is `policies/decision.py`, its regret is worked out by whoever reports it, since that
takes longer than the step loop should.
"""

from dataclasses import dataclass, field, replace
from typing import Protocol

from engine.jobs import FetchJob
from kvstore.core.outcome import Outcome, TierKind
from policies.cost import LoadCost, PrefillCost
from policies.decision import Decision, Happened, Why
from policies.hindsight import judged
from policies.interval import Question

# Ends of a fetch that say nothing against the blocks: they did not come in time.
_LATE = (Outcome.TIMED_OUT, Outcome.BUSY)


class Costs(Protocol):
    def prefill_cost(self) -> PrefillCost: ...

    def load_cost(self, tier: TierKind) -> LoadCost: ...


@dataclass(eq=False, slots=True)
class Course:
    """Seconds are of the engine's clock, fields as in `Happened`. `since_s` is when the request could be computed."""

    decided_s: float
    start: int
    end: int
    usable: int
    since_s: float = 0.0
    loaded: dict[TierKind, int] = field(default_factory=dict)
    load_s: dict[TierKind, float] = field(default_factory=dict)
    late: int = 0
    failed: int = 0
    abandoned: int = 0
    # As known at the first token.
    prefill: PrefillCost | None = None
    loads: dict[TierKind, LoadCost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.since_s = self.since_s or self.decided_s

    def fetched(self, job: FetchJob, now_s: float) -> None:
        """A fetch of leading blocks has ended; what did not land will be computed."""
        self.since_s = now_s
        for source in job.sources[: job.landed]:
            self.loaded[source] = self.loaded.get(source, 0) + 1
        missing = len(job.keys) - job.landed
        # Handing the job to a mover and back takes time as well; where one waited in vain that cannot be told apart.
        last_s = max((seconds for _, _, seconds in job.loads), default=0.0)
        around_s = 0.0 if missing else max(0.0, now_s - self.decided_s - last_s)
        for tier, _, seconds in job.loads:
            # Of a tier that fell silent there is a second entry, which is about what did not come.
            if tier in self.loaded:
                self.load_s.setdefault(tier, seconds + around_s)
        self.start = job.landed
        if missing:
            self.usable = job.landed
            if job.outcome in _LATE:
                self.late += missing
            else:
                self.failed += missing

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
            compute_s=now_s - self.since_s,
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


def why_of(is_pinned: bool, asked: bool, question: Question, is_measured: bool) -> Why:
    """Return why the plan for `question` is what it is."""
    if is_pinned:
        return Why.PINNED
    if question.tiers:
        return Why.LATENCY if is_measured else Why.NOT_MEASURED
    if not asked:
        return Why.NOT_ASKED
    return Why.ALL_IN_HBM if question.resident_blocks else Why.NOTHING_CACHED
