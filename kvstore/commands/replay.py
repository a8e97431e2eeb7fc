"""`kvstore replay`: how many prompt tokens of a trace would come from the cache, by policy and capacity."""

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.progress import track

from kvstore.commands import replay_size, replay_stacked
from kvstore.commands.common import JsonOption, print_json, print_table
from kvstore.commands.replay_plot import check_plot, plot_hit_ratios
from kvstore.core.units import parse_size
from policies import admission as admission_policies
from policies.eviction.belady import Belady
from policies.eviction.choice import NAMES, make
from policies.pieces import replay_in_pieces
from policies.profiles import MODELS
from policies.replay import Accesses, MakePolicy, Replayed, accesses_of, infinite_hit_ratio
from policies.replay import replay as replay_accesses
from policies.trace import read_trace

EXAMPLE: Final = "Example: kvstore replay trace.jsonl --capacity-fraction 0.03 --policy lru --json"
POLICIES: Final = (*NAMES, "belady")
_FRACTIONS: Final = ("0.01", "0.03", "0.1", "0.3")
_HINTS: Final = ("none", "returns")
_COLUMNS: Final = ("policy", "capacity", "of unique", "token hits", "of infinite", "inserted", "evicted")
_MAX_TOKENS: Final = 2**31
_TARGET: Final = 0.9
_RAM_SHARE: Final = 0.5


class Row(msgspec.Struct, frozen=True):
    """One policy at one capacity, as printed. Ratios are shares of 1."""

    trace: str
    policy: str
    hints: str
    token_hit_ratio: float
    infinite_token_hit_ratio: float
    capacity_blocks: int
    capacity_fraction: float
    unique_blocks: int
    block_tokens: int
    requests: int
    block_accesses: int
    input_tokens: int
    hit_tokens: int
    inserted_blocks: int
    evicted_blocks: int


