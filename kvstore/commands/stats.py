"""`kvstore stats`: what the tiers hold, what they served, and why they missed."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvstore.commands.common import (
    ConfigOption,
    JsonOption,
    RunDirOption,
    connect,
    drawn_table,
    plain_table,
    print_json,
)
from kvstore.core.errors import TierUnavailable
from kvstore.core.outcome import TierKind
from kvstore.core.units import approximate_size, format_duration

EXAMPLE: Final = "Example: kvstore stats --json | jq .tiers.ram.used_bytes"

Snapshot = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class View:
    """A snapshot as people read it: one table of tiers, and lines of text below it."""

    columns: tuple[str, ...]
    rows: list[list[str]]
    lines: list[str]

    def plain(self) -> str:
        return plain_table(self.columns, self.rows) + "".join(f"{line}\n" for line in self.lines)

    def drawn(self) -> Group:
        return Group(drawn_table(self.columns, self.rows), *(Text(line) for line in self.lines))


def stats(
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until Ctrl-C; with --json one line a time.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 2.0,
    run_dir: RunDirOption = None,
    config: ConfigOption = None,
) -> None:
    """Show what the tiers hold and served, and why they missed.

    The hit ratio is the share of all prompt tokens whose KV came from that tier. Of the missed, "never_stored" is new
    text, and "partial_block" the rest of a prompt that fills no block: both are as they should be. "evicted", "lost",
    "corrupt", "busy", "timed_out" and "plan" are losses; docs/stats.md says what each means.
    """
    client = connect(run_dir, config)
    console = Console()
    try:
        if not watch:
            _show(client.stats(), json, console)
            return
        with Live(console=console, auto_refresh=False) as live:
            while True:
                try:
                    _refresh(client.stats(), json, console, live)
                except TierUnavailable as error:
                    # A daemon that restarts is no reason to stop watching.
                    typer.echo(f"kvstore: {error}; trying again", err=True)
                time.sleep(interval)
    finally:
        client.close()


def view(snapshot: Snapshot) -> View:
    """Return the snapshot's tables; whatever it lacks is left out."""
    requests = _section(snapshot, "requests")
    columns = (
        "tier",
        "state",
        "blocks",
        "used",
        "capacity",
        "hit ratio",
        "hit tokens",
        "in",
        "out",
        "evicted",
        "queue",
    )
    tiers = _section(snapshot, "tiers")
    rows = [_tier_row(kind.label, tiers[kind.label], requests) for kind in TierKind if kind.label in tiers]
    lines = [
        *(f"{tier}: {values['reason']}" for tier, values in tiers.items() if values.get("reason")),
        *_daemon_lines(_section(snapshot, "daemon")),
        *_request_lines(requests),
        *_session_lines(_section(snapshot, "sessions")),
        *_keeping_lines(_section(snapshot, "pins"), _section(snapshot, "prefetch")),
        *_store_lines(_section(snapshot, "store")),
        *_bucket_lines(_section(_section(tiers, "s3"), "bucket")),
        f"errors: {_counts(_section(snapshot, 'errors'))}",
    ]
    return View(columns, rows, lines)


def _tier_row(tier: str, values: Snapshot, requests: Snapshot) -> list[str]:
    hits = _section(requests, "hit_tokens").get(tier, values.get("hit_tokens", 0))
    prompt = requests.get("prompt_tokens", 0)
    capacity = values.get("capacity_bytes")
    return [
        tier,
        str(values.get("state", "")),
        _number(values.get("blocks")),
        _size(values.get("used_bytes")),
        _size(capacity),
        f"{100 * hits / prompt:.1f}%" if prompt else "",
        _number(hits),
        _size(values.get("bytes_in")),
        _size(values.get("bytes_out")),
        _number(values.get("evicted_blocks")),
        _number(values.get("queue")),
    ]


def _daemon_lines(daemon: Snapshot) -> list[str]:
    if not daemon:
        return []
    uptime = format_duration(float(round(daemon.get("uptime_s", 0))))
    return [f"daemon: version {daemon.get('version', '?')}, up {uptime}, engines attached {daemon.get('engines', 0)}"]


