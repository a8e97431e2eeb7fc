"""A link that breaks in the middle of a load: how long the first token takes then, beside recomputing from the start.

Before each break the link works and the engine has learned again that it does. It breaks after 40% of what the same
request took over the healthy link: once cut, with connections reset and refused, once silent.
"""

from statistics import median
from typing import Any, Final

from kvstore.bench.plan.cases import AUTO_PLAN, LOAD_PLAN, RECOMPUTE_PLAN, Case
from kvstore.bench.plan.link import Line, State
from kvstore.bench.plan.rig import Rig
from kvstore.core.errors import TierUnavailable

_SHARE: Final = 0.4
_WAYS: Final[tuple[State, ...]] = ("cut", "stalled")
# The bucket's circuit breaker lets a probe through after 2 s at first, and takes longer each time.
_TRIES: Final = 15
# Of the prefix: less than that is no load that could be broken in the middle.
_LEAST_SHARE: Final = 0.25


def measure_broken(rig: Rig, case: Case, rounds: int) -> dict[str, Any]:
    """Return `ratio`, the worse of both ways' medians, and each run. Raises KVStoreError."""
    recompute_s: list[float] = []
    ways: dict[str, list[dict[str, Any]]] = {way: [] for way in _WAYS}
    for _ in range(rounds):
        for way in _WAYS:
            healthy = _make_healthy(rig, case)
            breaks = Line(
                case.link.round_trip_ms / 1000,
                case.link.mb_per_s * 1e6,
                state=way,
                after_bytes=max(1, int(_SHARE * healthy)),
            )
            broken = rig.measure(case, 0, AUTO_PLAN, None, breaks)
            ways[way].append({"ttft_s": broken.ttft_s, "kind": broken.kind, "served": broken.served})
        run = rig.measure(case, 0, RECOMPUTE_PLAN, None)
        assert run.ttft_s is not None
        recompute_s.append(run.ttft_s)
    alone_s = median(recompute_s)
    ratios = {way: median(run["ttft_s"] for run in runs) / alone_s for way, runs in ways.items()}
    worst = max(run["ttft_s"] for runs in ways.values() for run in runs) / alone_s
    return {"ratio": max(ratios.values()), "worst_ratio": worst, "ratios": ratios, "recompute_s": recompute_s} | ways


def _make_healthy(rig: Rig, case: Case) -> int:
    """Return how many bytes the request takes over the healthy link, once the engine loads again."""
    for _ in range(_TRIES):
        # By turns what shows the engine again that loading works, and what it does by itself.
        rig.measure(case, 0, LOAD_PLAN, None)
        before = rig.down_bytes()
        run = rig.measure(case, 0, AUTO_PLAN, None)
        # A bucket that is probed gives a block now and then.
        if rig.bucket_works() and run.served.get("s3", 0) >= _LEAST_SHARE * case.prefix_tokens:
            return rig.down_bytes() - before
    raise TierUnavailable("the engine does not load again after the link was broken")
