"""The cost model learns what a made-up machine costs, keeps its coefficients sane, and forgets stale loads."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.outcome import TierKind
from policies.confidence import Confidence
from policies.cost import CostModel, LoadCost, PrefillCost, SavedCosts, StepWork
from tests.support.clock import Clock

C0, A, B, E, D0 = 0.09, 2.5e-3, 4e-7, 0.012, 0.03


def seconds_of(work: StepWork) -> float:
    front_s = C0 if work.prefill_tokens else D0
    return front_s + A * work.prefill_tokens + B * work.prefill_work + E * work.num_decodes


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
    assert costs.prefill_confidence is costs.load_confidence(TierKind.S3) is Confidence.GUESSED
    assert costs.prefill_spread(1000, 0) > 0.5
    assert costs.load_spread(TierKind.S3, 1 << 20) > 0.5
    assert costs.worth_saving() == SavedCosts()
    assert costs.prefill(1000, 0) > costs.prefill(100, 0) > 0
    assert costs.load({TierKind.S3: 1 << 20}) > costs.load({TierKind.RAM: 1 << 20}) > 0


def test_decodes_that_are_quick_alone_do_not_make_short_prefills_look_cheap() -> None:
    """They once shared a constant: a step of 15 tokens that took 95 ms was expected to take 70, and one of 256 after
    768 twice what it took, since its context had to pay for the difference."""
    draw, costs = random.Random(3), CostModel(256, Clock())
    truth = (0.075, 1.4e-3, 3e-7, 0.0, 0.045)
    for step in range(120):
        prefill = [(draw.choice([15, 112, 143, 256]), draw.choice([128, 256, 512]))]
        work = StepWork.of(prefill, 0) if step % 2 else StepWork.of([], 1)
        seconds = sum(term * value for term, value in zip(work.terms, truth, strict=True))
        costs.observe_step(work, seconds * draw.uniform(0.95, 1.05))
    short, long = StepWork.of([(15, 512)], 0), StepWork.of([(256, 768)], 0)
    for work in (short, long):
        seconds = sum(term * value for term, value in zip(work.terms, truth, strict=True))
        assert costs.step(work) == pytest.approx(seconds, rel=0.1)


def test_exact_steps_give_the_exact_cost() -> None:
    costs = taught()
    assert costs.prefill_known
    assert costs.step_coefficients() == pytest.approx((C0, A, B, E, D0), rel=0.03)
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
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        costs.observe_step(StepWork.of([(300, 0)], 0), seconds)
        costs.observe_load(TierKind.RAM, 1, seconds)
    costs.observe_step(StepWork.of([], 0), 1.0)
    costs.observe_load(TierKind.RAM, 0, 1.0)
    assert not costs.prefill_known
    assert not costs.load_known(TierKind.RAM)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 500), st.floats(1e-7, 1e5)),
        min_size=1,
        max_size=60,
    )
)
def test_whatever_is_observed_no_cost_is_negative(steps: list[tuple[int, int, int, float]]) -> None:
    costs = CostModel(256, Clock())
    for new, cached, decodes, seconds in steps:
        costs.observe_step(StepWork.of([(new, cached)], decodes), seconds)
    assert min(costs.step_coefficients()) >= 0
    assert costs.prefill(100, 0) <= costs.prefill(100, 1000)


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


def test_confidence_grows_with_what_was_measured_and_shrinks_with_its_age() -> None:
    clock = Clock()
    costs = CostModel(256, clock)
    steps, loads = [costs.prefill_confidence], [costs.load_confidence(TierKind.SSD)]
    for _ in range(12):
        costs.observe_step(StepWork.of([(256, 0)], 0), 1.0)
        costs.observe_load(TierKind.SSD, 1 << 20, 0.01)
        steps.append(costs.prefill_confidence)
        loads.append(costs.load_confidence(TierKind.SSD))
    assert steps == sorted(steps)
    assert loads == sorted(loads)
    assert steps[-1] is loads[-1] is Confidence.MEASURED
    clock.now += 200
    assert costs.load_confidence(TierKind.SSD) is Confidence.STALE
    assert not costs.load_known(TierKind.SSD)
    latency_s, per_byte_s = costs.worth_saving().loads[TierKind.SSD]
    assert latency_s + per_byte_s * (1 << 20) == pytest.approx(0.01, rel=0.02), (
        "the next run begins with the last of it"
    )
    assert costs.prefill_confidence is Confidence.MEASURED, "the machine is the same"
    costs.observe_load(TierKind.SSD, 1 << 20, 0.01)
    assert costs.load_confidence(TierKind.SSD) is Confidence.ROUGH, "one is enough to believe it again"


def test_the_spread_tells_how_far_a_prediction_is_from_what_was_measured() -> None:
    costs = CostModel(256, Clock())
    draw = random.Random(3)
    for _ in range(40):
        work = StepWork.of([(draw.choice([200, 256]), draw.choice([0, 256]))], 0)
        costs.observe_step(work, seconds_of(work) * draw.uniform(0.95, 1.05))
    assert costs.prefill_spread(500, 0) < 0.03
    assert costs.prefill_spread(64_000, 0) > 0.15
    error = costs.prefill(64_000, 0) / (250 * C0 + A * 64_000 + B * 64_000**2 / 2) - 1
    assert abs(error) < 3 * costs.prefill_spread(64_000, 0)


def test_a_saved_profile_is_believed_at_once_and_overridden_by_a_few_measurements() -> None:
    clock = Clock()
    saved = SavedCosts((C0, A, B, E, D0), {TierKind.S3: (0.05, 1e-8)})
    costs = CostModel(256, clock, saved)
    assert costs.prefill_confidence is costs.load_confidence(TierKind.S3) is Confidence.SAVED
    assert costs.prefill_known and costs.load_known(TierKind.S3)
    assert costs.load_confidence(TierKind.SSD) is Confidence.GUESSED
    assert costs.step_coefficients() == pytest.approx((C0, A, B, E, D0))
    assert costs.load({TierKind.S3: 1 << 20}) == pytest.approx(0.05 + 1e-8 * (1 << 20))
    assert costs.worth_saving() == saved
    for _ in range(10):
        work = StepWork.of([(256, 0)], 0)
        costs.observe_step(work, 3 * seconds_of(work))
        costs.observe_load(TierKind.S3, 1 << 20, 4 * (0.05 + 1e-8 * (1 << 20)))
    assert costs.prefill(256, 0) == pytest.approx(3 * (C0 + 256 * A + B * 256**2 / 2), rel=0.1)
    assert costs.load({TierKind.S3: 1 << 20}) == pytest.approx(4 * (0.05 + 1e-8 * (1 << 20)), rel=0.1)
    assert costs.worth_saving().step != saved.step


def test_a_saved_load_that_nobody_measured_again_is_stale_after_a_while() -> None:
    clock = Clock()
    costs = CostModel(256, clock, SavedCosts(None, {TierKind.S3: (5.0, 1e-6)}))
    clock.now += 700
    assert costs.load_confidence(TierKind.S3) is Confidence.STALE
    assert costs.worth_saving().loads[TierKind.S3] == pytest.approx((5.0, 1e-6)), "better than a guess next time"


def test_a_silent_tier_is_left_alone_for_as_long_and_longer_the_next_time() -> None:
    clock = Clock()
    costs = CostModel(256, clock)
    for _ in range(3):
        costs.observe_load(TierKind.S3, 1 << 20, 0.1)
    costs.observe_silence(TierKind.S3, 2.0)
    assert costs.load_cost(TierKind.S3).queue_s == pytest.approx(2.0)
    clock.now += 2.5
    assert costs.load_cost(TierKind.S3).queue_s == 0.0, "somebody has to try"
    costs.observe_silence(TierKind.S3, 0.5)
    assert costs.load_cost(TierKind.S3).queue_s == pytest.approx(4.0)
    costs.observe_load(TierKind.S3, 1 << 20, 0.1)
    assert costs.load_cost(TierKind.S3).queue_s == 0.0
    assert costs.load({TierKind.S3: 1 << 20}) == pytest.approx(0.1, rel=0.05), "silence is no measurement"


def test_loads_that_are_always_given_up_make_a_slow_tier_known() -> None:
    costs = CostModel(256, Clock())
    assert costs.load({TierKind.S3: 6 << 20}) < 0.2, "the guess"
    for _ in range(2):
        assert not costs.load_known(TierKind.S3)
        costs.observe_unfinished(TierKind.S3, 6 << 20, 0.5)
    assert costs.load_known(TierKind.S3)
    assert 0.5 <= costs.load({TierKind.S3: 6 << 20}) <= 1.0
    for _ in range(3):
        costs.observe_load(TierKind.S3, 6 << 20, 0.55)
    assert costs.load({TierKind.S3: 6 << 20}) == pytest.approx(0.55, rel=0.1)


def test_a_load_that_is_given_up_before_its_time_says_nothing() -> None:
    costs = CostModel(256, Clock())
    expected_s = costs.load({TierKind.S3: 6 << 20})
    for _ in range(5):
        costs.observe_unfinished(TierKind.S3, 6 << 20, 0.9 * expected_s)
    assert costs.load({TierKind.S3: 6 << 20}) == expected_s
    assert not costs.load_known(TierKind.S3)


def test_loads_that_others_may_have_held_up_move_nothing_within_their_bounds() -> None:
    """A fetch from several tiers: what the copies of one took may or may not have delayed the other."""
    draw = random.Random(5)
    costs = CostModel(256, Clock())
    for _ in range(60):
        num_bytes = int(10 ** draw.uniform(5, 7.7))
        alone_s = 0.05 + num_bytes / 1e8
        others_s = draw.choice([0.0, 0.1, 0.3])
        seconds = alone_s + others_s * draw.random()
        costs.observe_load(TierKind.S3, num_bytes, seconds, least_s=seconds - others_s)
    assert costs.load_coefficients(TierKind.S3) == pytest.approx((0.05, 1e-8), rel=0.05)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 10**13), st.floats(1e-7, 1e5), st.floats(0, 1), st.floats(0, 300)),
        min_size=1,
        max_size=60,
    )
)
def test_whatever_is_loaded_the_next_load_has_a_price(loads: list[tuple[int, float, float, float]]) -> None:
    clock = Clock()
    costs = CostModel(256, clock)
    for num_bytes, seconds, share, pause_s in loads:
        clock.now += pause_s
        costs.observe_load(TierKind.S3, num_bytes, seconds, least_s=share * seconds)
        price_s = costs.load({TierKind.S3: 1 << 20})
        assert 0 < price_s < float("inf")
        assert costs.load_spread(TierKind.S3, 1 << 20) >= 0
