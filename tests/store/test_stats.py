"""What engines report, and that no report can make nonsense of the sums."""

import math
from typing import Any

import pytest

from kvstore.core.outcome import TierKind
from kvstore.store.stats import RequestStats
from kvstore.wire import Report


def report(**changes: Any) -> Report:
    fields: dict[str, Any] = {
        "request_id": "r",
        "prompt_tokens": 100,
        "hbm": 10,
        "ram": 20,
        "ssd": 30,
        "s3": 0,
        "recomputed": 40,
        "miss": {"evicted": 40},
        "plan": "load",
        "ttft_s": 0.5,
    }
    return Report(**(fields | changes))


def test_reports_add_up_to_the_prompts() -> None:
    stats = RequestStats()
    stats.add(report())
    stats.add(report(ttft_s=1.5, miss={"corrupt": 40}, plan="recompute"))
    snapshot: Any = stats.snapshot()
    assert snapshot["count"] == 2 and snapshot["prompt_tokens"] == 200 and snapshot["recomputed_tokens"] == 80
    assert snapshot["hit_tokens"] == {"hbm": 20, "ram": 40, "ssd": 60, "s3": 0}
    assert sum(snapshot["hit_tokens"].values()) + snapshot["recomputed_tokens"] == snapshot["prompt_tokens"]
    assert snapshot["miss_tokens"] == {"corrupt": 40, "evicted": 40}
    assert snapshot["plans"] == {"load": 1, "recompute": 1}
    assert snapshot["ttft_s"] == {"sum": 2.0, "recent_p50": 1.0, "recent_p99": 1.5}
    assert stats.hit_tokens(TierKind.SSD) == 60


@pytest.mark.parametrize(
    "changes",
    [
        {"hbm": -1, "recomputed": 51},
        {"prompt_tokens": 101},
        {"prompt_tokens": 1 << 40, "recomputed": (1 << 40) - 60},
        {"ttft_s": -0.1},
        {"ttft_s": math.nan},
        {"ttft_s": math.inf},
        {"saved_prefill_s": math.nan},
    ],
)
def test_a_report_that_makes_no_sense_counts_for_nothing(changes: dict[str, Any]) -> None:
    stats = RequestStats()
    before = stats.snapshot()
    with pytest.raises(ValueError):
        stats.add(report(**changes))
    assert stats.snapshot() == before
