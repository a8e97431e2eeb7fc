"""What is loaded, from what loads and steps were seen to cost."""

from pathlib import Path

from kvstore.connectors.vllm_parts.costs import Costs, blank_profile
from kvstore.connectors.vllm_parts.orders import News
from kvstore.core.outcome import TierKind
from policies.interval import Question
from tests.support.vllm import Clock

BLOCK_BYTES = 1 << 20


def learned(clock: Clock, *, step_s_per_token: float, load_s_per_block: float, folder: Path | None = None) -> Costs:
    costs = Costs(blank_profile("model", "device", 512, 16, BLOCK_BYTES), folder, clock)
    for number in range(20):
        tokens = 64 + 32 * (number % 8)
        costs.step_begun(number, [(tokens, 0)], 0)
        clock.now += step_s_per_token * tokens
        costs.learn(News(steps=[number]))
    for blocks in (4, 8, 16, 32, 64, 8, 16, 32):
        costs.learn(News(loads=[(int(TierKind.RAM), blocks * BLOCK_BYTES, load_s_per_block * blocks)]))
    return costs


def loaded(costs: Costs, mode: str = "auto", num_blocks: int = 40) -> int:
    question = Question(num_blocks * 16 + 5, 16, BLOCK_BYTES, 0, (TierKind.RAM,) * num_blocks)
    plan = costs.plan(question, mode)
    return plan.start if plan.is_cut else plan.num_blocks


def test_what_is_faster_to_load_is_loaded() -> None:
    assert loaded(learned(Clock(), step_s_per_token=0.002, load_s_per_block=0.001)) == 40


def test_what_is_faster_to_compute_is_computed() -> None:
    assert loaded(learned(Clock(), step_s_per_token=0.0001, load_s_per_block=0.1)) == 0


def test_until_it_is_known_everything_is_loaded() -> None:
    costs = Costs(blank_profile("model", "device", 512, 16, BLOCK_BYTES), None, Clock())
    assert loaded(costs) == 40
    assert costs.recompute_s(100, 0) is None


def test_a_plan_that_was_asked_for_is_taken_whatever_it_costs() -> None:
    costs = learned(Clock(), step_s_per_token=0.0001, load_s_per_block=0.1)
    assert loaded(costs, "fetch") == 40
    assert loaded(learned(Clock(), step_s_per_token=0.002, load_s_per_block=0.001), "recompute") == 0


def test_loads_of_others_stand_in_front() -> None:
    costs = learned(Clock(), step_s_per_token=0.002, load_s_per_block=0.001)
    alone_s = costs.predicted_load_s([TierKind.RAM] * 10, BLOCK_BYTES)
    costs.load_begun("other", {TierKind.RAM: 100})
    behind_s = costs.predicted_load_s([TierKind.RAM] * 10, BLOCK_BYTES)
    costs.load_ended("other")
    assert behind_s > alone_s + 0.05
    assert costs.predicted_load_s([TierKind.RAM] * 10, BLOCK_BYTES) == alone_s


def test_steps_that_overlap_are_timed_from_output_to_output() -> None:
    clock = Clock()
    costs = Costs(blank_profile("model", "device", 512, 16, BLOCK_BYTES), None, clock)
    for number in range(40):
        costs.step_begun(number + 1, [(100, 0)], 0)
        if number:
            costs.learn(News(steps=[number]))
        clock.now += 0.1
    recompute_s = costs.recompute_s(100, 0)
    assert recompute_s is not None
    assert 0.08 < recompute_s < 0.12


def test_what_was_learned_is_there_after_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    costs = learned(clock, step_s_per_token=0.0001, load_s_per_block=0.1, folder=tmp_path)
    costs.save(costs.snapshot())
    again = Costs(blank_profile("model", "device", 512, 16, BLOCK_BYTES), tmp_path, clock)
    assert loaded(again) == 0
