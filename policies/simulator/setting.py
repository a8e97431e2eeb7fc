"""What a simulation is given and what it answers. All times in seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvstore.core.errors import ConfigError
from kvstore.core.outcome import TierKind
from policies.cost import PrefillCost
from policies.profiles import RAM_LATENCY_S, SSD_LATENCY_S, Machine

# What each does: docs/simulate.md.
Strategy = Literal["recompute", "load", "static_cut", "two_ended", "ours"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True, slots=True)
class Link:
    """The way from a tier to the GPUs, and how many blocks the tier holds; None: no bound."""

    latency_s: float
    bytes_per_s: float
    capacity_blocks: int | None


@dataclass(frozen=True, slots=True)
class Setting:
    """What the trace runs on: `num_engines` engines of one GPU or of several that work as one.

    `links` has RAM (one link per engine, one pool for all), SSD and S3 (one link for all). `gpu_price` None: the
    planner takes the price that it measures, see `policies/price.py`.
    """

    num_engines: int
    prefill: PrefillCost
    block_tokens: int
    block_bytes: int
    links: Mapping[TierKind, Link]
    gpu_price: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """`ttft_s[i]` is the time to first token of request i; `gpu_busy_s` is summed over the engines."""

    ttft_s: Sequence[float]
    gpu_busy_s: float
    makespan_s: float
    computed_tokens: int
    loaded_blocks: Mapping[TierKind, int]


def setting_of(
    machine: Machine,
    num_gpus: int,
    block_tokens: int,
    *,
    dram_bytes: int,
    ssd_bytes: int,
    ssd_bytes_per_s: float,
    s3_bytes_per_s: float,
    s3_latency_s: float,
    gpu_price: float | None = None,
) -> Setting:
    """Return the setting of `num_gpus` of a profile's machine; ConfigError where they do not make whole engines."""
    num_engines, left_over = divmod(num_gpus, machine.gpus_per_engine)
    if left_over or not num_engines:
        raise ConfigError(f"the model takes {machine.gpus_per_engine} GPUs per engine; {num_gpus} are no multiple")
    block_bytes = block_tokens * machine.model.kv_bytes_per_token
    links = {
        TierKind.RAM: Link(RAM_LATENCY_S, machine.link_bytes_per_s, dram_bytes // block_bytes),
        TierKind.SSD: Link(SSD_LATENCY_S, ssd_bytes_per_s, ssd_bytes // block_bytes),
        TierKind.S3: Link(s3_latency_s, s3_bytes_per_s, None),
    }
    return Setting(num_engines, machine.prefill, block_tokens, block_bytes, links, gpu_price)
