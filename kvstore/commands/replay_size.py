"""`kvstore replay --size`: how much RAM and SSD a trace needs."""

from pathlib import Path
from typing import Final

import msgspec
import typer

from kvstore.core.units import parse_size
from policies.eviction.choice import NAMES, make
from policies.profiles import MODELS
from policies.replay import Accesses, infinite_hit_ratio, replay
from policies.sizing import smallest

COLUMNS: Final = ("tiers", "blocks", "of unique", "bytes", "token hits", "of infinite")
# What is taken where no policy was named.
_POLICY: Final = "gittins"
_GIB: Final = 2**30


class SizeRow(msgspec.Struct, frozen=True):
    """The smallest tiers found. `block_bytes` and what follows from it are 0 where the size of a block is not known."""

    trace: str
    policy: str
    target: float
    ram_share: float
    infinite_token_hit_ratio: float
    unique_blocks: int
    block_tokens: int
    block_bytes: int
    ram_blocks: int
    ram_bytes: int
    ram_token_hit_ratio: float
    ssd_blocks: int
    ssd_bytes: int
    token_hit_ratio: float


def run(
    trace: Path, accesses: Accesses, policy: str, target: float, ram_share: float, model: str, block_bytes: str
) -> SizeRow:
    """Find the sizes. Raises typer.BadParameter."""
    name = _POLICY if policy == "all" else policy
    if name not in NAMES:
        raise typer.BadParameter(f"--size goes with one of {', '.join(NAMES)}", param_hint="--policy")
    one_bytes = _block_bytes(model, block_bytes, accesses.block_tokens)
    infinite = infinite_hit_ratio(accesses)

    def hit_ratio(blocks: int) -> float:
        return replay(accesses, blocks, lambda tier, _: make(name, tier, tier.clock)).token_hit_ratio

    ssd = smallest(hit_ratio, target * infinite, accesses.num_blocks)
    ram = smallest(hit_ratio, ram_share * target * infinite, ssd.blocks)
    return SizeRow(
        trace=trace.name,
        policy=name,
        target=target,
        ram_share=ram_share,
        infinite_token_hit_ratio=infinite,
        unique_blocks=accesses.num_blocks,
        block_tokens=accesses.block_tokens,
        block_bytes=one_bytes,
        ram_blocks=ram.blocks,
        ram_bytes=ram.blocks * one_bytes,
        ram_token_hit_ratio=ram.token_hit_ratio,
        ssd_blocks=ssd.blocks,
        ssd_bytes=ssd.blocks * one_bytes,
        token_hit_ratio=ssd.token_hit_ratio,
    )


def table(row: SizeRow) -> list[list[str]]:
    tiers = (
        (f"RAM, for {100 * row.ram_share:.0f}% of these hits", row.ram_blocks, row.ram_bytes, row.ram_token_hit_ratio),
        ("SSD behind it", row.ssd_blocks, row.ssd_bytes, row.token_hit_ratio),
        ("or RAM alone", row.ssd_blocks, row.ssd_bytes, row.token_hit_ratio),
    )
    return [
        [
            name,
            str(blocks),
            f"{100 * blocks / row.unique_blocks:.1f}%",
            f"{size / _GIB:.1f} GiB" if row.block_bytes else "-",
            f"{100 * hits:.1f}%",
            f"{100 * hits / row.infinite_token_hit_ratio:.1f}%" if row.infinite_token_hit_ratio else "-",
        ]
        for name, blocks, size, hits in tiers
    ]


def _block_bytes(model: str, block_bytes: str, block_tokens: int) -> int:
    if block_bytes:
        try:
            return parse_size(block_bytes)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--block-bytes") from None
    if not model:
        return 0
    for name, figures in MODELS.items():
        if name.lower() == model.lower():
            return figures.kv_bytes_per_token * block_tokens
    raise typer.BadParameter(f"{model!r} is none of {', '.join(MODELS)}", param_hint="--model")
