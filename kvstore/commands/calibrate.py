"""`kvstore calibrate`: measure what prefilling and loading take on this machine, and keep it for engine and planner."""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvstore.commands.calibrate_plot import plot_times
from kvstore.commands.common import ConfigOption, JsonOption, check_engine_is_installed, print_json, print_table
from kvstore.commands.replay_plot import check_plot
from kvstore.commands.scratch_daemon import scratch_daemon
from kvstore.core.errors import KVStoreError
from kvstore.core.outcome import TierKind
from kvstore.core.units import approximate_size, parse_size
from kvstore.settings import load
from policies import saved_profile
from policies.break_even import MAX_BLOCKS, break_even_tokens
from policies.cost import CostModel, LoadCost, StepWork
from policies.saved_profile import SavedProfile, default_folder

EXAMPLE: Final = "Example: kvstore calibrate --config kvstore.toml --plot costs.png"
_SSD_BYTES: Final = 2 << 30
_SEGMENT_BYTES: Final = 64 << 20
# The new tokens behind a prefix, for the break-even length and the plot.
_NEW_TOKENS: Final = 64
_POINTS: Final = 60


class Step(msgspec.Struct, frozen=True):
    """One step: `new` tokens after `cached`, beside `decodes`."""

    new: int
    cached: int
    decodes: int
    seconds: float


class Load(msgspec.Struct, frozen=True):
    """`at_once` loads of `blocks` blocks each; `bytes` of all, until the last is in HBM."""

    tier: str
    blocks: int
    at_once: int
    bytes: int
    seconds: float


class _About(SavedProfile, frozen=True, kw_only=True):
    max_tokens: int


class _Part(msgspec.Struct, frozen=True):
    name: str
    total: int


class _Line(msgspec.Struct, frozen=True):
    about: _About | None = None
    part: _Part | None = None
    step: Step | None = None
    load: Load | None = None


class CalibrationFailed(KVStoreError):
    """The measuring process ended early; the message has the end of what it said."""


def calibrate(
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="A Hugging Face folder; default: SmolLM2-135M.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    chunk_tokens: Annotated[int, typer.Option(min=16, help="Prefill tokens per step, as the engine's.")] = 256,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens per block, as the engine's.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=512, help="The longest context to time.")] = 32_768,
    ram_size: Annotated[
        str, typer.Option("--ram-size", metavar="SIZE", help="RAM tier of the daemon that loads go through.")
    ] = "1GiB",
    loads: Annotated[bool, typer.Option("--loads/--no-loads", help="Time the tiers, not only prefill.")] = True,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Also draw both times over prefix length into a PNG.")
    ] = None,
    profile_dir: Annotated[
        Path | None, typer.Option("--profile-dir", metavar="DIR", help="Where the profile goes.")
    ] = None,
    json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Measure prefill and every configured tier with this model, and keep the costs for the engine.

    A daemon of its own is started for it, with the tiers of the configuration, in folders and below a prefix of the
    bucket that are removed afterwards. Takes a few minutes and 3 GB of memory and disk; other load disturbs it.
    """
    check_engine_is_installed("calibrating")
    if plot is not None:
        check_plot(plot)
    try:
        ram_bytes = parse_size(ram_size)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--ram-size") from None
    # Before minutes of measuring, since there may be none.
    folder = profile_dir or default_folder()
    began = time.monotonic()
    arguments = ["--device", device, "--dtype", dtype, "--max-tokens", str(max_tokens)]
    arguments += ["--chunk-tokens", str(chunk_tokens), "--block-tokens", str(block_tokens)]
    if model is not None:
        arguments += ["--model", str(model)]
    loaded = load(config)
    with contextlib.ExitStack() as stack:
        if loads:
            daemon = stack.enter_context(scratch_daemon(loaded.config, config, ram_bytes, _SSD_BYTES, _SEGMENT_BYTES))
            arguments += ["--run-dir", str(daemon.run_dir)]
        about, steps, timed = _measure(arguments)
    costs = learned(about.chunk_tokens, steps, timed)
    found = _profile(about, costs)
    path = saved_profile.save(folder, found)
    even = _break_even(found)
    if plot is not None:
        _plot(plot, found, even, about.max_tokens)
        typer.echo(f"the plot is {plot}", err=json)
    if json:
        print_json(_as_json(found, costs, steps, timed, even, path, time.monotonic() - began))
        return
    _show(found, costs, steps, timed, even)
    typer.echo(f"the profile is {path}; {time.monotonic() - began:.0f} s")


def learned(chunk_tokens: int, steps: Sequence[Step], loads: Sequence[Load]) -> CostModel:
    """Return what the engine's own cost model makes of the measurements."""
    costs = CostModel(chunk_tokens, lambda: 0.0)
    for step in steps:
        prefills = [(step.new, step.cached)] if step.new else []
        costs.observe_step(StepWork.of(prefills, step.decodes), step.seconds)
    for each in loads:
        costs.observe_load(TierKind[each.tier.upper()], each.bytes, each.seconds)
    return costs


