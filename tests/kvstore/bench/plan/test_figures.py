"""From results of cases to keys and rows."""

from typing import Any

import pytest

from kvstore.bench.plan import figures


def result(regret: float, kind: str = "two_ended", link: tuple[float, float] = (20, 30)) -> dict[str, Any]:
    def plan(median_s: float | None, *, kinds: tuple[str, ...] = ("fetch",) * 3) -> dict[str, Any]:
        given_up = [4.0] if median_s is None else []
        return {"median_s": median_s, "seconds": [median_s] * 3, "given_up_after_s": given_up, "kinds": kinds}

    return {
        "case": "idle-20ms-30MBps-1024",
        "scenario": "idle",
        "link": {"round_trip_ms": link[0], "mb_per_s": link[1]},
        "plans": {
            "auto": plan(2 * (1 + regret), kinds=(kind,) * 3),
            "load": plan(2.0),
            "recompute": plan(None),
            "cut 512": plan(2.5),
        },
        "best": "load",
        "best_s": 2.0,
        "auto_s": 2 * (1 + regret),
        "regret": regret,
        "seconds": 60.0,
    }


def test_percentiles_are_by_nearest_rank_over_all_compared_cases() -> None:
    results = [result(number / 100) for number in range(1, 21)]
    report = figures.summarise([*results, {"scenario": "cut", "case": "cut", "ratio": 1.1, "worst_ratio": 1.15}])
    assert (report["regret_p50"], report["regret_p95"], report["regret_max"]) == (0.10, 0.19, 0.20)
    assert report["num_cases"] == 20
    assert (report["cut_ratio"], report["cut_worst_ratio"]) == (1.1, 1.15)


@pytest.mark.parametrize("with_cuts", [False, True])
def test_only_an_interval_plan_that_saves_enough_counts_as_better(with_cuts: bool) -> None:
    assert figures.is_better(result(-0.2), with_cuts=with_cuts)
    assert figures.is_better(result(-0.2, kind="interval"), with_cuts=with_cuts)
    assert not figures.is_better(result(-0.1), with_cuts=with_cuts)
    assert not figures.is_better(result(-0.2, kind="fetch"), with_cuts=with_cuts)


def test_a_fixed_cut_counts_where_it_is_asked_for() -> None:
    case = result(-0.2)
    case["plans"]["cut 512"]["median_s"] = case["best_s"] = 1.7
    assert figures.is_better(case, with_cuts=False) and not figures.is_better(case, with_cuts=True)


def test_what_was_given_up_took_at_least_so_long() -> None:
    case = result(-0.2)
    case["plans"]["load"] = case["plans"]["recompute"]
    assert figures.is_better(case, with_cuts=False)
    case["auto_s"] = 3.5
    assert not figures.is_better(case, with_cuts=False)


def test_the_share_is_of_the_middle_links() -> None:
    results = [result(-0.3), result(0.0), result(-0.3, link=(1, 300)), result(-0.3, link=(200, 5))]
    assert figures.summarise(results)["two_ended_better_share"] == 0.5
    assert "two_ended_better_share" not in figures.summarise(results[2:])


def test_a_row_tells_what_was_given_up_and_the_best_cut() -> None:
    (row,) = figures.rows({"cases": [result(-0.25)]})
    assert dict(zip(figures.COLUMNS, row, strict=True)) == {
        "case": "idle-20ms-30MBps-1024",
        "auto": "1.50",
        "plan": "two_ended",
        "load": "2.00",
        "recompute": ">4.0",
        "best cut": "2.50 at 512",
        "best": "load",
        "regret": "-0.25",
        "spread": "1.50 to 1.50",
    }
    assert "two_ended" in figures.line(result(-0.25))


def test_without_results_there_are_no_keys() -> None:
    report = figures.summarise([])
    assert report == {"num_cases": 0, "cases": []}
    with pytest.raises(KeyError):
        report["regret_p50"]
