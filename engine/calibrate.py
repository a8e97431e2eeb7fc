"""`python -m engine.calibrate`: times this machine's steps and loads, for `kvstore calibrate`, which starts it.

It prints one JSON object per line on standard output: first `about`, with what was measured on, then a `step` or a
`load` per measurement, in between `part` with how many measurements are to come of what.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import torch
import typer

from engine.attention import SequenceSlice
from engine.cost_keeper import blank_profile, device_name
from engine.model import Model, default_model_folder, load_model, make_pool
from engine.server import choose_device, default_cache_dir
from engine.timed_loads import TimedLoads
from kvstore.core.errors import KVStoreError
from tiers.hbm import HbmTier

# Contexts in chunks; longer ones only while there is time.
_CONTEXTS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128)
_SHARES: Final = (1.0, 0.5, 0.125)
_DECODES: Final = (1, 2, 4)
_ROUNDS: Final = 3
_STEPS_BUDGET_S: Final = 75.0
_LOADS_TOKENS: Final = 2 * 1024
_MAX_POOL_BYTES: Final = 2 << 30


@dataclass(frozen=True, slots=True)
class Settings:
    """`run_dir` None: no loads are timed. `max_tokens` is the longest context to time."""

    model: Path
    device: str
    dtype: str
    chunk_tokens: int
    block_tokens: int
    run_dir: Path | None
    max_tokens: int
    tier_budget_s: float


def calibrate(settings: Settings, tell: Callable[[str, Any], None]) -> None:
    """Measure, and tell each result as it comes. Raises KVStoreError where it cannot begin or the daemon is gone."""
    model = load_model(settings.model, settings.device, settings.dtype)
    stride = settings.block_tokens
    context = min(model.spec.max_context_tokens, settings.max_tokens)
    context = min(context, _MAX_POOL_BYTES // model.spec.kv_bytes_per_token)
    tokens = max(context, _LOADS_TOKENS, 2 * settings.chunk_tokens)
    pool = make_pool(model.spec, -(-tokens // stride), stride, settings.device)
    hbm = HbmTier(pool, stride)
    profile = blank_profile(
        model.spec.name,
        device_name(pool.device, model.spec.dtype),
        settings.chunk_tokens,
        stride,
        hbm.payload_bytes,
    )
    tell("about", msgspec.to_builtins(profile) | {"max_tokens": context})
    _steps(model, pool, settings.chunk_tokens, context, tell)
    if settings.run_dir is not None:
        loads = TimedLoads(model.spec, hbm, settings.run_dir, stride, _LOADS_TOKENS // stride, settings.tier_budget_s)
        try:
            loads.run(tell)
        finally:
            loads.close()
    hbm.close()


def _steps(model: Model, pool: torch.Tensor, chunk: int, context: int, tell: Callable[[str, Any], None]) -> None:
    table = list(range(pool.shape[0]))
    began = time.monotonic()
    shapes = list(_shapes(chunk, context))
    tell("part", {"name": "prefill", "total": _ROUNDS * len(shapes)})
    _forward(model, pool, [(chunk, 0)], table)
    for _ in range(_ROUNDS):
        for slices in shapes:
            # The shortest contexts come first, so that what is left out is the long end.
            if time.monotonic() - began > _STEPS_BUDGET_S:
                return
            seconds = _forward(model, pool, slices, table)
            new, cached = next(((new, cached) for new, cached in slices if new > 1), (0, slices[0][1]))
            decodes = sum(count == 1 for count, _ in slices)
            tell("step", {"new": new, "cached": cached, "decodes": decodes, "seconds": seconds})


def _shapes(chunk: int, context: int) -> Iterator[Sequence[tuple[int, int]]]:
    """Yield (new, cached) per slice of each step to time."""
    for count in _CONTEXTS:
        cached = count * chunk
        if cached + chunk > context:
            return
        for share in _SHARES:
            if (new := int(share * chunk)) > 1:
                yield [(new, cached)]
        if cached:
            for decodes in _DECODES[: 3 if count == 1 else 1]:
                yield [(1, cached)] * decodes
                yield [(chunk, cached), *[(1, cached)] * decodes]


def _forward(model: Model, pool: torch.Tensor, slices: Sequence[tuple[int, int]], table: Sequence[int]) -> float:
    # What a token means costs nothing; that all decodes write the same place does not matter either, one by one.
    parts = [SequenceSlice([0] * new, cached, table) for new, cached in slices]
    began = time.perf_counter()
    model.forward(parts, pool).argmax(dim=-1).tolist()
    return time.perf_counter() - began


def main(
    model: Annotated[Path | None, typer.Option("--model", metavar="DIR")] = None,
    device: str = "auto",
    dtype: str = "auto",
    chunk_tokens: Annotated[int, typer.Option(min=16)] = 256,
    block_tokens: Annotated[int, typer.Option(min=1)] = 16,
    run_dir: Annotated[Path | None, typer.Option("--run-dir", metavar="DIR")] = None,
    max_tokens: Annotated[int, typer.Option(min=512)] = 32_768,
    tier_budget: Annotated[float, typer.Option(min=1.0)] = 40.0,
) -> None:
    """Time steps of the model, and loads through the daemon of --run-dir, as JSON lines."""

    def tell(kind: str, value: Any) -> None:
        print(msgspec.json.encode({kind: value}).decode(), flush=True)

    try:
        folder = model if model is not None else default_model_folder(default_cache_dir())
        device, dtype = choose_device(device, dtype)
        settings = Settings(folder, device, dtype, chunk_tokens, block_tokens, run_dir, max_tokens, tier_budget)
        calibrate(settings, tell)
    except KVStoreError as error:
        typer.echo(f"engine: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    typer.run(main)
