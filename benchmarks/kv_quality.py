"""Measures what storing KV as int8 or fp8 costs in quality and saves in bytes, on the small real model, in two minutes.

For each passage of real text the KV of a prefix is computed once and then, per way of storing it, copied out of the
HBM pool into payloads and back, as a store and a fetch do. Behind each of these prefixes

    1. the passage's own next tokens are scored: perplexity; divergence of what is predicted from what is predicted
       behind the exact prefix; how often the likeliest token is the same
    2. tokens are generated greedily: how many are equal before the first that is not

and the copies are timed. bfloat16 is no way of storing: it shows what rounding to another usual dtype does.

    python benchmarks/kv_quality.py [--json FILE]
"""

import argparse
import json
import os
import platform
import pydoc_data.topics
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from engine.attention import PagedBatch, SequenceSlice
from engine.forward import PoolCache
from engine.model import Model, default_model_folder, load_model, make_pool
from kernels.quantized import QUANTIZED_DTYPES, QuantizedDtype
from tiers.hbm import HbmTier

BLOCK_TOKENS = 16
WAYS = ("auto", *QUANTIZED_DTYPES, "bfloat16")
_COPY_RUNS = 9


@dataclass(frozen=True, slots=True)
class Scale:
    """How much text: `prefix_tokens` come from the cache, `scored_tokens` follow them, per passage."""

    passages: int
    prefix_tokens: int
    scored_tokens: int
    greedy_tokens: int

    @property
    def prefix_blocks(self) -> int:
        return self.prefix_tokens // BLOCK_TOKENS

    @property
    def total_blocks(self) -> int:
        return -(-(self.prefix_tokens + max(self.scored_tokens, self.greedy_tokens + 1)) // BLOCK_TOKENS)


@dataclass(slots=True)
class Scores:
    """One way of storing; one number per scored token, or per passage for `equal_tokens`."""

    losses: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    same_likeliest: list[bool] = field(default_factory=list)
    equal_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Row:
    """What is printed of one way of storing. Divergence is Kullback and Leibler's, in nats per token."""

    stored_as: str
    bytes_per_token: int
    ratio: float
    perplexity: float
    divergence_mean: float
    divergence_p99: float
    same_likeliest: float
    greedy_equal: float
    greedy_all_equal: int
    store_gb_s: float | None
    fetch_gb_s: float | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face folder; default: SmolLM2-135M")
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "kvstore", metavar="DIR")
    parser.add_argument("--dtype", default="float32", help="what the model computes in")
    parser.add_argument("--passages", type=int, default=12)
    parser.add_argument("--prefix-tokens", type=int, default=512)
    parser.add_argument("--scored-tokens", type=int, default=128)
    parser.add_argument("--greedy-tokens", type=int, default=48)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there as well")
    arguments = parser.parse_args()
    scale = Scale(
        arguments.passages,
        arguments.prefix_tokens // BLOCK_TOKENS * BLOCK_TOKENS,
        arguments.scored_tokens,
        arguments.greedy_tokens,
    )
    model = load_model(arguments.model or default_model_folder(arguments.cache_dir), "cpu", arguments.dtype)
    passages = read_passages(model, scale)
    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    print(
        f"{model.spec.name} in {model.spec.dtype} on {machine}; {scale.passages} passages: {scale.prefix_tokens} "
        f"tokens stored and fetched in {BLOCK_TOKENS}-token blocks, then {scale.scored_tokens} scored, "
        f"{scale.greedy_tokens} generated",
        flush=True,
    )
    rows = measure(model, passages, scale)
    print_table(rows)
    if arguments.json is not None:
        result = {"machine": machine, "model": model.spec.name, "dtype": model.spec.dtype} | asdict(scale)
        arguments.json.write_text(json.dumps(result | {"rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    return 0


def read_passages(model: Model, scale: Scale) -> list[list[int]]:
    """Return the beginnings of Python's longest documentation topics: prose, grammar and code that every Python has."""
    topics = sorted(pydoc_data.topics.topics.values(), key=lambda text: (-len(text), text))
    count = scale.prefix_tokens + scale.scored_tokens
    passages: list[list[int]] = []
    for text in topics[: scale.passages]:
        # A token is a byte at least, and of English rarely more than eight.
        tokens = model.tokenizer.encode(text[: 8 * count], add_special_tokens=False)[:count]
        if len(tokens) < count:
            raise SystemExit(f"kv_quality: there are no {scale.passages} texts of {count} tokens")
        passages.append(tokens)
    return passages


def measure(model: Model, passages: list[list[int]], scale: Scale) -> list[Row]:
    # Each way has a part of the pool of its own, so that all go on side by side.
    pool = make_pool(model.spec, len(WAYS) * scale.total_blocks, BLOCK_TOKENS, "cpu")
    tiers = {way: HbmTier(pool, BLOCK_TOKENS, _store_dtype(way)) for way in WAYS if way != "bfloat16"}
    scores = {way: Scores() for way in WAYS}
    for tokens in passages:
        _score_passage(model, pool, tiers, tokens, scale, scores)
    speeds = _copy_speeds(pool, tiers)
    sizes = {way: tier.payload_bytes // BLOCK_TOKENS for way, tier in tiers.items()}
    sizes["bfloat16"] = sizes["auto"] // pool.element_size() * torch.bfloat16.itemsize
    return [_row(way, scores[way], scale, sizes["auto"], sizes[way], speeds.get(way)) for way in WAYS]


def print_table(rows: list[Row]) -> None:
    print(
        "| stored as | bytes per token | perplexity | KL mean | KL p99 | same likeliest | greedy equal | store, fetch |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        speed = "" if row.store_gb_s is None else f"{row.store_gb_s:.1f}, {row.fetch_gb_s:.1f} GB/s"
        print(
            f"| {row.stored_as} | {row.bytes_per_token:,} ({row.ratio:.3f}) | {row.perplexity:.4f} "
            f"| {row.divergence_mean:.1e} | {row.divergence_p99:.1e} | {row.same_likeliest:.2%} "
            f"| {row.greedy_equal:.1%}, {row.greedy_all_equal} whole | {speed} |"
        )


# ---------------------------------------------------------------- quality


def _score_passage(
    model: Model,
    pool: torch.Tensor,
    tiers: dict[str, HbmTier],
    tokens: list[int],
    scale: Scale,
    scores: dict[str, Scores],
) -> None:
    tables = {way: list(range(i * scale.total_blocks, (i + 1) * scale.total_blocks)) for i, way in enumerate(WAYS)}
    first = tables[WAYS[0]]
    model.forward([SequenceSlice(tokens[: scale.prefix_tokens], 0, first, wants_logits=False)], pool)
    prefix = pool[first[: scale.prefix_blocks]].clone()
    expected: torch.Tensor | None = None
    for way in WAYS:
        own, blocks = scores[way], tables[way][: scale.prefix_blocks]
        pool[blocks] = prefix.bfloat16().to(pool.dtype) if way == "bfloat16" else prefix
        if way in tiers:
            _store_and_fetch(tiers[way], pool, blocks)
        found = _predicted(model, pool, tokens[scale.prefix_tokens :], scale.prefix_tokens, tables[way])
        expected = found if expected is None else expected
        targets = torch.tensor(tokens[scale.prefix_tokens + 1 :]).unsqueeze(1)
        own.losses += (-found.gather(1, targets)).flatten().tolist()
        own.divergences += (expected.exp() * (expected - found)).sum(dim=1).clamp_min(0).tolist()
        own.same_likeliest += (expected.argmax(dim=1) == found.argmax(dim=1)).tolist()
    generated = _greedy(model, pool, tokens[scale.prefix_tokens], scale, tables)
    for way in WAYS:
        scores[way].equal_tokens.append(_num_equal(generated[WAYS[0]], generated[way]))


def _store_and_fetch(tier: HbmTier, pool: torch.Tensor, blocks: list[int]) -> None:
    payload = memoryview(bytearray(tier.payload_bytes))
    for block in blocks:
        tier.gather([block], payload)
        pool[block].fill_(float("nan"))
        tier.scatter(payload, [block])


def _predicted(model: Model, pool: torch.Tensor, tokens: list[int], start: int, table: list[int]) -> torch.Tensor:
    """Return what is expected behind each token but the last, `[len(tokens) - 1, vocab]`."""
    batch = PagedBatch([SequenceSlice(tokens, start, table)], pool)
    with torch.inference_mode():
        logits = model._network(
            input_ids=torch.tensor([tokens]),
            position_ids=batch.positions.unsqueeze(0),
            cache=PoolCache(batch),
            use_cache=True,
            paged_batch=batch,
        ).logits[0, :-1]
    return torch.log_softmax(logits.double(), dim=1)


def _greedy(
    model: Model, pool: torch.Tensor, first: int, scale: Scale, tables: dict[str, list[int]]
) -> dict[str, list[int]]:
    made: dict[str, list[int]] = {way: [first] for way in tables}
    for position in range(scale.prefix_tokens, scale.prefix_tokens + scale.greedy_tokens):
        slices = [SequenceSlice([made[way][-1]], position, table) for way, table in tables.items()]
        for way, token in zip(tables, model.forward(slices, pool).argmax(dim=1).tolist(), strict=True):
            made[way].append(token)
    return {way: tokens[1:] for way, tokens in made.items()}


def _num_equal(expected: list[int], found: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), len(expected))


# ---------------------------------------------------------------- bytes and speed


def _copy_speeds(pool: torch.Tensor, tiers: dict[str, HbmTier]) -> dict[str, tuple[float, float]]:
    """Return GB/s of the pool's bytes, stored and fetched block by block; one run of each way after the other."""
    payloads = {way: [memoryview(bytearray(tier.payload_bytes)) for _ in pool] for way, tier in tiers.items()}
    stores: dict[str, list[float]] = {way: [] for way in tiers}
    fetches: dict[str, list[float]] = {way: [] for way in tiers}
    pool.normal_()
    for _ in range(_COPY_RUNS):
        for way, tier in tiers.items():
            stores[way].append(_seconds(tier.gather, [([i], view) for i, view in enumerate(payloads[way])]))
            fetches[way].append(_seconds(tier.scatter, [(view, [i]) for i, view in enumerate(payloads[way])]))
    return {
        way: (pool.nbytes / statistics.median(stores[way]) / 1e9, pool.nbytes / statistics.median(fetches[way]) / 1e9)
        for way in tiers
    }


def _seconds(copy: Callable[..., None], arguments: list[tuple[object, object]]) -> float:
    began = time.perf_counter()
    for pair in arguments:
        copy(*pair)
    return time.perf_counter() - began


def _row(
    way: str,
    scores: Scores,
    scale: Scale,
    exact_bytes: int,
    bytes_per_token: int,
    speeds: tuple[float, float] | None,
) -> Row:
    return Row(
        stored_as=way,
        bytes_per_token=bytes_per_token,
        ratio=bytes_per_token / exact_bytes,
        perplexity=float(torch.tensor(scores.losses).mean().exp()),
        divergence_mean=statistics.fmean(scores.divergences),
        divergence_p99=sorted(scores.divergences)[int(0.99 * (len(scores.divergences) - 1))],
        same_likeliest=statistics.fmean(scores.same_likeliest),
        greedy_equal=statistics.fmean(scores.equal_tokens) / scale.greedy_tokens,
        greedy_all_equal=sum(count == scale.greedy_tokens for count in scores.equal_tokens),
        store_gb_s=None if speeds is None else speeds[0],
        fetch_gb_s=None if speeds is None else speeds[1],
    )


def _store_dtype(way: str) -> QuantizedDtype | None:
    return next((known for known in QUANTIZED_DTYPES if known == way), None)


if __name__ == "__main__":
    sys.exit(main())
