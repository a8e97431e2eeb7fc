"""From the results of cases to the keys, the table and the lines that people read."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvstore.bench.plan.cases import AUTO, LOAD, MIDDLE_LINKS, RECOMPUTE

COLUMNS: Final = ("case", "auto", "plan", "load", "recompute", "best cut", "best", "regret", "spread")
# An interval plan counts as better from here on.
_BETTER: Final = 0.15
_INTERVALS: Final = ("two_ended", "interval")


def summarise(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the keys of the report and all cases."""
    compared = [result for result in results if result.get("regret") is not None]
    regrets = sorted(result["regret"] for result in compared)
    report: dict[str, Any] = {"num_cases": len(compared), "cases": list(results)}
    if regrets:
        report |= {"regret_p50": percentile(regrets, 0.5), "regret_p95": percentile(regrets, 0.95)}
        report["regret_max"] = regrets[-1]
    middle = [result for result in compared if _is_middle(result)]
    if middle:
        report["two_ended_better_share"] = _share(is_better(result, with_cuts=False) for result in middle)
        report["better_than_cuts_share"] = _share(is_better(result, with_cuts=True) for result in middle)
    for result in results:
        if result["scenario"] == "cut":
            report["cut_ratio"], report["cut_worst_ratio"] = result["ratio"], result["worst_ratio"]
    return report


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile of sorted figures."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def is_better(result: dict[str, Any], *, with_cuts: bool) -> bool:
    """Whether an interval plan was taken, and took at least 15% less than the better of loading and computing
    everything; `with_cuts`: also than the best fixed cut."""
    plans = result["plans"]
    kinds = plans[AUTO]["kinds"]
    is_interval = sum(kind in _INTERVALS for kind in kinds) / len(kinds) > 0.5
    pure_s = min((_at_least_s(plans[name]) for name in (LOAD, RECOMPUTE) if name in plans), default=0.0)
    best_s = min(pure_s, result["best_s"]) if with_cuts else pure_s
    return is_interval and bool(result["auto_s"] <= (1 - _BETTER) * best_s)


def _at_least_s(plan: dict[str, Any]) -> float:
    """Return a plan's median, or how long was waited for it."""
    return float(plan["median_s"] if plan["median_s"] is not None else max(plan["given_up_after_s"], default=0.0))


def rows(report: dict[str, Any]) -> list[list[str]]:
    """Return a row per case, in the order in which they were run."""
    return [_row(result) for result in report["cases"] if result["scenario"] != "cut"]


def line(result: dict[str, Any]) -> str:
    """Return one case on a line, for those who wait."""
    if result["scenario"] == "cut":
        return f"{result['case']}: {result['ratio']:.2f} of recomputing, at worst {result['worst_ratio']:.2f}"
    cells = _row(result)
    told = ", ".join(f"{name} {cell}" for name, cell in zip(COLUMNS[1:], cells[1:], strict=True) if cell)
    return f"{cells[0]}: {told} ({result['seconds']:.0f} s)"


def notes(report: dict[str, Any]) -> list[str]:
    """Return the keys, and what the figures were measured on."""
    machine, settings = report["machine"], report["settings"]
    before, after = machine["load_average"][0], machine["load_average_after"][0]
    keys = (
        "regret_p50",
        "regret_p95",
        "regret_max",
        "two_ended_better_share",
        "better_than_cuts_share",
        "cut_ratio",
        "cut_worst_ratio",
    )
    scale = settings["scale"]
    size = f"blocks of {scale['block_tokens']} tokens, chunks of {scale['chunk_tokens']}"
    torch = machine["packages"].get("torch", "not installed")
    versions = f"Linux {machine['kernel']}, Python {machine['python']}, torch {torch}"
    runs = f"medians of {settings['rounds']} to {settings['max_rounds']} runs in turns"
    lines = [f"{key} {report[key]:.3f}" for key in keys if key in report]
    lines.append(f"{report['num_cases']} cases in {report['seconds']:.0f} s; {size}")
    lines.append(f"{runs}, of plans that came within 1.3 of the best; others ran once, beyond 1.6 not to their end (>)")
    lines.append("times in s to the first token; regret: auto beside the best of load, recompute and the fixed cuts")
    lines.append(f"{machine['cpu']}, {machine['cores']} cores; {versions}; load {before:.2f} before, {after:.2f} after")
    return lines


def _row(result: dict[str, Any]) -> list[str]:
    plans = result["plans"]
    auto = plans[AUTO]
    cuts = {name: plan for name, plan in plans.items() if plan["median_s"] is not None and name.startswith("cut ")}
    best_cut = min(cuts, key=lambda name: float(cuts[name]["median_s"]), default="")
    seconds = auto["seconds"]
    return [
        result["case"],
        _seconds(auto),
        " ".join(dict.fromkeys(auto["kinds"])),
        _seconds(plans.get(LOAD)),
        _seconds(plans.get(RECOMPUTE)),
        f"{_seconds(cuts[best_cut])} at {best_cut.removeprefix('cut ')}" if best_cut else "",
        result["best"] or "",
        "" if result["regret"] is None else f"{result['regret']:+.2f}",
        f"{min(seconds):.2f} to {max(seconds):.2f}" if seconds else "",
    ]


def _seconds(plan: dict[str, Any] | None) -> str:
    if plan is None:
        return ""
    if plan["median_s"] is not None:
        return f"{plan['median_s']:.2f}"
    return f">{max(plan['given_up_after_s']):.1f}" if plan["given_up_after_s"] else ""


def _share(claims: Iterable[bool]) -> float:
    listed = list(claims)
    return sum(listed) / len(listed)


def _is_middle(result: dict[str, Any]) -> bool:
    return tuple(result["link"].values()) in MIDDLE_LINKS
