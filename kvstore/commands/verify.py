"""`kvstore verify`: check that everything on SSD and in S3 is whole, through the daemon where one runs."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, cast

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvstore.client import Client
from kvstore.commands.common import ConfigOption, JsonOption, RunDirOption, clean, print_json, print_table
from kvstore.config import Config
from kvstore.core.errors import ConfigError, KVStoreError, TierUnavailable
from kvstore.core.units import approximate_size
from kvstore.settings import load
from kvstore.wire import ScrubReport
from kvstore.worker.opening import WorkerSettings, open_tier
from kvstore.worker.scrubber import report_of
from tiers.scrub import BAD, Orders, ScrubbedTier, Tally, Verdict

EXAMPLE: Final = (
    "Exit codes: 0 all is whole, 1 something is not, 2 it could not be checked. Example: kvstore verify --repair"
)
_TIERS: Final[tuple[Literal["ssd"], Literal["s3"]]] = ("ssd", "s3")
_COLUMNS: Final = ("tier", "what", *(verdict.value for verdict in Verdict), "removed")
_EXIT_BAD, _EXIT_NOT_RUN = 1, 2
_LOOK_EVERY_S = 0.2
_DEADLINE_S = 5.0

Reports = Mapping[str, ScrubReport]
Show = Callable[[Reports], None]


@dataclass(frozen=True, slots=True)
class Order:
    tiers: list[str]
    repair: bool
    drop_wrong_key: bool


def verify(
    tier: Annotated[
        str, typer.Option("--tier", metavar="TIERS", help="ssd, s3, or both with a comma; default: all there are.")
    ] = "",
    repair: Annotated[bool, typer.Option("--repair", help="Delete what is damaged; it can be stored again.")] = False,
    drop_wrong_key: Annotated[
        bool, typer.Option("--drop-wrong-key", help="Also delete what is encrypted with a key that is not here.")
    ] = False,
    json: JsonOption = False,
    run_dir: RunDirOption = None,
    config: ConfigOption = None,
) -> None:
    """Check that all that lies on SSD and in S3 is whole.

    Every block and every session record is read and compared with what was stored.

    A running daemon does it beside its work, which comes first; without one the tiers are opened for it. What is not
    ours is told of and never deleted.
    """
    try:
        order = Order(_tiers(tier), repair, drop_wrong_key)
        with _progress(Console(stderr=True), json) as show:
            reports = _run(order, run_dir, config, show)
        _print(reports, json)
        states = {report.state for report in reports.values()}
        if states != {"done"}:
            typer.echo(f"kvstore: the verification is not complete ({', '.join(sorted(states))})", err=True)
            raise typer.Exit(_EXIT_NOT_RUN)
        raise typer.Exit(_EXIT_BAD if any(map(_is_bad, reports.values())) else 0)
    except KVStoreError as error:
        typer.echo(f"kvstore: {error}", err=True)
        raise typer.Exit(_EXIT_NOT_RUN) from None


def _tiers(text: str) -> list[str]:
    tiers = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if wrong := [name for name in tiers if name not in _TIERS]:
        raise ConfigError(f"--tier: {clean(wrong[0])!r} is not one of {', '.join(_TIERS)}")
    return tiers


def _run(order: Order, run_dir: Path | None, config: Path | None, show: Show) -> Reports:
    folder = run_dir or Path(load(config).config.daemon.run_dir)
    with contextlib.closing(Client(folder, name="console", deadline_s=_DEADLINE_S)) as client:
        try:
            client.ping()
        except TierUnavailable:
            return _on_our_own(order, load(config, run_dir=run_dir).config, show)
        return _through_daemon(order, client, show)


# ---------------------------------------------------------------- the two ways


def _through_daemon(order: Order, client: Client, show: Show) -> Reports:
    found = client.verify(order.tiers, repair=order.repair, drop_wrong_key=order.drop_wrong_key)
    try:
        while found.is_running:
            show(found.tiers)
            time.sleep(_LOOK_EVERY_S)
            found = client.verify_status()
    except KeyboardInterrupt:
        client.verify_cancel()
        raise
    show(found.tiers)
    return found.tiers


def _on_our_own(order: Order, config: Config, show: Show) -> Reports:
    """Open the tiers as a worker would. Whoever holds the SSD's folder already is named in the ConfigError."""
    # Opening a folder that is not there would make it.
    there = {"ssd": config.ssd.enabled and Path(config.ssd.path).is_dir(), "s3": config.s3.enabled}
    if absent := [name for name in order.tiers if not there[name]]:
        raise ConfigError(f"there is no tier {absent[0]}: it is switched off, or nothing was ever stored there")
    if not any(there.values()):
        raise ConfigError(
            f"there is nothing to verify: no daemon runs, ssd.path {config.ssd.path} is not there, and no bucket is "
            "configured; name the daemon's folder with --run-dir, or its configuration with --config"
        )
    reports: dict[str, ScrubReport] = {}
    for name in [name for name in _TIERS if there[name] and name in (order.tiers or _TIERS)]:
        tier, *_ = open_tier(_settings(name, config))
        try:
            for report in _walk(cast(ScrubbedTier, tier), Orders(order.repair, order.drop_wrong_key), config):
                reports[name] = report
                show(reports)
        finally:
            tier.close()
    return reports


