"""Copies many blocks out of the paged pool into contiguous payloads, in one launch."""

import torch
import triton
import triton.language as tl

from kernels.layout import lane_offsets, plan_copy

# 8 KiB per round of 4 warps when lanes are 8 bytes wide: four independent 16-byte loads per thread.
TILE_LANES = 1024
NUM_WARPS = 4


def gather(pool: torch.Tensor, pool_blocks: torch.Tensor, payloads: torch.Tensor) -> None:
    """Copy the pool blocks `pool_blocks[i]` into `payloads[i]`; on a GPU on the current stream, without waiting.

    Shapes as in `kernels.layout.plan_copy`, which also says what raises ValueError. Block numbers are not checked
    against the pool: they are on the device.
    """
    if not pool_blocks.numel():
        return
    plan = plan_copy(pool, pool_blocks, payloads)
    gather_kernel[plan.grid](
        plan.pool,
        pool_blocks,
        plan.payloads,
        *plan.pool.stride()[:5],
        plan.payloads.stride(0),
        POOL_BLOCKS_PER_BLOCK=pool_blocks.shape[1],
        SEGMENT_LANES=plan.segment_lanes,
        NUM_HEADS=plan.num_heads,
        HEAD_LANES=plan.head_lanes,
        IS_FLAT=plan.is_flat,
        TILE=TILE_LANES,
        num_warps=NUM_WARPS,
    )


@triton.jit  # type: ignore[untyped-decorator]
def gather_kernel(  # type: ignore[no-untyped-def]
    pool,
    pool_blocks,
    payloads,
    block_stride,
    layer_stride,
    part_stride,
    token_stride,
    head_stride,
    payload_stride,
    POOL_BLOCKS_PER_BLOCK: tl.constexpr,
    SEGMENT_LANES: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_LANES: tl.constexpr,
    IS_FLAT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (i, s) copies segment s (layer s // 2, K or V by s % 2) of the i-th pool block of the launch."""
    index = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1).to(tl.int64)
    # 64 bits: a pool of more than 2^31 lanes is ordinary.
    block = tl.load(pool_blocks + index).to(tl.int64)
    source = pool + block * block_stride + (segment // 2) * layer_stride + (segment % 2) * part_stride
    place = segment * POOL_BLOCKS_PER_BLOCK + index % POOL_BLOCKS_PER_BLOCK
    target = payloads + (index // POOL_BLOCKS_PER_BLOCK) * payload_stride + place * SEGMENT_LANES
    for first in range(0, SEGMENT_LANES, TILE):
        lanes = first + tl.arange(0, TILE)
        offsets = lane_offsets(lanes, token_stride, head_stride, NUM_HEADS, HEAD_LANES, IS_FLAT)
        inside = lanes < SEGMENT_LANES
        tl.store(target + lanes, tl.load(source + offsets, mask=inside), mask=inside)
