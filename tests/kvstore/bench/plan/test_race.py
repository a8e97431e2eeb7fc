"""Who runs how often, and what counts as the best."""

import pytest

from kvstore.bench.plan.cases import AUTO_PLAN, LOAD_PLAN, RECOMPUTE_PLAN, CutSearch, PlanName
from kvstore.bench.plan.race import CLOSE, MIN_LIMIT_S, Results, Run, contenders, race


class Track:
    """Plans take the seconds that the test says, whichever run it is."""

    def __init__(self, seconds: dict[str, float], auto_s: list[float]) -> None:
        self.seconds = seconds
        self.auto_s = auto_s
        self.order: list[str] = []

    def measure(self, plan: PlanName, limit_s: float | None) -> Run:
        self.order.append(plan.name)
        if plan == AUTO_PLAN:
            assert limit_s is None
            count = self.order.count("auto") - 1
            return Run(self.auto_s[min(count, len(self.auto_s) - 1)], "two_ended")
        seconds = self.seconds[plan.name]
        return Run(seconds) if limit_s is None or seconds <= limit_s else Run(None, limit_s=limit_s)


def raced(track: Track, prefix: int = 512, load_first: bool = True) -> Results:
    return race(track.measure, prefix, CutSearch(prefix, 256), load_first, 3, 5)


def test_plans_take_turns_and_only_the_close_ones_run_again() -> None:
    track = Track({"load": 2.0, "recompute": 3.0, "cut 256": 2.2}, [1.5])
    results = raced(track)
    assert track.order[:4] == ["load", "auto", "recompute", "cut 256"]
    assert [track.order.count(name) for name in ("load", "auto", "recompute", "cut 256")] == [3, 3, 1, 3]
    assert track.order[4:7] != track.order[7:10]
    assert results.regret() == pytest.approx(-0.25)
    assert results.best() == LOAD_PLAN


def test_a_plan_that_is_far_from_the_best_is_not_run_to_its_end() -> None:
    track = Track({"load": 2.0, "recompute": 9.0, "cut 256": 5.0}, [2.1])
    results = raced(track)
    assert results.median_s(RECOMPUTE_PLAN) is None
    plans = results.as_json()["plans"]
    assert plans["recompute"]["given_up_after_s"] == [pytest.approx(3.2)]
    assert plans["recompute"]["seconds"] == []


def test_short_runs_are_never_given_up() -> None:
    results = raced(Track({"load": 0.1, "recompute": 0.8 * MIN_LIMIT_S}, [0.1]), prefix=256)
    assert results.median_s(RECOMPUTE_PLAN) == 0.8 * MIN_LIMIT_S


def test_the_best_fixed_cut_counts_though_the_pure_plans_are_worse() -> None:
    results = raced(Track({"load": 3.0, "recompute": 3.5, "cut 256": 2.0}, [2.5]))
    assert results.best() == PlanName.cut(256)
    assert results.regret() == pytest.approx(0.25)


def test_figures_that_scatter_are_taken_more_often() -> None:
    track = Track({"load": 1.0, "recompute": 4.0, "cut 256": 4.0}, [1.0, 1.5, 1.4, 1.5, 1.5])
    assert raced(track).seconds(AUTO_PLAN) == [1.0, 1.5, 1.4, 1.5, 1.5]


def test_one_lucky_run_of_a_plan_that_was_run_once_is_no_best() -> None:
    results = Results()
    for seconds in (2.0, 2.0, 2.0):
        results.add(LOAD_PLAN, Run(seconds))
    results.add(RECOMPUTE_PLAN, Run(1.0))
    assert results.best() == LOAD_PLAN


def test_what_was_given_up_counts_as_longer_than_anything() -> None:
    results = Results()
    for seconds in (2.0, None, None):
        results.add(LOAD_PLAN, Run(seconds))
    results.add(RECOMPUTE_PLAN, Run(3.0))
    assert results.median_s(LOAD_PLAN) is None
    assert results.fixed() == [RECOMPUTE_PLAN]
    assert results.regret() is None


def test_a_plan_with_one_unlucky_run_stays_in_the_race() -> None:
    results = Results()
    for seconds in (2.0, 2.0):
        results.add(LOAD_PLAN, Run(seconds))
    for seconds in (2.0 * CLOSE, 5.0):
        results.add(RECOMPUTE_PLAN, Run(seconds))
    assert contenders(results) == [LOAD_PLAN, RECOMPUTE_PLAN]
