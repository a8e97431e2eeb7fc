"""What the demo measured, as a table for people and as demo-report.json for programs."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvstore.core.outcome import TierKind
from kvstore.version import VERSION


class Turn(msgspec.Struct, frozen=True):
    """One turn of one session. `cached_tokens` is what a perfect cache would serve, as the demo counts it."""

    session_id: str
    prompt_tokens: int
    cached_tokens: int
    served_tokens: dict[str, int]
    recomputed_tokens: int
    ttft_s: float
    tokens_equal: bool
    plan: str


class Row(msgspec.Struct, frozen=True):
    """One interruption and the turns of the sessions that were resumed after it."""

    name: str
    title: str
    turns: list[Turn]
    recompute_s: list[float]


def as_json(rows: Sequence[Row], extra: Sequence[Row], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the report; the form of `interruptions` is stable."""
    return {
        "version": VERSION,
        "interruptions": [_summary(row) for row in rows],
        "also": [_summary(row) for row in extra],
        "settings": settings | {"hardware": _hardware(), "python": platform.python_version()},
    }


def write(report: dict[str, Any], path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def show(rows: Sequence[Row], console: Console) -> None:
    """Print one line per interruption: medians over its sessions, sums of tokens."""
    title = "sessions resumed after each interruption"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("taken away", min_width=14)
    for column in ("turns", "prompt", "served from", "new", "TTFT", "cold", "ratio", "equal"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        sums = _summary(row)
        served = [f"{name} {tokens:,}" for name, tokens in sums["served_tokens"].items() if tokens]
        ttft_s, recompute_s = sums["ttft_s"], sums["ttft_recompute_s"]
        table.add_row(
            row.title,
            str(len(row.turns)),
            f"{sums['prompt_tokens']:,}",
            "\n".join(served),
            f"{sums['recomputed_tokens']:,}",
            f"{ttft_s:.3f}",
            "" if recompute_s is None else f"{recompute_s:.3f}",
            "" if recompute_s is None else f"1/{recompute_s / ttft_s:.1f}",
            "[green]yes[/]" if sums["tokens_equal"] else "[bold red]NO[/]",
        )
    console.print(table)
    console.print(
        "prompt, served from, new (recomputed): tokens of all turns\n"
        "TTFT: seconds from arrival to the first token, median; cold: the same with everything recomputed\n"
        "equal: every token is that of a run that was never interrupted",
        highlight=False,
    )


def describe(row: Row) -> str:
    """One line of text, shown as soon as the row is complete."""
    sums = _summary(row)
    served = ", ".join(f"{name} {tokens:,}" for name, tokens in sums["served_tokens"].items() if tokens)
    recompute = "" if not row.recompute_s else f", recomputed in {sums['ttft_recompute_s']:.3f} s"
    equal = "tokens equal" if sums["tokens_equal"] else "TOKENS DIFFER"
    return f"  {row.title}: {len(row.turns)} turns, {served}, TTFT {sums['ttft_s']:.3f} s{recompute}, {equal}"


def _summary(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "sessions": len(row.turns),
        "tokens_equal": all(turn.tokens_equal for turn in row.turns),
        "cached_prompt_tokens": sum(turn.cached_tokens for turn in row.turns),
        "served_tokens": {tier.label: sum(turn.served_tokens[tier.label] for turn in row.turns) for tier in TierKind},
        "recomputed_tokens": sum(turn.recomputed_tokens for turn in row.turns),
        "prompt_tokens": sum(turn.prompt_tokens for turn in row.turns),
        "ttft_s": median(turn.ttft_s for turn in row.turns),
        "ttft_recompute_s": median(row.recompute_s) if row.recompute_s else None,
        "runs": len(row.turns),
        "recompute_runs": len(row.recompute_s),
        "plans": sorted({turn.plan for turn in row.turns}),
    }


def _hardware() -> str:
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{os.cpu_count()} x {model}"
