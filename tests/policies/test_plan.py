"""The engine's plan is the best interval, loads and computes at once while it does not know better, and keeps a promise
about how long it waits."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.outcome import TierKind
from policies.cost import LoadCost, PrefillCost
from policies.interval import Question
from policies.plan import UNKNOWN_PATIENCE_S, Backlog, Plan, Promise, choose, pinned

PREFILL = PrefillCost(256, 0.0, 1e-3, 0.0)
IDLE = Backlog({})


@dataclass
class FixedCosts:
    """A latency and a rate per tier."""

    tiers: dict[TierKind, tuple[float, float]] = field(default_factory=dict)
    prefill_known: bool = True
    unknown: frozenset[TierKind] = frozenset()

    def load_known(self, tier: TierKind) -> bool:
        return tier not in self.unknown

    def load_cost(self, tier: TierKind) -> LoadCost:
        return LoadCost(*self.tiers.get(tier, (0.0, 0.0)))


def ask(*tiers: TierKind, resident: int = 0, tail: int = 10) -> Question:
    return Question((resident + len(tiers)) * 16 + tail, 16, 1000, resident, tiers)


def plan_for(question: Question, costs: FixedCosts, backlog: Backlog = IDLE) -> Plan:
    return choose(question, PREFILL, costs, backlog)


def test_a_fast_tier_is_loaded_whole_from_its_end_backwards() -> None:
    plan = plan_for(ask(*[TierKind.RAM] * 10), FixedCosts({TierKind.RAM: (0.001, 1e-6)}))
    assert plan.runs() == []
    assert plan.order() == list(range(9, -1, -1))


def test_a_slow_tier_is_not_asked_at_all() -> None:
    plan = plan_for(ask(*[TierKind.S3] * 10), FixedCosts({TierKind.S3: (0.5, 1e-3)}))
    assert plan.runs() == [(0, 10)]
    assert plan.order() == []


def test_one_that_is_about_as_fast_as_computing_is_loaded_from_the_end_while_the_front_is_computed() -> None:
    plan = plan_for(ask(*[TierKind.S3] * 10), FixedCosts({TierKind.S3: (0.01, 16e-6)}))
    ((start, end),) = plan.runs()
    assert start == 0 and 4 <= end <= 6
    assert plan.order() == list(range(9, -1, -1)), "and on through what is computed: it may come first"


def test_the_head_of_a_near_tier_is_loaded_first_and_the_far_tail_meanwhile() -> None:
    costs = FixedCosts({TierKind.RAM: (0.001, 1e-6), TierKind.S3: (0.01, 16e-6)})
    plan = plan_for(ask(*[TierKind.RAM] * 6, *[TierKind.S3] * 8), costs)
    ((start, end),) = plan.runs()
    assert start == 6 and 8 <= end <= 12
    assert plan.order() == [*range(6), *range(13, 5, -1)]


def test_where_the_tail_is_too_far_only_the_head_is_asked_for() -> None:
    costs = FixedCosts({TierKind.RAM: (0.001, 1e-6), TierKind.S3: (0.5, 1e-6)})
    plan = plan_for(ask(*[TierKind.RAM] * 6, *[TierKind.S3] * 4), costs)
    assert plan.runs() == [(6, 10)]
    assert plan.order() == list(range(6))


def test_everything_is_asked_for_until_both_times_were_measured() -> None:
    slow = {TierKind.S3: (5.0, 1e-3)}
    question = ask(*[TierKind.S3] * 3)
    assert plan_for(question, FixedCosts(slow)).order() == []
    for costs in (FixedCosts(slow, prefill_known=False), FixedCosts(slow, unknown=frozenset({TierKind.S3}))):
        plan = plan_for(question, costs)
        assert plan.order() == [2, 1, 0]
        assert not plan.measured


def test_a_head_in_ram_is_asked_for_first_though_nothing_was_measured() -> None:
    """Asked for last, behind a tail in S3, it was computed meanwhile, request after request, and never measured."""
    question = ask(*[TierKind.RAM] * 3, *[TierKind.S3] * 4)
    plan = plan_for(question, FixedCosts(unknown=frozenset({TierKind.RAM, TierKind.S3})))
    assert plan.order() == [0, 1, 2, 6, 5, 4, 3]
    assert plan.runs() == []


def test_a_cut_is_preferred_where_both_ends_at_once_would_save_next_to_nothing() -> None:
    """A tail of 8 blocks in S3 whose last two would land a hair before the others are computed: it took 18% longer."""
    costs = FixedCosts({TierKind.RAM: (0.001, 1e-6), TierKind.S3: (0.11, 15e-6)})
    plan = plan_for(ask(*[TierKind.RAM] * 8, *[TierKind.S3] * 8), costs)
    assert plan.compared.best.end < 16, "the best by a little is an interval"
    assert plan.runs() == [(8, 16)]
    assert plan.order() == list(range(8))


def test_what_stands_in_front_of_a_tier_counts() -> None:
    costs = FixedCosts({TierKind.S3: (0.001, 1e-6)})
    question = ask(*[TierKind.S3] * 10)
    assert plan_for(question, costs).runs() == []
    assert plan_for(question, costs, Backlog({TierKind.S3: 1.0})).runs() == [(0, 10)]


def test_a_price_on_gpu_seconds_leaves_more_to_the_tier() -> None:
    costs = FixedCosts({TierKind.S3: (0.01, 16e-6)})
    question = ask(*[TierKind.S3] * 100)
    ((_, fast),) = plan_for(question, costs).runs()
    dear = plan_for(question, costs, Backlog({}, gpu_price=3.0)).runs()
    assert not dear or dear[0][1] < fast


def test_a_pinned_plan_asks_for_exactly_the_rest() -> None:
    question, costs = ask(*[TierKind.S3] * 6), FixedCosts()
    assert pinned(question, PREFILL, costs, IDLE, 2, 4).order() == [0, 1, 5, 4]
    assert pinned(question, PREFILL, costs, IDLE, 2, 99).order() == [0, 1]
    assert pinned(question, PREFILL, costs, IDLE, -3, 2).order() == [5, 4, 3, 2]
    assert pinned(question, PREFILL, costs, IDLE, 0, 6).order() == []
    assert pinned(question, PREFILL, costs, IDLE, 4, 4).order() == [5, 4, 3, 2, 1, 0]


def test_a_pinned_plan_says_what_it_is_predicted_to_take_also_where_it_was_not_compared() -> None:
    question, costs = ask(*[TierKind.S3] * 6), FixedCosts({TierKind.S3: (0.5, 1e-6)})
    plan = pinned(question, PREFILL, costs, IDLE, 2, 4)
    assert plan.asked_for is not None
    assert (plan.asked_for.start, plan.asked_for.end) == (2, 4)
    compared = plan.compared
    assert plan.asked_for.seconds > compared.best.seconds
    assert compared.load_all.gpu_s < plan.asked_for.gpu_s < compared.recompute_all.gpu_s
    everything = pinned(question, PREFILL, costs, IDLE, 0, 6).asked_for
    assert everything == compared.recompute_all
    nothing = pinned(question, PREFILL, costs, IDLE, 6, 6).asked_for
    assert nothing is not None and nothing.seconds == compared.load_all.seconds


@given(st.lists(st.sampled_from([TierKind.RAM, TierKind.SSD, TierKind.S3]), max_size=30), st.integers(0, 5))
def test_every_block_is_asked_for_once_or_computed(tiers: list[TierKind], resident: int) -> None:
    costs = FixedCosts({TierKind.RAM: (0.001, 1e-6), TierKind.SSD: (0.01, 8e-6), TierKind.S3: (0.08, 1.2e-5)})
    plan = plan_for(ask(*tiers, resident=resident), costs)
    order = plan.order()
    computed = {block for start, end in plan.runs() for block in range(start, end)}
    assert len(set(order)) == len(order)
    assert set(order) | computed == set(range(len(tiers)))


def test_waiting_to_the_last_moment_keeps_the_promise() -> None:
    promise = Promise(100.0, 2.0)
    assert promise.may_wait_until(1.5) - 100.0 + 1.5 <= 1.2 * 2.0
    assert promise.may_wait_until(1.0) > promise.may_wait_until(1.5), "what has landed buys time"
    assert promise.may_wait_until(9.0) == pytest.approx(100.05), "a healthy load needs a moment"
    assert Promise(100.0, None).may_wait_until(9.0) == 100.0 + UNKNOWN_PATIENCE_S


def test_a_load_is_silent_after_a_tenth_of_recomputing_everything() -> None:
    promise = Promise(100.0, 2.0)
    assert not promise.is_silent(0.19)
    assert promise.is_silent(0.21)
    assert not Promise(100.0, None).is_silent(1.0), "nobody knows what it is compared with"
