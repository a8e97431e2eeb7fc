"""How the time over a link that breaks is compared with recomputing; the rig is a script."""

from dataclasses import dataclass, field
from typing import cast

import pytest

from kvstore.bench.plan.broken import measure_broken
from kvstore.bench.plan.cases import AUTO_PLAN, LINKS, RECOMPUTE_PLAN, Case, PlanName
from kvstore.bench.plan.link import Line
from kvstore.bench.plan.race import Run
from kvstore.bench.plan.rig import Rig
from kvstore.core.errors import TierUnavailable

CASE = Case("cut", LINKS[2], 1024)


@dataclass
class Script:
    """After a break the engine needs `relearns` loads until it loads again by itself."""

    broken_s: dict[str, float]
    relearns: int = 2
    passed: int = 0
    lost_trust: int = 0
    breaks: list[Line] = field(default_factory=list)

    def down_bytes(self) -> int:
        return self.passed

    def bucket_works(self) -> bool:
        return True

    def measure(self, case: Case, text: int, plan: PlanName, limit_s: float | None, breaks: Line | None = None) -> Run:
        if plan == RECOMPUTE_PLAN:
            return Run(3.0, "recompute")
        if breaks is not None:
            self.breaks.append(breaks)
            self.lost_trust = self.relearns
            return Run(self.broken_s[breaks.state], "two_ended", {"s3": 100})
        if plan == AUTO_PLAN and self.lost_trust:
            return Run(3.0, "recompute", {"s3": 0})
        self.passed += 1000
        self.lost_trust = max(0, self.lost_trust - 1)
        return Run(1.5, "two_ended", {"s3": 600})


def test_the_worse_way_to_break_counts_and_each_follows_a_healthy_load() -> None:
    script = Script({"cut": 3.3, "stalled": 3.45})
    report = measure_broken(cast(Rig, script), CASE, 3)
    assert report["ratio"] == pytest.approx(1.15)
    assert report["worst_ratio"] == pytest.approx(1.15)
    assert report["ratios"] == {"cut": pytest.approx(1.1), "stalled": pytest.approx(1.15)}
    assert [line.state for line in script.breaks] == ["cut", "stalled"] * 3
    # 40% of what the healthy request took.
    assert {line.after_bytes for line in script.breaks} == {400}
    assert len(report["cut"]) == len(report["stalled"]) == 3


def test_an_engine_that_never_loads_again_ends_the_case() -> None:
    with pytest.raises(TierUnavailable, match="does not load again"):
        measure_broken(cast(Rig, Script({"cut": 1.0, "stalled": 1.0}, relearns=1000)), CASE, 2)
