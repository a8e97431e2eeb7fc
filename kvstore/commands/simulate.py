"""`kvstore simulate`: how long a trace's requests would wait on other GPUs and tiers, by way of using the cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvstore.commands.common import JsonOption, print_json, print_table
from kvstore.core.units import approximate_size, parse_duration, parse_size
from policies.profiles import GPUS, MODELS, machine
from policies.simulator.report import Report, report
from policies.simulator.run import Simulation
from policies.simulator.setting import STRATEGIES, Setting, Strategy, setting_of
from policies.trace import Trace, TraceRequest, read_trace

EXAMPLE: Final = "Example: kvstore simulate trace.jsonl --gpu H100 --gpus 4 --s3-bandwidth 3GB --s3-latency 40ms"
_COLUMNS: Final = ("strategy", "mean s", "p50 s", "p90 s", "p99 s", "GPU use", "computed", "from ram", "ssd", "s3")

_Value = TypeVar("_Value", int, float)


def simulate(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace in Mooncake's JSONL format.")],
    gpu: Annotated[str, typer.Option("--gpu", metavar="NAME", help=f"One of {', '.join(GPUS)}.")] = "H100",
    gpus: Annotated[int, typer.Option("--gpus", min=1, max=10_000, help="How many of them.")] = 4,
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help=f"One of {', '.join(MODELS)}.")
    ] = "Llama-3.1-8B",
    rate: Annotated[float, typer.Option("--rate", help="So many times as fast as in the trace.")] = 1.0,
    dram: Annotated[str, typer.Option("--dram", metavar="SIZE", help="DRAM for blocks, all GPUs together.")] = "134GB",
    ssd: Annotated[str, typer.Option("--ssd", metavar="SIZE", help="Room for blocks on NVMe.")] = "1.07TB",
    ssd_bandwidth: Annotated[str, typer.Option("--ssd-bandwidth", metavar="SIZE", help="Bytes per second.")] = "7GB",
    s3_bandwidth: Annotated[str, typer.Option("--s3-bandwidth", metavar="SIZE", help="Bytes per second.")] = "1GB",
    s3_latency: Annotated[str, typer.Option("--s3-latency", metavar="TIME", help="Until the first byte.")] = "100ms",
    strategy: Annotated[
        list[str] | None,
        typer.Option("--strategy", metavar="NAMES", help=f"One or several of {', '.join(STRATEGIES)}; default: all."),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option("--price", min=0.0, help="Seconds of waiting a GPU second is worth; default: as measured."),
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option("--block-tokens", min=1, help="Tokens per block; default: as the lengths tell.")
    ] = None,
    requests: Annotated[int | None, typer.Option("--requests", min=1, help="Only the first so many.")] = None,
    json: JsonOption = False,
) -> None:
    """Replay a trace against GPUs and tiers given by figures, and compare ways of using the cache.

    Nothing is loaded or computed: a discrete-event simulation of prefill, see docs/simulate.md.
    """
    if not 0 < rate < float("inf"):
        raise typer.BadParameter(f"{rate} is not above 0", param_hint="--rate")
    chosen = _strategies(strategy)
    read = read_trace(trace, block_tokens=block_tokens, max_requests=requests)
    figures = machine(gpu, model)
    setting = setting_of(
        figures,
        gpus,
        read.block_tokens,
        dram_bytes=_parsed(parse_size, dram, "--dram"),
        ssd_bytes=_parsed(parse_size, ssd, "--ssd"),
        ssd_bytes_per_s=_positive(parse_size, ssd_bandwidth, "--ssd-bandwidth"),
        s3_bytes_per_s=_positive(parse_size, s3_bandwidth, "--s3-bandwidth"),
        s3_latency_s=_parsed(parse_duration, s3_latency, "--s3-latency"),
        gpu_price=price,
    )
    reports = _run(read, rate, setting, chosen)
    if json:
        print_json(_as_json(reports, setting, read, rate))
    else:
        print_table(_COLUMNS, [_row(name, figures) for name, figures in reports.items()])


def _strategies(names: list[str] | None) -> list[Strategy]:
    wanted = [name.strip() for text in names or () for name in text.split(",")]
    for name in wanted:
        if name not in STRATEGIES:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(STRATEGIES)}", param_hint="--strategy")
    return [name for name in STRATEGIES if not wanted or name in wanted]


def _run(trace: Trace, rate: float, setting: Setting, strategies: list[Strategy]) -> dict[Strategy, Report]:
    faster = [
        TraceRequest(request.arrival_s / rate, request.prompt_tokens, request.output_tokens, request.hash_ids)
        for request in trace.requests
    ]
    columns = TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    reports: dict[Strategy, Report] = {}
    # On standard error, so that standard output stays what was asked for.
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for strategy in strategies:
            task = progress.add_task(strategy, total=len(faster))

            def show(done: int, task: Any = task) -> None:
                progress.update(task, completed=done)

            reports[strategy] = report(Simulation(setting, strategy).run(faster, show), setting)
    return reports


def _as_json(reports: dict[Strategy, Report], setting: Setting, trace: Trace, rate: float) -> dict[str, Any]:
    return {
        "requests": len(trace.requests),
        "rate": rate,
        "block_tokens": setting.block_tokens,
        "block_bytes": setting.block_bytes,
        "engines": setting.num_engines,
        "prefill": msgspec.to_builtins(setting.prefill),
        "tiers": {tier.label: msgspec.to_builtins(link) for tier, link in setting.links.items()},
        "strategies": {name: msgspec.to_builtins(figures) for name, figures in reports.items()},
    }


def _row(strategy: Strategy, figures: Report) -> list[str]:
    times_s = (figures.ttft_mean_s, figures.ttft_p50_s, figures.ttft_p90_s, figures.ttft_p99_s)
    return [
        strategy,
        *(f"{seconds:.3f}" for seconds in times_s),
        f"{100 * figures.gpu_use:.1f}%",
        str(figures.computed_tokens),
        *(approximate_size(num_bytes) for num_bytes in figures.loaded_bytes.values()),
    ]


def _parsed(parse: Callable[[str], _Value], text: str, option: str) -> _Value:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _positive(parse: Callable[[str], _Value], text: str, option: str) -> _Value:
    value = _parsed(parse, text, option)
    if value <= 0:
        raise typer.BadParameter(f"{text!r} is not above 0", param_hint=option)
    return value
