"""Regret is what another choice would have saved, and nothing else: not waiting, not a slow machine."""

import dataclasses
from typing import Any

import pytest

from kvstore.core.outcome import TierKind
from policies.cost import LoadCost, PrefillCost
from policies.decision import Decision, Happened, PlanKind, Why
from policies.hindsight import decided, judged
from policies.interval import Question, compare, predict

# 1 ms per token, 16 ms per block; a block of RAM takes 1 ms, one of S3 10 ms after 50.
PREFILL = PrefillCost(256, 0.0, 1e-3, 0.0)
LOADS = {TierKind.RAM: LoadCost(0.0, 1e-6), TierKind.S3: LoadCost(0.05, 1e-5)}


def question(*tiers: TierKind, resident: int = 0, tail: int = 10) -> Question:
    return Question((resident + len(tiers)) * 16 + tail, 16, 1000, resident, tiers)


def taken(ask: Question, interval: tuple[int, int] | None = None, why: Why = Why.LATENCY) -> Decision:
    compared = compare(ask, PREFILL, LOADS)
    chosen = interval or (compared.best.start, compared.best.end)
    return decided("r", 1.0, ask, compared, chosen, why, True, {TierKind.S3: 0.0})


def went(decision: Decision, **fields: Any) -> Decision:
    chosen, cached = decision.chosen, decision.situation.num_cached
    told = {"ttft_s": chosen.seconds, "waited_s": 0.0, "start": chosen.start, "end": chosen.end, "usable": cached}
    return judged(dataclasses.replace(decision, happened=Happened(**(told | fields))), PREFILL, LOADS)


def test_the_record_tells_what_was_compared_and_chosen() -> None:
    ask = question(*[TierKind.RAM] * 4, *[TierKind.S3] * 20, resident=2)
    compared = compare(ask, PREFILL, LOADS)
    decision = taken(ask)
    kinds = {plan.kind: plan for plan in decision.plans}
    assert kinds[PlanKind.INTERVAL] == decision.chosen
    assert decision.chosen.seconds == compared.best.seconds == min(plan.seconds for plan in decision.plans)
    assert kinds[PlanKind.LOAD_ALL].seconds == compared.load_all.seconds
    assert kinds[PlanKind.RECOMPUTE_ALL].seconds == compared.recompute_all.seconds
    assert [(run.tier, run.blocks) for run in decision.situation.cached] == [(TierKind.RAM, 4), (TierKind.S3, 20)]
    assert decision.situation.resident_blocks == 2 and decision.situation.is_measured


def test_a_plan_that_was_asked_for_has_its_seconds_though_it_was_not_compared() -> None:
    ask = question(*[TierKind.S3] * 20)
    compared, asked_for = compare(ask, PREFILL, LOADS), predict(ask, PREFILL, LOADS, 3, 5)
    decision = decided("r", 1.0, ask, compared, (3, 5), Why.PINNED, True, {}, asked_for)
    assert decision.chosen.kind is PlanKind.INTERVAL and decision.chosen not in decision.plans
    # Three blocks from S3 in 80 ms, then two are computed while 15 more come, then the last ten tokens.
    assert decision.chosen.seconds == pytest.approx(0.05 + 18 * 0.01 + 0.01)
    assert decision.chosen.gpu_s == pytest.approx(2 * 0.016 + 0.01)


def test_a_best_plan_of_another_kind_is_not_listed_twice() -> None:
    decision = taken(question(*[TierKind.RAM] * 4))
    kinds = [plan.kind for plan in decision.plans]
    assert len(kinds) == len(set(kinds)) and PlanKind.INTERVAL not in kinds


def test_the_best_choice_that_went_as_predicted_has_no_regret() -> None:
    decision = went(taken(question(*[TierKind.S3] * 20)))
    assert decision.regret_s == pytest.approx(0.0)
    assert decision.best_afterwards is not None and decision.best_afterwards.kind is PlanKind.TWO_ENDED


def test_a_wrong_choice_costs_what_the_best_would_have_saved() -> None:
    ask = question(*[TierKind.S3] * 20)
    compared = compare(ask, PREFILL, LOADS)
    decision = went(taken(ask, (0, 20), Why.PINNED))
    assert decision.chosen.kind is PlanKind.RECOMPUTE_ALL
    assert decision.regret_s == pytest.approx(compared.recompute_all.seconds - compared.best.seconds)


