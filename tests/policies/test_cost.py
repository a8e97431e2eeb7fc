"""The cost model learns what a made-up machine costs, keeps its coefficients sane, and forgets stale loads."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.outcome import TierKind
from policies.cost import CostModel, LoadCost, PrefillCost, StepWork, fit


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


C0, A, B, E = 0.09, 2.5e-3, 4e-7, 0.012


def seconds_of(work: StepWork) -> float:
    return C0 + A * work.prefill_tokens + B * work.prefill_work + E * work.num_decodes


def taught(noise: float = 0.0, outliers: int = 0) -> CostModel:
    draw = random.Random(7)
    costs = CostModel(256, Clock())
    for step in range(60):
        prefills = [(draw.choice([16, 64, 200, 256]), draw.choice([0, 256, 1024, 4096]))] if step % 3 else []
        work = StepWork.of(prefills, num_decodes=draw.randint(1, 6))
        factor = 1 + draw.uniform(-noise, noise)
        if outliers and step % (60 // outliers) == 0:
            factor = 8.0
        costs.observe_step(work, seconds_of(work) * factor)
    return costs


def test_nothing_is_known_before_the_first_measurement() -> None:
    costs = CostModel(256, Clock())
    assert not costs.prefill_known
    assert not costs.load_known(TierKind.S3)
    assert costs.prefill(1000, 0) > costs.prefill(100, 0) > 0
    assert costs.load({TierKind.S3: 1 << 20}) > costs.load({TierKind.RAM: 1 << 20}) > 0


def test_exact_steps_give_the_exact_cost() -> None:
    costs = taught()
    assert costs.prefill_known
    assert costs.step_coefficients() == pytest.approx((C0, A, B, E), rel=0.03)
    want = 4 * C0 + A * 1000 + B * (1000 * 500 + 1000**2 / 2)
    assert costs.prefill(1000, 500) == pytest.approx(want, rel=0.02)
    assert costs.prefill(0, 500) == 0.0


def test_noise_and_outliers_move_the_prediction_little() -> None:
    want = 4 * C0 + A * 1000 + B * 1000**2 / 2
    assert taught(noise=0.1).prefill(1000, 0) == pytest.approx(want, rel=0.1)
    assert taught(noise=0.05, outliers=5).prefill(1000, 0) == pytest.approx(want, rel=0.15)


def test_loads_are_learned_per_tier_and_the_slowest_tier_decides() -> None:
    clock = Clock()
    costs = CostModel(256, clock)
    for blocks in (1, 4, 16):
        costs.observe_load(TierKind.SSD, blocks << 20, 0.01 + (blocks << 20) / 5e8)
    assert costs.load_known(TierKind.SSD)
    assert not costs.load_known(TierKind.RAM)
    assert costs.load({TierKind.SSD: 8 << 20}) == pytest.approx(0.01 + (8 << 20) / 5e8, rel=0.05)
    both = costs.load({TierKind.SSD: 8 << 20, TierKind.RAM: 1 << 20})
    assert both == costs.load({TierKind.SSD: 8 << 20})


def test_a_tier_that_was_slow_gets_another_chance() -> None:
    clock = Clock()
    costs = CostModel(256, clock)
    for _ in range(3):
        costs.observe_load(TierKind.S3, 1 << 20, 30.0)
    slow = costs.load({TierKind.S3: 1 << 20})
    assert slow > 10
    clock.now += 121
    assert not costs.load_known(TierKind.S3)
    assert costs.load({TierKind.S3: 1 << 20}) < slow / 10


def test_impossible_observations_are_ignored() -> None:
    costs = CostModel(256, Clock())
    costs.observe_step(StepWork.of([(300, 0)], 0), 0.0)
    costs.observe_step(StepWork.of([], 0), 1.0)
    costs.observe_load(TierKind.RAM, 0, 1.0)
    assert not costs.prefill_known
    assert not costs.load_known(TierKind.RAM)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 2000), st.integers(0, 8000), st.integers(0, 8), st.floats(1e-4, 100)),
        min_size=1,
        max_size=30,
    )
)
def test_whatever_is_observed_no_cost_is_negative(steps: list[tuple[int, int, int, float]]) -> None:
    costs = CostModel(256, Clock())
    for new, cached, decodes, seconds in steps:
        costs.observe_step(StepWork.of([(new, cached)], decodes), seconds)
    assert min(costs.step_coefficients()) >= 0
    assert costs.prefill(100, 0) <= costs.prefill(100, 1000)


def test_a_coefficient_that_nothing_showed_has_the_proportion_of_the_prior() -> None:
    assert fit([(1.0, 0.0)] * 5, [2.0] * 5, (1.0, 3.0)) == pytest.approx((2.0, 6.0), rel=0.01)
    assert fit([], [], (1.0, 3.0)) == (1.0, 3.0)


def test_many_predictions_at_once_equal_one_by_one() -> None:
    cost = PrefillCost(256, C0, A, B)
    new, cached = np.array([0, 1, 256, 257, 5000, -3]), np.array([9, 0, 16, 4096, 1, 2])
    one_by_one = [cost.predict(int(n), int(p)) for n, p in zip(new, cached, strict=True)]
    assert cost.predict_each(new, cached).tolist() == pytest.approx(one_by_one)
    assert cost.predict(512, 100) == pytest.approx(2 * C0 + 512 * A + (512 * 100 + 512 * 512 / 2) * B)


def test_a_load_waits_for_the_queue_in_front_of_it_and_nothing_waits_for_nothing() -> None:
    load = LoadCost(latency_s=0.5, per_byte_s=0.25, queue_s=2.0)
    assert load.predict(4) == 3.5
    assert load.predict(0) == 0.0