def _profile(about: SavedProfile, costs: CostModel) -> SavedProfile:
    plain = SavedProfile(**{name: getattr(about, name) for name in SavedProfile.__struct_fields__})
    return plain.with_costs(costs.worth_saving(), time.time(), "calibrate")


def _measure(arguments: list[str]) -> tuple[_About, list[Step], list[Load]]:
    about: _About | None = None
    steps: list[Step] = []
    loads: list[Load] = []
    columns = TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading the model", total=None)
        for line in _lines(arguments):
            if line.about is not None:
                about = line.about
            if line.part is not None:
                progress.update(task, completed=progress.tasks[0].total or 0)
                task = _next_part(progress, task, line.part)
            if line.step is not None:
                steps.append(line.step)
            if line.load is not None:
                loads.append(line.load)
            if line.step is not None or line.load is not None:
                progress.advance(task)
    if about is None or not steps:
        raise CalibrationFailed("nothing was measured")
    return about, steps, loads


def _next_part(progress: Progress, task: TaskID, part: _Part) -> TaskID:
    progress.remove_task(task)
    return progress.add_task(part.name, total=part.total)


def _lines(arguments: list[str]) -> Iterator[_Line]:
    """Run the measuring process and yield what it says. Raises CalibrationFailed where it fails."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.calibrate", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdout is not None
        try:
            for text in process.stdout:
                yield _decoded(text)
            code = process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if code:
            errors.seek(0)
            tail = errors.read().decode(errors="replace").strip().splitlines()[-8:]
            raise CalibrationFailed("the measuring process failed:\n" + "\n".join(tail))


def _decoded(text: bytes) -> _Line:
    try:
        return msgspec.json.decode(text, type=_Line)
    except msgspec.MsgspecError:
        raise CalibrationFailed(f"the measuring process said {text[:200]!r}") from None


def _loads_of(profile: SavedProfile) -> dict[TierKind, LoadCost]:
    return {tier: LoadCost(*figures) for tier, figures in profile.costs.loads.items()}


def _break_even(profile: SavedProfile) -> dict[str, int | None]:
    prefill = profile.prefill
    assert prefill is not None, "steps were measured"
    sizes = profile.block_tokens, profile.block_bytes
    return {
        tier.label: break_even_tokens(prefill, load, *sizes, _NEW_TOKENS) for tier, load in _loads_of(profile).items()
    }


def _plot(path: Path, profile: SavedProfile, even: dict[str, int | None], max_tokens: int) -> None:
    prefill = profile.prefill
    assert prefill is not None, "steps were measured"
    stride, last = profile.block_tokens, max(max_tokens, *(tokens or 0 for tokens in even.values()))
    tokens = sorted({max(1, round(last ** (i / _POINTS) / stride)) * stride for i in range(_POINTS + 1)})
    rest_s = [prefill.predict(_NEW_TOKENS, count) for count in tokens]
    loads_s = {
        tier.label: [
            load.predict(count // stride * profile.block_bytes) + last_s
            for count, last_s in zip(tokens, rest_s, strict=True)
        ]
        for tier, load in _loads_of(profile).items()
    }
    recompute_s = [prefill.predict(count + _NEW_TOKENS, 0) for count in tokens]
    title = f"{profile.model} on {profile.device}\ntime to first token, {_NEW_TOKENS} new tokens behind the prefix"
    plot_times(path, title, tokens, recompute_s, loads_s, even, MAX_BLOCKS * stride)


def _show(
    profile: SavedProfile,
    costs: CostModel,
    steps: Sequence[Step],
    loads: Sequence[Load],
    even: dict[str, int | None],
) -> None:
    """Print what was measured beside what the model makes of it, and how far that may be off."""
    rows = []
    for (new, cached, decodes), seconds in _grouped((s.new, s.cached, s.decodes, s.seconds) for s in steps):
        work = StepWork.of([(new, cached)] if new else [], decodes)
        model_s = costs.step(work)
        spread = f"{100 * costs.prefill_spread(new, cached):.0f}%" if new else ""
        rows.append([str(new), str(cached), str(decodes), f"{seconds:.4f}", f"{model_s:.4f}", spread])
    typer.echo(f"{profile.model} on {profile.device}, {profile.host}")
    print_table(["new tokens", "after", "decodes", "seconds", "model", "±"], rows)
    rows = []
    for (tier, blocks, at_once, num_bytes), seconds in _grouped(
        (each.tier, each.blocks, each.at_once, each.bytes, each.seconds) for each in loads
    ):
        kind = TierKind[tier.upper()]
        model_s, spread = costs.load({kind: num_bytes}), f"{100 * costs.load_spread(kind, num_bytes):.0f}%"
        rate = f"{approximate_size(num_bytes / seconds)}/s"
        rows.append([tier, str(blocks), str(at_once), f"{seconds:.4f}", f"{model_s:.4f}", spread, rate])
    if rows:
        print_table(["tier", "blocks", "at once", "seconds", "model", "±", "rate"], rows)
        print_table(
            ["tier", "latency ms", "bandwidth", "loads faster than computing from"],
            [
                _tier_row(tier, load, even[tier.label], profile.block_tokens)
                for tier, load in _loads_of(profile).items()
            ],
        )


def _tier_row(tier: TierKind, load: LoadCost, even: int | None, block_tokens: int) -> list[str]:
    rate = f"{approximate_size(1 / load.per_byte_s)}/s" if load.per_byte_s else ""
    # A longer prefix may still be: prefill grows with its square.
    pays = f"not up to {MAX_BLOCKS * block_tokens} tokens" if even is None else f"{even} tokens"
    return [tier.label, f"{1e3 * load.latency_s:.2f}", rate, pays]


def _grouped(rows: Any) -> list[tuple[Any, float]]:
    """Return each case once, with its median; the last column is the measurement."""
    cases = defaultdict(list)
    for *case, seconds in rows:
        cases[tuple(case)].append(seconds)
    return [(case, median(measured)) for case, measured in cases.items()]


def _as_json(
    profile: SavedProfile,
    costs: CostModel,
    steps: Sequence[Step],
    loads: Sequence[Load],
    even: dict[str, int | None],
    path: Path,
    seconds: float,
) -> dict[str, Any]:
    return {
        "profile": msgspec.to_builtins(profile),
        "profile_file": str(path),
        "tiers": {
            tier.label: {
                "latency_s": load.latency_s,
                "bytes_per_s": 1 / load.per_byte_s if load.per_byte_s else None,
                "break_even_tokens": even[tier.label],
                "spread_of_a_block": costs.load_spread(tier, profile.block_bytes),
            }
            for tier, load in _loads_of(profile).items()
        },
        "spread_of_a_chunk": costs.prefill_spread(profile.chunk_tokens, 0),
        "steps": msgspec.to_builtins(steps),
        "loads": msgspec.to_builtins(loads),
        "seconds": seconds,
    }
