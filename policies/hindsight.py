"""Makes the record of a decision, and says afterwards what it has cost: the regret.

    regret = TTFT − (seconds before the decision + least seconds of any plan, with what is known afterwards)

What is known afterwards:
- which of the cached blocks could be loaded at all: those from the first that failed, or was not there in time, on
  count as not cached (`Happened.usable`);
- what computing and each tier cost, as the cost model has it at the first token, times how much slower or faster than
  that the request itself found it, wherever it did enough of it to tell: computed a quarter of what was to compute,
  loaded a quarter of a tier's blocks. Where it computed less, the seconds that took beyond the predicted ones are
  added to every plan: the last step, which all of them have, was that slow.

The queues are those of the decision, and the seconds before it no plan could have saved. So what the engine or the
machine did slower than usual is charged to every plan and not to the choice; what is left is how much sooner the first
token could have come by another choice. Where the chosen plan was carried out better than any is predicted the regret
is negative, and kept. A request without a choice has none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from kvstore.core.outcome import TierKind
from policies.cost import LoadCost, PrefillCost
from policies.decision import Decision, Happened, PlanKind, PlanSeconds, Run, Situation, Why, kind_of, runs_of
from policies.interval import Comparison, Interval, Question, compare

# Of less than this share of the work a request says nothing about the rest: one slow step would be taken for many.
_TELLING: Final = 0.25


def decided(
    request_id: str,
    unix_s: float,
    question: Question,
    compared: Comparison | None,
    interval: tuple[int, int],
    why: Why,
    is_measured: bool = False,
    tier_queue_s: Mapping[TierKind, float] | None = None,
    asked_for: Interval | None = None,
) -> Decision:
    """Return the record of a choice just made. `compared` None: there was none. `interval` is what will be computed of
    the blocks beyond HBM; of a plan that was neither compared nor `asked_for` the seconds are left 0."""
    start, end = interval
    kind = kind_of(start, end, len(question.tiers))
    plans = () if compared is None else _plans(compared, len(question.tiers))
    same = [plan for plan in plans if (plan.start, plan.end) == (start, end) or kind == plan.kind == PlanKind.LOAD_ALL]
    predicted = asked_for or (same[0] if same else None)
    seconds, gpu_s = (0.0, 0.0) if predicted is None else (predicted.seconds, predicted.gpu_s)
    return Decision(
        request_id=request_id,
        unix_s=unix_s,
        situation=Situation(
            question.prompt_tokens,
            question.block_tokens,
            question.block_bytes,
            question.resident_blocks,
            runs_of(question.tiers),
            question.gpu_queue_s,
            dict(tier_queue_s or {}),
            is_measured,
        ),
        plans=plans,
        chosen=PlanSeconds(kind, start, end, seconds, gpu_s),
        why=why,
    )


def judged(decision: Decision, prefill: PrefillCost, loads: Mapping[TierKind, LoadCost]) -> Decision:
    """Return the decision with its regret and the plan that would have been best. `prefill` and `loads` are the costs
    as known at the first token; about a millisecond for 1,000 blocks."""
    happened, situation = decision.happened, decision.situation
    if happened is None or situation.num_cached == 0:
        return decision
    tiers = _tiers(situation.cached)[: happened.usable]
    question = Question(
        situation.prompt_tokens,
        situation.block_tokens,
        situation.block_bytes,
        situation.resident_blocks,
        tiers,
        situation.gpu_queue_s,
    )
    prefill, extra_s = _as_found(prefill, situation, happened)
    known = {tier: _load_as_found(tier, loads[tier], situation, happened) for tier in set(tiers)}
    best = compare(question, prefill, known).best
    return replace(
        decision,
        regret_s=happened.ttft_s - (happened.waited_s + best.seconds + extra_s),
        best_afterwards=_plan(replace(best, seconds=best.seconds + extra_s), kind_of(best.start, best.end, len(tiers))),
    )


def _as_found(prefill: PrefillCost, situation: Situation, happened: Happened) -> tuple[PrefillCost, float]:
    """Return what computing cost, and the seconds that every plan takes besides."""
    stride, prompt, cached = situation.block_tokens, situation.prompt_tokens, situation.num_cached
    resident = situation.resident_blocks * stride
    from_tokens = resident + happened.start * stride
    if happened.end == cached:
        computed = prompt - from_tokens
        predicted_s = prefill.predict(computed, from_tokens)
    else:
        middle, rest_from = (happened.end - happened.start) * stride, resident + cached * stride
        computed = middle + prompt - rest_from
        predicted_s = prefill.predict(middle, from_tokens) + prefill.predict(prompt - rest_from, rest_from)
    if happened.compute_s <= 0:
        return prefill, 0.0
    if computed < _TELLING * (prompt - resident):
        return prefill, max(0.0, happened.compute_s - predicted_s)
    factor = happened.compute_s / predicted_s if predicted_s > 0 else 1.0
    as_found = replace(
        prefill,
        per_step_s=prefill.per_step_s * factor,
        per_token_s=prefill.per_token_s * factor,
        per_pair_s=prefill.per_pair_s * factor,
    )
    return as_found, 0.0


def _load_as_found(tier: TierKind, load: LoadCost, situation: Situation, happened: Happened) -> LoadCost:
    loaded, real_s = happened.loaded.get(tier, 0), happened.load_s.get(tier, 0.0)
    there = sum(run.blocks for run in situation.cached if run.tier is tier)
    queued = replace(load, queue_s=situation.tier_queue_s.get(tier, 0.0))
    predicted_s = queued.predict(loaded * situation.block_bytes)
    if real_s <= 0 or predicted_s <= 0 or loaded < _TELLING * there:
        return queued
    factor = real_s / predicted_s
    return replace(
        queued,
        latency_s=queued.latency_s * factor,
        per_byte_s=queued.per_byte_s * factor,
        queue_s=queued.queue_s * factor,
    )


def _plans(compared: Comparison, num_cached: int) -> tuple[PlanSeconds, ...]:
    plans = [
        _plan(compared.load_all, PlanKind.LOAD_ALL),
        _plan(compared.recompute_all, PlanKind.RECOMPUTE_ALL),
        _plan(compared.prefix_cut, PlanKind.PREFIX_CUT),
        _plan(compared.two_ended, PlanKind.TWO_ENDED),
    ]
    best = compared.best
    # Of any other kind it is one of those above.
    if kind_of(best.start, best.end, num_cached) is PlanKind.INTERVAL:
        plans.append(_plan(best, PlanKind.INTERVAL))
    return tuple(plans)


def _plan(interval: Interval, kind: PlanKind) -> PlanSeconds:
    return PlanSeconds(kind, interval.start, interval.end, interval.seconds, interval.gpu_s)


def _tiers(runs: Sequence[Run]) -> list[TierKind]:
    return [tier for run in runs for tier in [run.tier] * run.blocks]