def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Requests in Mooncake's JSONL format.")],
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="NAMES", help=f"One or several of {', '.join(POLICIES)}; default: all."),
    ] = None,
    capacity_fraction: Annotated[
        list[str] | None,
        typer.Option(
            "--capacity-fraction", metavar="SHARE", help="Room for this share of the trace's unique blocks; repeatable."
        ),
    ] = None,
    capacity_blocks: Annotated[
        list[int] | None, typer.Option("--capacity-blocks", metavar="N", help="Room for so many blocks; repeatable.")
    ] = None,
    capacity_bytes: Annotated[
        list[str] | None,
        typer.Option(
            "--capacity-bytes", metavar="SIZE", help="Room for so many bytes; needs --block-bytes; repeatable."
        ),
    ] = None,
    block_bytes: Annotated[str, typer.Option("--block-bytes", metavar="SIZE", help="Bytes of one block's KV.")] = "",
    block_tokens: Annotated[
        int, typer.Option("--block-tokens", min=0, max=_MAX_TOKENS, help="Tokens of a block; 0: as the trace shows.")
    ] = 0,
    hints: Annotated[
        str,
        typer.Option(
            "--hints", metavar="KIND", help="'returns': tell the policy of each request whether its session returns."
        ),
    ] = "none",
    piece_blocks: Annotated[
        int,
        typer.Option(
            "--piece-blocks", metavar="N", min=0, help="Prompts come in pieces of so many blocks, as from an engine."
        ),
    ] = 0,
    concurrent: Annotated[
        int,
        typer.Option("--concurrent", metavar="N", min=1, help="With --piece-blocks: so many requests in turns."),
    ] = 1,
    ram_blocks: Annotated[
        int, typer.Option("--ram-blocks", metavar="N", min=0, help="RAM of so many blocks in front of --ssd-blocks.")
    ] = 0,
    ssd_blocks: Annotated[
        int,
        typer.Option("--ssd-blocks", metavar="N", min=0, help="Replay RAM and SSD together; this is the SSD's room."),
    ] = 0,
    ssd_policy: Annotated[
        list[str] | None,
        typer.Option(
            "--ssd-policy",
            metavar="NAMES",
            help=f"With --ssd-blocks: eviction from the SSD, as --policy; default: {replay_stacked.SSD_POLICY}.",
        ),
    ] = None,
    admission: Annotated[
        list[str] | None,
        typer.Option(
            "--admission",
            metavar="NAMES",
            help=f"What is written to the SSD: one or several of {', '.join(admission_policies.NAMES)}; default: all.",
        ),
    ] = None,
    size: Annotated[
        bool, typer.Option("--size", help="Find how much RAM and SSD reach --target of what an infinite cache hits.")
    ] = False,
    target: Annotated[
        float, typer.Option("--target", metavar="SHARE", min=0.01, max=1.0, help="Of --size: of an infinite cache.")
    ] = _TARGET,
    ram_share: Annotated[
        float, typer.Option("--ram-share", metavar="SHARE", min=0.01, max=1.0, help="Of --size: of hits, out of RAM.")
    ] = _RAM_SHARE,
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help=f"Of --size, for bytes: one of {', '.join(MODELS)}.")
    ] = "",
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Also draw hit ratio over capacity into a PNG file.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Replay a trace of requests and print the token hit ratio: hit tokens over prompt tokens, first requests included.

    Without a capacity: 1, 3, 10 and 30% of the unique blocks. belady knows the trace's future: no policy can do better.
    --json prints one object, or a list of them where there are several policies or capacities.
    """
    policies, admissions = ",".join(policy or ["all"]), ",".join(admission or ["all"])
    names = _policies(policies)
    if (ssd_blocks or ram_blocks) and (
        plot or hints != "none" or capacity_fraction or capacity_blocks or capacity_bytes
    ):
        raise typer.BadParameter(
            "goes with --policy, --ssd-policy, --admission and --block-tokens only", param_hint="--ssd-blocks"
        )
    if size and (
        ssd_blocks or ram_blocks or plot or hints != "none" or capacity_fraction or capacity_blocks or capacity_bytes
    ):
        raise typer.BadParameter(
            "goes with --policy, --target, --ram-share, --model, --block-bytes and --block-tokens only",
            param_hint="--size",
        )
    if not size and (model or (target, ram_share) != (_TARGET, _RAM_SHARE)):
        raise typer.BadParameter("goes with --size only, as --target and --ram-share do", param_hint="--model")
    if admission and not (ssd_blocks or ram_blocks):
        raise typer.BadParameter("needs --ssd-blocks, the room of the SSD", param_hint="--admission")
    if ssd_policy and not (ssd_blocks or ram_blocks):
        raise typer.BadParameter("needs --ssd-blocks, the room of the SSD", param_hint="--ssd-policy")
    if hints not in _HINTS:
        raise typer.BadParameter(f"{hints!r} is neither 'none' nor 'returns'", param_hint="--hints")
    if concurrent > 1 and not piece_blocks:
        raise typer.BadParameter("goes with --piece-blocks only", param_hint="--concurrent")
    if piece_blocks and (ssd_blocks or ram_blocks or size or hints != "none" or "belady" in names):
        if policies != "all" or ssd_blocks or ram_blocks or size or hints != "none":
            raise typer.BadParameter("goes with --policy (not belady) and capacities only", param_hint="--piece-blocks")
        names = NAMES
    if plot is not None:
        check_plot(plot)
    read = accesses_of(read_trace(trace, block_tokens=block_tokens or None))
    if ssd_blocks or ram_blocks:
        on_ssd = ",".join(ssd_policy or [replay_stacked.SSD_POLICY])
        stacked = replay_stacked.run(trace, read, policies, on_ssd, admissions, ram_blocks, ssd_blocks)
        if json:
            print_json(stacked[0] if len(stacked) == 1 else stacked)
        else:
            print_table(replay_stacked.COLUMNS, [replay_stacked.cells(row) for row in stacked])
        return
    if size:
        sized = replay_size.run(trace, read, policies, target, ram_share, model, block_bytes)
        if json:
            print_json(sized)
        else:
            typer.echo(f"{100 * target:g}% of what an infinite cache hits, with {sized.policy}:")
            print_table(replay_size.COLUMNS, replay_size.table(sized))
        return
    capacities = _capacities(read, capacity_fraction or [], capacity_blocks or [], capacity_bytes or [], block_bytes)
    infinite = infinite_hit_ratio(read)
    rows = []
    todo = [(name, capacity) for name in names for capacity in capacities]
    for name, capacity in track(todo, "replaying", console=Console(stderr=True), transient=True, disable=len(todo) < 2):
        if piece_blocks:
            replayed = replay_in_pieces(read, capacity, _maker(name), piece_blocks, concurrent)
        else:
            replayed = replay_accesses(read, capacity, _maker(name), tells_returns=hints == "returns")
        rows.append(_row(trace, name, hints, read, replayed, infinite))
    if plot is not None:
        plot_hit_ratios(plot, [(row.policy, row.capacity_blocks, row.token_hit_ratio) for row in rows], infinite)
        typer.echo(f"the plot is {plot}", err=json)
    if json:
        print_json(rows[0] if len(rows) == 1 else rows)
    else:
        print_table(_COLUMNS, [_cells(row) for row in rows])


def _policies(text: str) -> tuple[str, ...]:
    if text == "all":
        return POLICIES
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names or set(names) - set(POLICIES):
        raise typer.BadParameter(
            f"{text!r} is not 'all' or one or several of {', '.join(POLICIES)}", param_hint="--policy"
        )
    return names


def _maker(name: str) -> MakePolicy:
    if name == "belady":
        return Belady
    return lambda tier, _: make(name, tier, tier.clock)


def _capacities(
    accesses: Accesses, fractions: Sequence[str], blocks: Sequence[int], sizes: Sequence[str], block_bytes: str
) -> list[int]:
    """Return capacities in blocks, rising, none twice."""
    if not (fractions or blocks or sizes):
        fractions = _FRACTIONS
    found = {math.floor(_fraction(text) * accesses.num_blocks) for text in fractions}
    if min(blocks, default=0) < 0:
        raise typer.BadParameter("a capacity is at least 0", param_hint="--capacity-blocks")
    found.update(blocks)
    if sizes:
        one_bytes = _size(block_bytes, "--block-bytes") if block_bytes else 0
        if one_bytes < 1:
            raise typer.BadParameter("--capacity-bytes needs the bytes of a block", param_hint="--block-bytes")
        found.update(_size(text, "--capacity-bytes") // one_bytes for text in sizes)
    return sorted(found)


def _fraction(text: str) -> Fraction:
    """Exactly what was written: 0.29 of 100 blocks are 29, which binary fractions miss."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(-1)
    if not 0 <= value <= 1:
        raise typer.BadParameter(f"{text!r} is not a share between 0 and 1", param_hint="--capacity-fraction")
    return value


