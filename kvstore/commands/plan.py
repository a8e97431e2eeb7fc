"""`kvstore plan`: what the planner would do with a cached prefix, and how long each way would take. Runs nothing."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer

from kvstore.commands.common import JsonOption, print_json, print_table
from kvstore.commands.known_costs import Known, known
from kvstore.core.outcome import TierKind
from kvstore.core.units import approximate_size, parse_duration, parse_size
from policies.break_even import MAX_BLOCKS, break_even_tokens
from policies.cost import LoadCost
from policies.interval import Comparison, Interval, Question, compare

EXAMPLE: Final = "Example: kvstore plan --prefix 32000 --new 200 --tier s3 --profile h100/llama-3.1-8b"
_COLUMNS: Final = ("plan", "loaded", "computed meanwhile", "GPU s", "seconds", "of recompute")
_MAX_TOKENS: Final = 4_000_000
_TIERS: Final = {tier.label: tier for tier in (TierKind.RAM, TierKind.SSD, TierKind.S3)}

_Value = TypeVar("_Value", int, float)


def plan(
    tier: Annotated[
        list[str],
        typer.Option(
            "--tier",
            metavar="TIER[:TOKENS]",
            help="Where the cached prefix lies: ram, ssd or s3; repeatable, from its head on, such as ram:16000.",
        ),
    ],
    prefix: Annotated[
        int, typer.Option("--prefix", min=0, max=_MAX_TOKENS, help="Cached tokens; not with --tier TIER:TOKENS.")
    ] = 0,
    new: Annotated[int, typer.Option("--new", min=1, max=_MAX_TOKENS, help="Tokens of the prompt behind them.")] = 200,
    profile: Annotated[
        str,
        typer.Option("--profile", metavar="NAME", help="GPU/MODEL, a file, or part of a saved name; default: newest."),
    ] = "",
    profile_dir: Annotated[
        Path | None, typer.Option("--profile-dir", metavar="DIR", help="Where profiles are kept.")
    ] = None,
    latency: Annotated[
        list[str] | None,
        typer.Option("--latency", metavar="TIER:TIME", help="Instead of the profile's, as s3:40ms; repeatable."),
    ] = None,
    bandwidth: Annotated[
        list[str] | None,
        typer.Option(
            "--bandwidth", metavar="TIER:SIZE", help="Bytes a second instead of the profile's, as s3:3GB; repeatable."
        ),
    ] = None,
    queue: Annotated[
        list[str] | None,
        typer.Option(
            "--queue", metavar="TIER:TIME", help="Others' work in front of a tier or of gpu, as gpu:0.5s; repeatable."
        ),
    ] = None,
    price: Annotated[float, typer.Option("--price", min=0.0, help="Seconds of waiting a GPU second is worth.")] = 0.0,
    block_tokens: Annotated[
        int, typer.Option("--block-tokens", min=0, help="Tokens per block; 0: as in the profile, or 16.")
    ] = 0,
    json: JsonOption = False,
) -> None:
    """Compare the ways to a prompt's first token, without running anything.

    The figures are those that `kvstore calibrate` or an engine has measured on this machine, or those of a GPU and a
    model by name (h100/llama-3.1-8b); see docs/cost.md.
    """
    costs = known(profile, profile_dir)
    stride = block_tokens or costs.block_tokens
    parts = _parts(tier, prefix)
    queues_s = _by_tier(queue, parse_duration, "--queue", ("gpu", *_TIERS))
    loads = _loads(costs, parts, queues_s, latency, bandwidth)
    cached_tokens = sum(tokens for _, tokens in parts)
    # Partial blocks are never stored: what is left of each part is computed with the new tokens.
    tiers = list(chain.from_iterable(repeat(kind, tokens // stride) for kind, tokens in parts))
    block_bytes = round(costs.bytes_per_token * stride)
    question = Question(cached_tokens + new, stride, block_bytes, 0, tiers, queues_s.get("gpu", 0.0))
    found = compare(question, costs.prefill, loads, price)
    even = {
        kind.label: break_even_tokens(costs.prefill, load, stride, block_bytes, new) for kind, load in loads.items()
    }
    if json:
        print_json(_as_json(costs, question, found, loads, even))
        return
    typer.echo(f"{costs.name}: {cached_tokens} cached and {new} new tokens, {_where(parts)}")
    if not tiers:
        typer.echo(f"no whole block of {stride} tokens is cached, and less is never stored: all is computed")
    print_table(_COLUMNS, [_row(name, each, question, found) for name, each in _plans(found).items()])
    typer.echo(f"chosen: {_name_of(found)}, {found.best.seconds:.3f} s")
    for kind, load in loads.items():
        typer.echo(_even(kind.label, load, even[kind.label], MAX_BLOCKS * stride))


def _parts(texts: list[str], prefix: int) -> list[tuple[TierKind, int]]:
    """Return (tier, tokens) from the head on."""
    parts = []
    for text in texts:
        name, _, count = text.partition(":")
        if name not in _TIERS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(_TIERS)}", param_hint="--tier")
        if count and not (count.isdecimal() and 0 < int(count) <= _MAX_TOKENS):
            raise typer.BadParameter(f"{count!r} is no number of tokens", param_hint="--tier")
        parts.append((_TIERS[name], int(count or 0)))
    open_ended = [i for i, (_, count) in enumerate(parts) if not count]
    if len(parts) == 1 and open_ended and prefix:
        return [(parts[0][0], prefix)]
    if open_ended:
        raise typer.BadParameter("say how many tokens lie there: --tier ram:16000, or --prefix", param_hint="--tier")
    if prefix and prefix != sum(count for _, count in parts):
        raise typer.BadParameter("it is not the sum of the tiers' tokens; leave it out", param_hint="--prefix")
    return parts


def _loads(
    costs: Known,
    parts: list[tuple[TierKind, int]],
    queues_s: Mapping[str, float],
    latency: list[str] | None,
    bandwidth: list[str] | None,
) -> dict[TierKind, LoadCost]:
    latencies_s = _by_tier(latency, parse_duration, "--latency", tuple(_TIERS))
    rates = _by_tier(bandwidth, parse_size, "--bandwidth", tuple(_TIERS))
    named = {kind.label for kind, _ in parts}
    for option, values in (("--latency", latencies_s), ("--bandwidth", rates), ("--queue", queues_s)):
        for name in sorted(values.keys() - named - {"gpu"}):
            raise typer.BadParameter(
                f"nothing lies in {name}: --tier names {', '.join(sorted(named))}", param_hint=option
            )
    loads = {}
    for kind in sorted({kind for kind, _ in parts}):
        load = costs.loads.get(kind)
        if load is None and not (kind.label in latencies_s and kind.label in rates):
            raise typer.BadParameter(
                f"the profile of {costs.name} has no figures of {kind.label}: run 'kvstore calibrate', or give "
                f"--latency {kind.label}:TIME and --bandwidth {kind.label}:SIZE",
                param_hint="--tier",
            )
        load = load or LoadCost(0.0, 0.0)
        if kind.label in latencies_s:
            load = replace(load, latency_s=latencies_s[kind.label])
        if kind.label in rates:
            if rates[kind.label] <= 0:
                raise typer.BadParameter("a bandwidth is above 0", param_hint="--bandwidth")
            load = replace(load, per_byte_s=1 / rates[kind.label])
        loads[kind] = replace(load, queue_s=queues_s.get(kind.label, 0.0))
    return loads


def _by_tier(texts: list[str] | None, parse: Any, option: str, names: tuple[str, ...]) -> dict[str, float]:
    values = {}
    for text in texts or ():
        name, _, value = text.partition(":")
        if name not in names or not value:
            raise typer.BadParameter(f"{text!r} is not {'|'.join(names)}:VALUE", param_hint=option)
        try:
            values[name] = float(parse(value))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=option) from None
    return values


def _plans(found: Comparison) -> dict[str, Interval]:
    return {
        "recompute all": found.recompute_all,
        "load all": found.load_all,
        "prefix cut": found.prefix_cut,
        "two-ended": found.two_ended,
        "best interval": found.best,
    }


def _name_of(found: Comparison) -> str:
    """Name the chosen plan by the simplest kind that it is of."""
    for name, each in _plans(found).items():
        # Where nothing is computed meanwhile it does not matter at which block.
        both_load_all = each.start == each.end and found.best.start == found.best.end
        if both_load_all or (each.start, each.end) == (found.best.start, found.best.end):
            return name
    return "best interval"


def _row(name: str, each: Interval, question: Question, found: Comparison) -> list[str]:
    stride, cached = question.block_tokens, len(question.tiers)
    first, last = each.start * stride, each.end * stride
    meanwhile = "" if each.start == each.end else f"{first} to {last}"
    share = each.seconds / found.recompute_all.seconds
    loaded = cached * stride - (last - first)
    return [name, f"{loaded} tokens", meanwhile, f"{each.gpu_s:.3f}", f"{each.seconds:.3f}", f"{100 * share:.0f}%"]


def _where(parts: list[tuple[TierKind, int]]) -> str:
    return ", ".join(f"{tokens} in {kind.label}" for kind, tokens in parts)


def _even(label: str, load: LoadCost, tokens: int | None, max_tokens: int) -> str:
    rate = f"{1e3 * load.latency_s:.3g} ms and {approximate_size(1 / load.per_byte_s)}/s" if load.per_byte_s else "free"
    when = f"from {tokens} tokens on" if tokens is not None else f"for no prefix of up to {max_tokens} tokens"
    return f"loading all from {label} ({rate}) is faster than computing {when}"


def _as_json(
    costs: Known,
    question: Question,
    found: Comparison,
    loads: Mapping[TierKind, LoadCost],
    even: Mapping[str, int | None],
) -> dict[str, Any]:
    return {
        "profile": costs.name,
        "prompt_tokens": question.prompt_tokens,
        "block_tokens": question.block_tokens,
        "block_bytes": question.block_bytes,
        "tiers": {
            kind.label: {
                "latency_s": load.latency_s,
                "bytes_per_s": 1 / load.per_byte_s if load.per_byte_s else None,
                "queue_s": load.queue_s,
                "blocks": sum(each is kind for each in question.tiers),
                "break_even_tokens": even[kind.label],
            }
            for kind, load in loads.items()
        },
        "plans": {
            name: {
                "computed_from_token": each.start * question.block_tokens,
                "computed_to_token": each.end * question.block_tokens,
                "seconds": each.seconds,
                "gpu_s": each.gpu_s,
            }
            for name, each in _plans(found).items()
        },
        "chosen": _name_of(found),
        "seconds": found.best.seconds,
    }
