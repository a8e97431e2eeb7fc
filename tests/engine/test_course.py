"""Every request's decision is written down with what came of it, whatever that was."""

import pytest

from engine.request import Cached, PlanMode, Request
from kvstore.core.outcome import Outcome, TierKind
from policies.decision import Decision, PlanKind, Why, check
from tests.engine.rig import Rig

PROMPT = [5, 9, 2, 7, 1, 1, 8, 3, 6, 4, 0, 2, 9, 9]


def cached(*tiers: TierKind) -> Cached:
    return Cached(tiers, "never_stored", asked=True)


def concluded(request: Request) -> Decision:
    """The record as it is reported."""
    assert request.decision is not None and request.course is not None
    decision = request.course.judge(request.decision)
    check(decision)
    assert decision.request_id == request.id and request.result is not None and decision.happened is not None
    assert decision.happened.ttft_s == request.result.ttft_s
    return decision


def test_a_prompt_without_anything_cached_has_a_record_and_no_regret() -> None:
    rig = Rig()
    request, _ = rig.submit(PROMPT, 2, cached=cached())
    rig.run()
    decision = concluded(request)
    assert decision.why is Why.NOTHING_CACHED and decision.chosen.kind is PlanKind.NO_CHOICE
    assert decision.regret_s is None
    again, _ = rig.submit(PROMPT, 2, cached=cached())
    rig.run()
    decision = concluded(again)
    assert decision.why is Why.ALL_IN_HBM and decision.situation.resident_blocks == 3
    unasked, _ = rig.submit([7] * 9, 2)
    rig.run()
    assert concluded(unasked).why is Why.NOT_ASKED


def test_a_fetch_is_written_down_with_what_came_from_where() -> None:
    rig = Rig(num_pool_blocks=30)
    request, _ = rig.submit(PROMPT, 2, cached=cached(TierKind.RAM, TierKind.SSD, TierKind.SSD))
    rig.now += 0.25
    rig.step()
    job = rig.movers.fetches.popleft()
    # A quarter of a second goes by until a mover takes the job.
    rig.now += 0.375
    rig.land(request, job, [0], TierKind.RAM)
    rig.now += 0.375
    rig.land(request, job, [1, 2], TierKind.SSD)
    rig.end(job)
    rig.run()
    decision, happened = concluded(request), concluded(request).happened
    assert decision.why is Why.NOT_MEASURED and decision.chosen.kind is PlanKind.LOAD_ALL
    assert {plan.kind for plan in decision.plans} >= {PlanKind.LOAD_ALL, PlanKind.RECOMPUTE_ALL, PlanKind.PREFIX_CUT}
    assert happened is not None
    assert happened.waited_s == pytest.approx(0.25) and happened.ttft_s == pytest.approx(1.0)
    assert happened.loaded == {TierKind.RAM: 1, TierKind.SSD: 2}
    assert happened.load_s == {TierKind.RAM: 0.375, TierKind.SSD: 0.75}
    assert (happened.start, happened.end, happened.usable) == (3, 3, 3)
    assert decision.regret_s is not None


@pytest.mark.parametrize("outcome", [Outcome.CORRUPT, Outcome.TIMED_OUT])
def test_what_did_not_land_is_written_down_as_failed_or_late(outcome: Outcome) -> None:
    rig = Rig(num_pool_blocks=30)
    request, _ = rig.submit(PROMPT, 2, cached=cached(*[TierKind.S3] * 3))
    rig.step()
    job = rig.movers.fetches.popleft()
    rig.now += 0.25
    rig.land(request, job, [0], TierKind.S3)
    rig.end(job, outcome)
    rig.run()
    happened = concluded(request).happened
    assert happened is not None
    assert (happened.late, happened.failed) == ((2, 0) if outcome is Outcome.TIMED_OUT else (0, 2))
    assert (happened.start, happened.end, happened.usable) == (1, 3, 1)
    assert happened.loaded == {TierKind.S3: 1} and happened.load_s == {TierKind.S3: 0.25}


def test_a_full_fetch_queue_makes_every_block_late() -> None:
    rig = Rig(num_pool_blocks=30)
    rig.movers.full = True
    request, _ = rig.submit(PROMPT, 2, cached=cached(*[TierKind.RAM] * 3))
    rig.run()
    happened = concluded(request).happened
    assert happened is not None and happened.late == 3 and happened.loaded == {}


@pytest.mark.parametrize("plan", ["fetch", "recompute"])
def test_a_pinned_plan_says_so(plan: PlanMode) -> None:
    rig = Rig(num_pool_blocks=30)
    rig.movers.full = True
    request, _ = rig.submit(PROMPT, 2, plan=plan, cached=cached(*[TierKind.RAM] * 3))
    rig.run()
    assert concluded(request).why is Why.PINNED


def test_a_request_that_is_preempted_later_keeps_the_record_of_its_prompt() -> None:
    rig = Rig(num_pool_blocks=6)
    first, _ = rig.submit([1, 2, 3, 4, 5], 12)
    second, _ = rig.submit([9, 8, 7, 6, 5], 12)
    for _ in range(2):
        rig.step()
    before = [request.decision for request in (first, second)]
    assert all(decision is not None and decision.happened is not None for decision in before)
    rig.run()
    assert rig.scheduler.num_preemptions > 0
    assert [first.decision, second.decision] == before


def test_a_plan_that_was_asked_for_tells_what_it_was_predicted_to_take() -> None:
    """`kvstore explain` showed no seconds of it, unless it happened to be one of those that were compared."""
    rig = Rig(num_pool_blocks=30)
    request, _ = rig.submit(PROMPT, 2, cached=cached(*[TierKind.S3] * 3), plan=(1, 2))
    rig.scheduler.next_step()
    decision = request.decision
    assert decision is not None and decision.why is Why.PINNED
    assert (decision.chosen.kind, decision.chosen.start, decision.chosen.end) == (PlanKind.INTERVAL, 1, 2)
    assert decision.chosen.seconds > decision.chosen.gpu_s > 0
    assert decision.chosen not in decision.plans
