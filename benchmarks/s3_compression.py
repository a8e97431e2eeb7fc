"""What packing KV for the bucket (`tiers/planes.py`) saves and costs, on the KV of the small real model.

    python -m benchmarks.s3_compression [--tokens 512] [--rounds 7] [--json]

The KV of a real text is computed once in float32, rounded to the other dtypes, and packed and unpacked on one thread.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.kv_quality import Scale, read_passages
from engine.attention import SequenceSlice
from engine.model import default_model_folder, load_model, make_pool
from tiers.planes import PLANES, WIDTHS

_POOL_BLOCK_TOKENS = 16
_WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@dataclass(frozen=True, slots=True)
class Row:
    """Speeds are of payload bytes, medians; `kept` is the packed share of the payload."""

    dtype: str
    width: int
    payload_bytes: int
    kept: float
    pack_gb_s: float
    unpack_gb_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "kvstore", metavar="DIR")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    kv = _kv_of_a_text(options.cache_dir, options.tokens // _POOL_BLOCK_TOKENS)
    rows = [_measure(kv.to(dtype), width, options.rounds) for dtype in _WORDS for width in WIDTHS]
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    if options.json:
        print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=2))
        return
    print(f"{machine}; KV of {options.tokens} tokens, one thread, medians of {options.rounds}")
    print("| dtype | width | kept | pack GB/s | unpack GB/s |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {row.dtype} | {row.width} | {row.kept:.3f} | {row.pack_gb_s:.2f} | {row.unpack_gb_s:.2f} |")


def _kv_of_a_text(cache_dir: Path, num_blocks: int) -> torch.Tensor:
    """Return `[num_pool_blocks, num_layers, 2, tokens, kv_heads, head_dim] float32`."""
    model = load_model(default_model_folder(cache_dir), "cpu", "float32")
    tokens = num_blocks * _POOL_BLOCK_TOKENS
    (passage,) = read_passages(model, Scale(1, tokens, _POOL_BLOCK_TOKENS, 1))
    pool = make_pool(model.spec, num_blocks, _POOL_BLOCK_TOKENS, "cpu")
    model.forward([SequenceSlice(passage[:tokens], 0, list(range(num_blocks)), wants_logits=False)], pool)
    return pool


def _measure(kv: torch.Tensor, width: int, rounds: int) -> Row:
    payload = memoryview(kv.view(_WORDS[kv.dtype]).numpy().tobytes())
    packed = PLANES.pack(payload, width)
    place = memoryview(bytearray(len(payload)))
    pack_s = _median_s(lambda: PLANES.pack(payload, width), rounds)
    unpack_s = _median_s(lambda: PLANES.unpack(memoryview(packed), place), rounds)
    assert place == payload, "other bytes came back"
    num_gb = len(payload) / 1e9
    name = str(kv.dtype).removeprefix("torch.")
    return Row(name, width, len(payload), len(packed) / len(payload), num_gb / pack_s, num_gb / unpack_s)


def _median_s(action: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        action()
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
