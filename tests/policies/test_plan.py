"""The engine's plan is the best prefix cut, fetches while it does not know better, and bounds a fetch's patience."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.outcome import TierKind
from policies.cost import LoadCost, PrefillCost
from policies.interval import Question
from policies.plan import UNKNOWN_PATIENCE_S, choose, patience


@dataclass
class FixedCosts:
    """1 ms per computed token; a latency and a rate per tier."""

    tiers: dict[TierKind, tuple[float, float]] = field(default_factory=dict)
    prefill_known: bool = True
    unknown: frozenset[TierKind] = frozenset()

    def load_known(self, tier: TierKind) -> bool:
        return tier not in self.unknown

    def prefill_cost(self) -> PrefillCost:
        return PrefillCost(256, 0.0, 1e-3, 0.0)

    def load_cost(self, tier: TierKind) -> LoadCost:
        return LoadCost(*self.tiers.get(tier, (0.0, 0.0)))


def ask(*tiers: TierKind, resident: int = 0, tail: int = 10) -> Question:
    return Question((resident + len(tiers)) * 16 + tail, 16, 1000, resident, tiers)


def test_a_fast_tier_is_fetched_whole() -> None:
    plan = choose(ask(*[TierKind.RAM] * 10), FixedCosts({TierKind.RAM: (0.001, 1e-6)}))
    assert plan.fetch_blocks == 10
    assert plan.predicted_s == pytest.approx(0.001 + 0.01 + 0.01)
    assert plan.recompute_s == pytest.approx(0.17)


def test_a_slow_tier_is_not_fetched_at_all() -> None:
    plan = choose(ask(*[TierKind.S3] * 10), FixedCosts({TierKind.S3: (0.05, 1e-3)}))
    assert plan.fetch_blocks == 0
    assert plan.predicted_s == plan.recompute_s


def test_the_cut_falls_where_a_slower_tier_begins() -> None:
    costs = FixedCosts({TierKind.RAM: (0.001, 1e-6), TierKind.S3: (0.5, 1e-6)})
    plan = choose(ask(*[TierKind.RAM] * 6, *[TierKind.S3] * 4), costs)
    assert plan.fetch_blocks == 6


def test_everything_is_fetched_until_both_times_were_measured() -> None:
    slow = {TierKind.S3: (5.0, 1e-3)}
    question = ask(*[TierKind.S3] * 3)
    assert choose(question, FixedCosts(slow)).fetch_blocks == 0
    for costs in (FixedCosts(slow, prefill_known=False), FixedCosts(slow, unknown=frozenset({TierKind.S3}))):
        plan = choose(question, costs)
        assert plan.fetch_blocks == 3
        assert not plan.measured


def test_nothing_to_fetch_is_a_plan_too() -> None:
    plan = choose(ask(resident=4), FixedCosts())
    assert plan.fetch_blocks == 0
    assert plan.predicted_s == pytest.approx(0.010)


@given(st.lists(st.sampled_from([TierKind.RAM, TierKind.SSD, TierKind.S3]), max_size=30), st.integers(0, 5))
def test_no_other_cut_is_faster(tiers: list[TierKind], resident: int) -> None:
    costs = FixedCosts({TierKind.RAM: (0.001, 1e-6), TierKind.SSD: (0.01, 8e-6), TierKind.S3: (0.08, 1.2e-5)})
    question = ask(*tiers, resident=resident)
    plan = choose(question, costs)
    for cut in range(len(tiers) + 1):
        load_s = max((costs.load_cost(tier).predict(1000 * tiers[:cut].count(tier)) for tier in tiers[:cut]), default=0)
        assert plan.predicted_s <= load_s + 1e-3 * (question.prompt_tokens - (resident + cut) * 16) + 1e-12


def test_giving_up_at_any_moment_keeps_the_promise() -> None:
    question = ask(*[TierKind.S3] * 60, tail=40)
    costs = FixedCosts()
    waits = patience(question, 60, costs)
    assert len(waits) == 60
    assert waits == sorted(waits), "what has landed buys time"
    for landed, wait_s in enumerate(waits):
        rest_s = 1e-3 * (question.prompt_tokens - landed * 16)
        assert wait_s + rest_s <= 1.2 * 1e-3 * question.prompt_tokens


def test_patience_is_fixed_while_prefill_is_unknown() -> None:
    assert patience(ask(TierKind.RAM), 1, FixedCosts(prefill_known=False)) == [UNKNOWN_PATIENCE_S]
