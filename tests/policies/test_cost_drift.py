"""The cost model on made-up machines: a fifth of the measurements five times too slow moves it by at most 5%, and 50
measurements after the machine became half as fast again, or slower, it is right within 10%.

Seeded; each case is one random machine. `python benchmarks/cost_model.py` runs hundreds of them and prints the errors.
"""

import pytest

from benchmarks.cost_model import LOADS, OUTLIERS, STEPS, LoadRun, StepRun

SEEDS = range(3)


@pytest.mark.parametrize("outliers", [name for name in OUTLIERS if name != "none"])
@pytest.mark.parametrize("mix", STEPS)
def test_slow_outliers_do_not_move_what_a_step_costs(mix: str, outliers: str) -> None:
    for seed in SEEDS:
        assert StepRun(mix, seed).moved(outliers, num_samples=100) <= 0.05


@pytest.mark.parametrize("speed", [1.5, 1 / 1.5])
@pytest.mark.parametrize("outliers", ["none", "random"])
@pytest.mark.parametrize("mix", STEPS)
def test_steps_follow_a_machine_that_changes(mix: str, outliers: str, speed: float) -> None:
    for seed in SEEDS:
        assert StepRun(mix, seed).error_after(speed, outliers, before=100, after=50) <= 0.10


@pytest.mark.parametrize("outliers", [name for name in OUTLIERS if name != "none"])
@pytest.mark.parametrize("mix", LOADS)
def test_slow_outliers_do_not_move_what_a_load_costs(mix: str, outliers: str) -> None:
    for seed in SEEDS:
        assert LoadRun(mix, seed).moved(outliers, num_samples=100) <= 0.05


@pytest.mark.parametrize("change", [(1.5, 1.5), (1 / 1.5, 1 / 1.5), (1.0, 1.5), (1.5, 1.0)])
@pytest.mark.parametrize("outliers", ["none", "random"])
@pytest.mark.parametrize("mix", LOADS)
def test_loads_follow_a_link_that_changes(mix: str, outliers: str, change: tuple[float, float]) -> None:
    for seed in SEEDS:
        assert LoadRun(mix, seed).error_after(change, outliers, before=80, after=50) <= 0.10