def _walk(tier: ScrubbedTier, orders: Orders, config: Config) -> Iterator[ScrubReport]:
    tally, started = Tally(), time.monotonic()
    for step in tier.scrub(orders, config.s3.threads):
        tally.add(step)
        yield report_of(tally, time.monotonic() - started)
    yield msgspec.structs.replace(report_of(tally, time.monotonic() - started), state="done")


def _settings(tier: Literal["ssd", "s3"], config: Config) -> WorkerSettings:
    return WorkerSettings(
        tier=tier,
        socket="",
        parent=0,
        log_level=config.daemon.log_level,
        region_path="",
        epoch=0,
        ssd=config.ssd if tier == "ssd" else None,
        s3=config.s3 if tier == "s3" else None,
        encryption=config.encryption,
    )


# ---------------------------------------------------------------- what people see


@contextlib.contextmanager
def _progress(console: Console, json: bool) -> Iterator[Show]:
    """Draw one bar per tier on a terminal, nothing elsewhere."""
    bars: dict[str, TaskID] = {}
    drawn = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[seen]}"), TimeElapsedColumn(),
        console=console, transient=True, disable=json or not console.is_terminal,
    )  # fmt: skip

    def show(reports: Reports) -> None:
        for name, report in reports.items():
            if name not in bars:
                bars[name] = drawn.add_task(name, total=None, seen="")
            seen = f"{report.num_seen} things, {approximate_size(report.num_bytes)}"
            drawn.update(bars[name], completed=report.num_seen, total=report.total or None, seen=seen)

    with drawn:
        yield show


def _print(reports: Reports, json: bool) -> None:
    if json:
        print_json({"is_clean": not any(map(_is_bad, reports.values())), "tiers": dict(reports)})
        return
    rows = [
        [name, area, *(str(of_area.get(verdict.value, 0)) for verdict in Verdict), _removed(report, area)]
        for name, report in reports.items()
        for area, of_area in (report.counts or {"blocks": {}}).items()
    ]
    print_table(_COLUMNS, rows)
    for name, report in reports.items():
        for found in report.examples:
            removed = ", removed" if found.is_removed else ""
            why = f" ({found.why})" if found.why else ""
            typer.echo(clean(f"{name}: {found.verdict} {found.area[:-1]} {found.name}{why}{removed}"))


def _removed(report: ScrubReport, area: str) -> str:
    return str(report.removed.get(area, 0))


def _is_bad(report: ScrubReport) -> bool:
    bad = {*(verdict.value for verdict in BAD), Verdict.WRONG_KEY.value}
    return any(of_area.get(verdict) for of_area in report.counts.values() for verdict in bad)
