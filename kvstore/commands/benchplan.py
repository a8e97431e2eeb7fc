"""`kvstore bench plan`: what the planner decides, beside every fixed plan, each really run."""

import signal
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer

from kvstore.bench.plan import figures
from kvstore.bench.plan.cases import LINKS, PREFIXES, SCENARIOS, LinkSetting, Scenario
from kvstore.bench.plan.rig import Scale
from kvstore.bench.plan.run import PlanSettings, run
from kvstore.commands.common import JsonOption, print_json, print_table

EXAMPLE: Final = "Example: kvstore bench plan --setting 20:30 --prefix 1024 --scenario idle --out results"
_ALL_LINKS: Final = ",".join(f"{link.round_trip_ms:g}:{link.mb_per_s:g}" for link in LINKS)
_ALL_PREFIXES: Final = ",".join(str(tokens) for tokens in PREFIXES)
_SCALE: Final = Scale()
_SHM: Final = Path("/dev/shm")


def plan(
    setting: Annotated[
        str, typer.Option("--setting", metavar="MS:MBPS,…", help="Links to S3: round trip in ms, MB/s.")
    ] = _ALL_LINKS,
    prefix: Annotated[str, typer.Option("--prefix", metavar="TOKENS,…", help="Cached prefixes.")] = _ALL_PREFIXES,
    scenario: Annotated[
        str, typer.Option("--scenario", metavar="NAMES", help="Which of: " + ", ".join(SCENARIOS) + ".")
    ] = ",".join(SCENARIOS),
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Runs of a plan that came close to the best.")] = 3,
    max_rounds: Annotated[
        int, typer.Option("--max-rounds", min=1, help="Up to so many where the figures scatter.")
    ] = 5,
    block_tokens: Annotated[int, typer.Option("--block-tokens", min=2, help="Tokens per block.")] = _SCALE.block_tokens,
    chunk_tokens: Annotated[
        int, typer.Option("--chunk-tokens", min=1, help="The most prefill tokens per step; fixed cuts lie there.")
    ] = _SCALE.chunk_tokens,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="A Hugging Face folder; default: SmolLM2-135M.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Keep a file per case there; what is there is not run again."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare the planner with loading all, recomputing all, and every fixed cut, over links of several speeds.

    Runs the reference engine on a real model, a daemon and a real S3 server behind a link that delays and paces. All of
    it takes about half an hour and wants the machine for itself; with --out it can be run in pieces.
    """
    # What was started is ended, too, where somebody ends us.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    links = _links(setting)
    prefixes = _prefixes(prefix, block_tokens)
    scenarios = _scenarios(scenario)
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=_SHM) as shm_dir,
    ):
        scale = Scale(
            model_arguments=("--model", str(model)) if model is not None else (),
            block_tokens=block_tokens,
            chunk_tokens=chunk_tokens,
        )
        settings = PlanSettings(
            Path(folder),
            Path(shm_dir),
            links,
            prefixes,
            scenarios,
            rounds=rounds,
            max_rounds=max(rounds, max_rounds),
            out=out,
            scale=scale,
        )
        report = run(settings, lambda text: typer.echo(text, err=True))
    if json:
        print_json(report)
        return
    print_table(figures.COLUMNS, figures.rows(report))
    for note in figures.notes(report):
        typer.echo(note)


def _links(text: str) -> tuple[LinkSetting, ...]:
    links = []
    for one in _parts(text):
        try:
            round_trip_ms, mb_per_s = (float(part) for part in one.split(":"))
        except ValueError:
            raise _bad("--setting", f"{one!r} is not like 20:30, milliseconds and MB/s") from None
        if not 0 <= round_trip_ms < 10_000 or not 0.1 <= mb_per_s < 1e6:
            raise _bad("--setting", f"{one!r} is no link that could be measured")
        links.append(LinkSetting(round_trip_ms, mb_per_s))
    return tuple(links)


def _prefixes(text: str, block_tokens: int) -> tuple[int, ...]:
    try:
        prefixes = tuple(int(one) for one in _parts(text))
    except ValueError:
        raise _bad("--prefix", f"{text!r} is no list of token counts") from None
    if any(tokens < 2 * block_tokens or tokens % (2 * block_tokens) for tokens in prefixes):
        raise _bad("--prefix", f"a prefix is a whole number of pairs of blocks, {2 * block_tokens} tokens each")
    return prefixes


def _scenarios(text: str) -> tuple[Scenario, ...]:
    names = _parts(text)
    if unknown := set(names) - set(SCENARIOS):
        raise _bad("--scenario", f"{', '.join(sorted(unknown))}: not one of {', '.join(SCENARIOS)}")
    return tuple(one for one in SCENARIOS if one in names)


def _parts(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _bad(option: str, message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=option)