def test_waiting_before_the_choice_is_nobodys_fault() -> None:
    decision = taken(question(*[TierKind.S3] * 20))
    waited = went(decision, ttft_s=decision.chosen.seconds + 3.0, waited_s=3.0)
    assert waited.regret_s == pytest.approx(0.0)


def test_what_went_better_than_any_plan_is_negative_and_kept() -> None:
    decision = taken(question(*[TierKind.S3] * 20))
    assert went(decision, ttft_s=decision.chosen.seconds - 0.02).regret_s == pytest.approx(-0.02)


def test_a_machine_that_computes_slower_than_measured_is_charged_to_every_plan() -> None:
    ask = question(*[TierKind.S3] * 20)
    decision = taken(ask, (0, 20))
    seconds = 2 * decision.chosen.seconds
    compared = compare(ask, PrefillCost(256, 0.0, 2e-3, 0.0), LOADS)
    slow = went(decision, ttft_s=seconds, compute_s=seconds)
    assert slow.regret_s == pytest.approx(seconds - compared.best.seconds)


def test_a_tier_that_was_slower_than_measured_makes_loading_the_wrong_choice() -> None:
    ask = question(*[TierKind.S3] * 20)
    decision = taken(ask, (20, 20))
    load_s, rest_s = 2.5, 0.01
    slow = went(
        decision, ttft_s=load_s + rest_s, loaded={TierKind.S3: 20}, load_s={TierKind.S3: load_s}, compute_s=rest_s
    )
    # Ten times slower, latency and rate, as this load was; and then the best plan is found anew.
    best = compare(ask, PREFILL, {TierKind.S3: LoadCost(0.5, 1e-4)}).best
    assert slow.regret_s == pytest.approx(load_s + rest_s - best.seconds)
    assert slow.best_afterwards is not None and slow.best_afterwards.start < 20


def test_one_block_says_nothing_about_the_others() -> None:
    ask = question(*[TierKind.S3] * 20)
    decision = taken(ask, (1, 20))
    one = went(decision, ttft_s=5.0, loaded={TierKind.S3: 1}, load_s={TierKind.S3: 4.7})
    assert one.regret_s == pytest.approx(5.0 - compare(ask, PREFILL, LOADS).best.seconds)


def test_a_slow_last_step_is_charged_to_every_plan_and_not_to_all_that_might_have_been_computed() -> None:
    ask = question(*[TierKind.RAM] * 20)
    decision = taken(ask, (20, 20))
    load_s, rest_s = 0.02, 0.11
    slow = went(
        decision, ttft_s=load_s + rest_s, loaded={TierKind.RAM: 20}, load_s={TierKind.RAM: load_s}, compute_s=rest_s
    )
    best = compare(ask, PREFILL, LOADS).best
    assert slow.regret_s == pytest.approx(load_s + rest_s - (best.seconds + 0.1))
    assert slow.best_afterwards is not None and slow.best_afterwards.seconds == pytest.approx(best.seconds + 0.1)


def test_blocks_that_could_not_be_had_are_no_alternative() -> None:
    ask = question(*[TierKind.RAM] * 20)
    decision = taken(ask, (20, 20))
    lost = went(decision, ttft_s=0.4, start=0, end=20, failed=20, usable=0, compute_s=0.33)
    assert lost.regret_s == pytest.approx(0.4 - 0.33)
    assert lost.best_afterwards is not None and lost.best_afterwards.kind is PlanKind.NO_CHOICE


def test_without_a_choice_or_a_first_token_there_is_no_regret() -> None:
    nothing = decided("r", 1.0, question(resident=3), None, (0, 0), Why.ALL_IN_HBM)
    assert nothing.chosen.kind is PlanKind.NO_CHOICE and nothing.plans == ()
    assert went(nothing, ttft_s=2.0).regret_s is None
    unfinished = taken(question(TierKind.RAM))
    assert judged(unfinished, PREFILL, LOADS) == unfinished


def test_an_interval_in_the_middle_is_judged_by_what_it_computed() -> None:
    ask = question(*[TierKind.RAM] * 4, *[TierKind.S3] * 20)
    decision = taken(ask)
    chosen = decision.chosen
    assert chosen.kind is PlanKind.INTERVAL
    exact = went(decision, compute_s=(chosen.end - chosen.start) * 0.016 + 0.01)
    assert exact.regret_s == pytest.approx(0.0, abs=1e-9)
