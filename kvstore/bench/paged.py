"""RAM through the engine's paged pool: blocks of 256 tokens, each gathered from 16 pool blocks of 16 tokens.

The pool is a CPU tensor here, shaped like that of a model with 8 KV heads of 128 in bfloat16 and as many layers as
the size of a block makes; a block's pool blocks lie scattered over it. The other side is a mapped region, as in the
engine. Needs torch, which only the engine has; a GPU is measured by `make gpu-check`.
"""

import time
from collections.abc import Callable

import torch

from kvstore.bench.memory import Buffers, memcpy
from kvstore.bench.samples import Compared, Timing, in_turns, shuffled
from kvstore.bench.settings import BenchSettings, Sizes
from tiers.hbm import HbmTier
from tiers.region import Region

_POOL_BLOCK_TOKENS = 16
_BLOCK_TOKENS = 256
_LAYER_BYTES = 1 << 20
_HEADS = 8
_EPOCH = 1


def measure(settings: BenchSettings, sizes: Sizes, on_round: Callable[[], None]) -> dict[str, Compared]:
    """Return paged_store and paged_fetch."""
    pool = make_pool(sizes)
    hbm = HbmTier(pool, _BLOCK_TOKENS)
    per_block = hbm.pool_blocks_per_block
    order = shuffled(len(pool), 1)
    groups = [order[first : first + per_block] for first in range(0, len(order), per_block)]
    path = settings.shm_dir / f"paged-{sizes.block_bytes}"
    region = Region.create(path, sizes.total_bytes, _EPOCH, prefault=lambda _done, _total: None)
    here, there = (Buffers(sizes.num_blocks, sizes.block_bytes, seed) for seed in (1, 2))
    slots = [region.view(index * sizes.block_bytes, sizes.block_bytes) for index in range(sizes.num_blocks)]
    try:

        def ours(_: int) -> dict[str, float]:
            started = time.perf_counter()
            for group, slot in zip(groups, slots, strict=True):
                hbm.gather(group, slot)
            stored = time.perf_counter()
            for group, slot in zip(groups, slots, strict=True):
                hbm.scatter(slot, group)
            return {"paged_store": stored - started, "paged_fetch": time.perf_counter() - stored}

        def ceiling(_: int) -> dict[str, float]:
            started = time.perf_counter()
            for target, source in zip(there.views, here.views, strict=True):
                memcpy(target, source)
            return {"memcpy": time.perf_counter() - started}

        seconds = in_turns([ours, ceiling], settings.rounds, on_round)
    finally:
        for slot in slots:
            slot.release()
        region.close()
        region.unlink()
    timings = {part: Timing(tuple(taken), sizes.total_bytes) for part, taken in seconds.items()}
    parts = ("paged_store", "paged_fetch")
    return {part: Compared(timings[part], {"memcpy": timings["memcpy"]}) for part in parts}


def make_pool(sizes: Sizes) -> torch.Tensor:
    """Return a pool that holds `num_blocks` blocks, `[pool blocks, layers, 2, 16, heads, head dim]` bfloat16, all of
    its memory touched. Raises ValueError where no such pool has blocks of that size."""
    layers = max(1, sizes.block_bytes // _LAYER_BYTES)
    numbers, rest = divmod(sizes.block_bytes, layers * 2 * _BLOCK_TOKENS * 2)
    if rest or not numbers:
        raise ValueError(f"no paged pool has blocks of {sizes.block_bytes} bytes")
    heads = _HEADS if numbers % _HEADS == 0 else 1
    count = sizes.num_blocks * (_BLOCK_TOKENS // _POOL_BLOCK_TOKENS)
    shape = (count, layers, 2, _POOL_BLOCK_TOKENS, heads, numbers // heads)
    return torch.ones(shape, dtype=torch.bfloat16)
