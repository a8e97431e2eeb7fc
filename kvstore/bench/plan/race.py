"""Runs the plans of one case in turns and spends the time on those that can still be best.

First every plan once, the best so far bounding how long the others may take; then the ones that came close again, in
turns with `auto`, until each has been run often enough. Pure but for `measure`, which runs one plan.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from kvstore.bench.plan.cases import AUTO_PLAN, LOAD_PLAN, RECOMPUTE_PLAN, CutSearch, PlanName

# Of the best so far: beyond the first a plan is not run to its end, beyond the second it is not run again.
GIVE_UP_AT: Final = 1.6
CLOSE: Final = 1.3
# Never given up earlier: what is that short is cheap, and noise is large there.
MIN_LIMIT_S: Final = 1.0
# Beyond this spread or regret a median of few runs is not trusted.
_UNSURE_SPREAD, _UNSURE_REGRET = 1.25, 0.05


@dataclass(frozen=True, slots=True)
class Run:
    """One request. `ttft_s` None: given up after `limit_s`. `decision`: what the planner predicted, and what came."""

    ttft_s: float | None
    kind: str = ""
    served: dict[str, int] = field(default_factory=dict)
    limit_s: float | None = None
    decision: dict[str, Any] = field(default_factory=dict)


Measure = Callable[[PlanName, float | None], Run]
"""Runs a plan from the case's state, for at most so many seconds."""


@dataclass(slots=True)
class Results:
    """All runs of one case by plan, in the order of the first."""

    runs: dict[PlanName, list[Run]] = field(default_factory=dict)

    def add(self, plan: PlanName, run: Run) -> None:
        self.runs.setdefault(plan, []).append(run)

    def seconds(self, plan: PlanName) -> list[float]:
        return [run.ttft_s for run in self.runs.get(plan, ()) if run.ttft_s is not None]

    def median_s(self, plan: PlanName) -> float | None:
        """What was given up counts as longer than anything; None where that leaves no figure."""
        runs = self.runs.get(plan, ())
        seconds = median([math.inf if run.ttft_s is None else run.ttft_s for run in runs]) if runs else math.inf
        return seconds if math.isfinite(seconds) else None

    def fixed(self) -> list[PlanName]:
        """The plans with a median, but for `auto`, best first."""
        medians = {plan: self.median_s(plan) for plan in self.runs if plan != AUTO_PLAN}
        return sorted((plan for plan, seconds in medians.items() if seconds is not None), key=lambda p: medians[p] or 0)

    def best(self) -> PlanName | None:
        """The best fixed plan, of those that were run most often: a single lucky run is no best."""
        fixed = self.fixed()
        most = max((len(self.runs[plan]) for plan in fixed), default=0)
        return next((plan for plan in fixed if len(self.runs[plan]) == most), None)

    def best_s(self) -> float | None:
        best = self.best()
        return None if best is None else self.median_s(best)

    def regret(self) -> float | None:
        """How much longer `auto` took than the best fixed plan, as a share; below 0 it was faster than any."""
        auto_s, best_s = self.median_s(AUTO_PLAN), self.best_s()
        return None if auto_s is None or best_s is None else auto_s / best_s - 1

    def spread(self, plan: PlanName) -> float:
        seconds = self.seconds(plan)
        return max(seconds) / min(seconds) if seconds else 1.0

    def as_json(self) -> dict[str, Any]:
        plans = {}
        for plan, runs in self.runs.items():
            given_up = [run.limit_s for run in runs if run.ttft_s is None]
            plans[plan.name] = {
                "median_s": self.median_s(plan),
                "seconds": self.seconds(plan),
                "given_up_after_s": given_up,
                "kinds": [run.kind for run in runs if run.ttft_s is not None],
                "decisions": [run.decision for run in runs if run.decision],
                "served": next((run.served for run in reversed(runs) if run.ttft_s is not None), {}),
            }
        best = self.best()
        return {
            "plans": plans,
            "best": None if best is None else best.name,
            "best_s": self.best_s(),
            "auto_s": self.median_s(AUTO_PLAN),
            "regret": self.regret(),
        }


def race(
    measure: Measure, prefix_tokens: int, cuts: CutSearch, is_load_faster: bool, rounds: int, max_rounds: int
) -> Results:
    """Run everything. `is_load_faster`: which of the pure plans to try first, so that the other need not take long."""
    results = Results()
    pure = [LOAD_PLAN, RECOMPUTE_PLAN] if is_load_faster else [RECOMPUTE_PLAN, LOAD_PLAN]
    for plan in (pure[0], AUTO_PLAN, pure[1]):
        _run(measure, results, plan)
    while found := cuts.next(_tokens(results.fixed()[0], prefix_tokens)):
        for cut in found:
            _run(measure, results, PlanName.cut(cut))
    for number in range(1, max_rounds):
        if number >= rounds and not _is_unsure(results):
            break
        again = [*contenders(results), AUTO_PLAN]
        first = number % len(again)
        for plan in [*again[first:], *again[:first]]:
            _run(measure, results, plan)
    return results


def contenders(results: Results) -> list[PlanName]:
    """The fixed plans that can still be the best."""
    fixed = results.fixed()
    # The best single run, since a plan that was unlucky once may come back.
    best_s = min(min(results.seconds(plan)) for plan in fixed)
    return [plan for plan in fixed if min(results.seconds(plan)) <= CLOSE * best_s]


def _run(measure: Measure, results: Results, plan: PlanName) -> None:
    fixed = results.fixed()
    limit_s = None
    if fixed and plan not in (AUTO_PLAN, fixed[0]):
        limit_s = max(MIN_LIMIT_S, GIVE_UP_AT * (results.median_s(fixed[0]) or 0.0))
    results.add(plan, measure(plan, limit_s))


def _is_unsure(results: Results) -> bool:
    fixed, regret = results.fixed(), results.regret()
    spread = max(results.spread(AUTO_PLAN), results.spread(fixed[0]) if fixed else 1.0)
    return regret is not None and regret > _UNSURE_REGRET and spread > _UNSURE_SPREAD


def _tokens(plan: PlanName, prefix_tokens: int) -> int:
    return {LOAD_PLAN: prefix_tokens, RECOMPUTE_PLAN: 0}.get(plan, plan.cut_tokens)
