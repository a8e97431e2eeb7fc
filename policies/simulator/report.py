"""The figures of a simulation that people compare."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.simulator.setting import Outcome, Setting


@dataclass(frozen=True, slots=True)
class Report:
    """Times to first token in seconds; `gpu_use` is the share of the GPUs' time that they computed, 0 to 1."""

    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    gpu_use: float
    computed_tokens: int
    loaded_bytes: Mapping[str, int]


def report(outcome: Outcome, setting: Setting) -> Report:
    """Return the figures of an outcome with at least one request."""
    ttft_s = sorted(outcome.ttft_s)
    return Report(
        ttft_mean_s=math.fsum(ttft_s) / len(ttft_s),
        ttft_p50_s=_percentile(ttft_s, 50),
        ttft_p90_s=_percentile(ttft_s, 90),
        ttft_p99_s=_percentile(ttft_s, 99),
        gpu_use=outcome.gpu_busy_s / (setting.num_engines * outcome.makespan_s) if outcome.makespan_s else 0.0,
        computed_tokens=outcome.computed_tokens,
        loaded_bytes={tier.label: count * setting.block_bytes for tier, count in outcome.loaded_blocks.items()},
    )


def _percentile(in_order: Sequence[float], percent: int) -> float:
    """Return the smallest value that so many percent of the values do not exceed."""
    return in_order[max(0, math.ceil(len(in_order) * percent / 100) - 1)]