def _request_lines(requests: Snapshot) -> list[str]:
    totals = [f"{requests.get('count', 0)}", f"prompt tokens {requests.get('prompt_tokens', 0)}"]
    totals.append(f"recomputed {requests.get('recomputed_tokens', 0)}")
    lines = [f"requests: {', '.join(totals)}"]
    missed = _section(requests, "miss_tokens")
    if missed:
        lines.append(f"missed tokens: {_counts(missed)}")
    plans = _section(requests, "plans")
    if plans:
        lines.append(f"plans: {_counts(plans)}; prefill saved {requests.get('saved_prefill_s', 0):.3g} s")
    decisions = _section(requests, "decisions")
    if _section(decisions, "chosen"):
        lost = f"lost to wrong ones {decisions.get('lost_s', 0):.3g} s in {decisions.get('judged', 0)} that were judged"
        lines.append(f"decisions: {_counts(_section(decisions, 'chosen'))}; {lost}")
    ttft = _section(requests, "ttft_s")
    if ttft.get("recent_p50") is not None:
        lines.append(f"recent time to first token: p50 {ttft['recent_p50']:.3g} s, p99 {ttft['recent_p99']:.3g} s")
    return lines


def _session_lines(sessions: Snapshot) -> list[str]:
    if not sessions:
        return []
    durable = _counts(_section(sessions, "durable"))
    return [f"sessions: {sessions.get('count', 0)}, pinned {sessions.get('pinned', 0)}, durable: {durable}"]


def _keeping_lines(pins: Snapshot, prefetch: Snapshot) -> list[str]:
    """What was asked for by pins, and what became of blocks that were brought into RAM before their session's turn."""
    lines = []
    if pins.get("owners") or pins.get("refused"):
        held = (
            f"{approximate_size(pins.get('ram_bytes', 0))} in ram, {approximate_size(pins.get('ssd_bytes', 0))} on ssd"
        )
        lines.append(f"pins: {held}, owners {pins.get('owners', 0)}, refused {pins.get('refused', 0)}")
    blocks = _counts({name.removesuffix("_blocks"): prefetch[name] for name in prefetch if name.endswith("_blocks")})
    if blocks != "none":
        lines.append(f"prefetched blocks: {blocks}; sessions in time: {prefetch.get('ready_sessions', 0)}")
    return lines


def _store_lines(store: Snapshot) -> list[str]:
    if not store:
        return []
    refused = _counts(_section(store, "refused"))
    return [f"stored blocks: {store.get('blocks_stored', 0)}, refused: {refused}"]


def _bucket_lines(bucket: Snapshot) -> list[str]:
    if not bucket.get("has_lease"):
        return []
    there = "not listed yet"
    if bucket.get("blocks") is not None:
        there = f"{bucket['blocks']} blocks, {approximate_size(bucket.get('bytes', 0))}"
    parts = [there, f"sessions {bucket.get('sessions', 0)}", f"deleted: {_counts(_section(bucket, 'deleted'))}"]
    if bucket.get("waits"):
        parts.append(f"waits: {bucket['waits']}")
    return [f"bucket, kept in order by this daemon: {', '.join(parts)}"]


def _show(snapshot: Snapshot, json: bool, console: Console) -> None:
    if json:
        print_json(snapshot)
    elif console.is_terminal:
        console.print(view(snapshot).drawn())
    else:
        typer.echo(view(snapshot).plain(), nl=False)


def _refresh(snapshot: Snapshot, json: bool, console: Console, live: Live) -> None:
    if json:
        typer.echo(msgspec.json.encode(snapshot))
    elif console.is_terminal:
        live.update(view(snapshot).drawn(), refresh=True)
    else:
        typer.echo(view(snapshot).plain())


def _section(snapshot: Snapshot, key: str) -> Snapshot:
    value = snapshot.get(key)
    return value if isinstance(value, Mapping) else {}


def _counts(values: Snapshot) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value) or "none"


def _number(value: Any) -> str:
    return "" if value is None else str(value)


def _size(value: Any) -> str:
    return "" if value is None else approximate_size(value)