def _size(text: str, option: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _row(trace: Path, name: str, hints: str, accesses: Accesses, replayed: Replayed, infinite: float) -> Row:
    return Row(
        trace=trace.name,
        policy=name,
        hints=hints,
        token_hit_ratio=replayed.token_hit_ratio,
        infinite_token_hit_ratio=infinite,
        capacity_blocks=replayed.capacity_blocks,
        capacity_fraction=replayed.capacity_blocks / accesses.num_blocks,
        unique_blocks=accesses.num_blocks,
        block_tokens=accesses.block_tokens,
        requests=replayed.num_requests,
        block_accesses=replayed.num_accesses,
        input_tokens=replayed.input_tokens,
        hit_tokens=replayed.hit_tokens,
        inserted_blocks=replayed.inserted_blocks,
        evicted_blocks=replayed.evicted_blocks,
    )


def _cells(row: Row) -> list[str]:
    of_infinite = row.token_hit_ratio / row.infinite_token_hit_ratio if row.infinite_token_hit_ratio else 0.0
    return [
        row.policy,
        str(row.capacity_blocks),
        f"{100 * row.capacity_fraction:.1f}%",
        f"{100 * row.token_hit_ratio:.1f}%",
        f"{100 * of_infinite:.1f}%",
        str(row.inserted_blocks),
        str(row.evicted_blocks),
    ]
