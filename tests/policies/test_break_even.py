"""The break-even length is the first at which the planner's own comparison prefers loading."""

import pytest

from kvstore.core.outcome import TierKind
from policies.break_even import break_even_tokens
from policies.cost import LoadCost, PrefillCost
from policies.interval import Question, compare
from policies.profiles import machine


def test_it_is_the_shortest_prefix_that_pays() -> None:
    prefill, load = PrefillCost(256, 0.05, 3e-3, 2e-7), LoadCost(0.2, 1e-7)
    tokens = break_even_tokens(prefill, load, 16, 16 * 20_000, 100)
    assert tokens is not None
    for blocks, pays in ((tokens // 16 - 1, False), (tokens // 16, True), (tokens // 16 + 1, True)):
        question = Question(blocks * 16 + 100, 16, 16 * 20_000, 0, [TierKind.S3] * blocks)
        plans = compare(question, prefill, {TierKind.S3: load})
        assert (plans.load_all.seconds < plans.recompute_all.seconds) is pays


def test_a_tier_that_is_slower_per_token_and_stays_so_never_pays() -> None:
    assert break_even_tokens(PrefillCost(256, 0.0, 1e-4, 0.0), LoadCost(0.1, 1e-6), 16, 16_000, 1) is None


@pytest.mark.parametrize(("gpu", "low", "high"), [("H100", 15_000, 35_000), ("A100", 500, 1500)])
def test_s3_at_3_gb_per_s_pays_from_where_the_design_says(gpu: str, low: int, high: int) -> None:
    figures = machine(gpu, "Llama-3.1-8B")
    load = LoadCost(0.04, 1 / 3e9)
    tokens = break_even_tokens(figures.prefill, load, 16, 16 * figures.model.kv_bytes_per_token, 200)
    assert tokens is not None
    assert low < tokens < high
