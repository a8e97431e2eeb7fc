"""`kvstore replay --ssd-blocks M`: RAM and SSD together, with an admission policy in front of the SSD."""

from pathlib import Path
from typing import Final

import msgspec
import typer

from kvstore.config import RamConfig, SsdConfig
from policies import admission
from policies.eviction.choice import NAMES, make
from policies.replay import Accesses, infinite_hit_ratio
from policies.stacked import TraceClock, replay_stacked

COLUMNS: Final = ("policy", "SSD policy", "admission", "token hits", "from RAM", "SSD writes", "of unique", "refused")
# What the daemon does unless it is told otherwise (`ram.policy`, `ssd.policy`).
_RAM_POLICY: Final = RamConfig().policy
SSD_POLICY: Final = SsdConfig().policy


class StackedRow(msgspec.Struct, frozen=True):
    """One eviction policy in RAM and one on the SSD, with one admission policy. Ratios are shares of 1; writes and
    refusals count blocks, `ssd_write_ratio` is of unique blocks."""

    trace: str
    policy: str
    ssd_policy: str
    admission: str
    token_hit_ratio: float
    ram_token_hit_ratio: float
    infinite_token_hit_ratio: float
    ram_blocks: int
    ssd_blocks: int
    unique_blocks: int
    block_tokens: int
    requests: int
    block_accesses: int
    input_tokens: int
    hit_tokens: int
    ram_writes: int
    ssd_writes: int
    ssd_write_ratio: float
    ssd_refused: int


def run(
    trace: Path,
    accesses: Accesses,
    policies: str,
    ssd_policies: str,
    admissions: str,
    ram_blocks: int,
    ssd_blocks: int,
) -> list[StackedRow]:
    """Replay for each of the named policies, separated by commas. Raises typer.BadParameter."""
    infinite = infinite_hit_ratio(accesses)
    return [
        _row(trace, accesses, policy, ssd_policy, chosen, ram_blocks, ssd_blocks, infinite)
        for policy in ([_RAM_POLICY] if policies == "all" else _names(policies, NAMES, "--policy"))
        for ssd_policy in _names(ssd_policies, NAMES, "--ssd-policy")
        for chosen in _names(admissions, admission.NAMES, "--admission")
    ]


def cells(row: StackedRow) -> list[str]:
    return [
        row.policy,
        row.ssd_policy,
        row.admission,
        f"{100 * row.token_hit_ratio:.1f}%",
        f"{100 * row.ram_token_hit_ratio:.1f}%",
        str(row.ssd_writes),
        f"{100 * row.ssd_write_ratio:.1f}%",
        str(row.ssd_refused),
    ]


def _row(
    trace: Path,
    accesses: Accesses,
    policy: str,
    ssd_policy: str,
    chosen: str,
    ram_blocks: int,
    ssd_blocks: int,
    infinite: float,
) -> StackedRow:
    clock = TraceClock()
    replayed = replay_stacked(
        accesses,
        ram_blocks,
        ssd_blocks,
        lambda tier, _: make(policy, tier, tier.clock),
        lambda tier, _: make(ssd_policy, tier, tier.clock),
        admission.make(chosen, clock),
        clock,
    )
    return StackedRow(
        trace=trace.name,
        policy=policy,
        ssd_policy=ssd_policy,
        admission=chosen,
        token_hit_ratio=replayed.token_hit_ratio,
        ram_token_hit_ratio=replayed.ram_hit_tokens / replayed.input_tokens,
        infinite_token_hit_ratio=infinite,
        ram_blocks=ram_blocks,
        ssd_blocks=ssd_blocks,
        unique_blocks=accesses.num_blocks,
        block_tokens=accesses.block_tokens,
        requests=replayed.num_requests,
        block_accesses=replayed.num_accesses,
        input_tokens=replayed.input_tokens,
        hit_tokens=replayed.hit_tokens,
        ram_writes=replayed.ram_writes,
        ssd_writes=replayed.ssd_writes,
        ssd_write_ratio=replayed.ssd_writes / accesses.num_blocks,
        ssd_refused=replayed.ssd_refused,
    )


def _names(text: str, known: tuple[str, ...], option: str) -> list[str]:
    names = list(known) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if not names or set(names) - set(known):
        raise typer.BadParameter(f"{text!r} is not 'all' or one or several of {', '.join(known)}", param_hint=option)
    return names
