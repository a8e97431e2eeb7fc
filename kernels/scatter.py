"""Copies many contiguous payloads into blocks of the paged pool, in one launch: `kernels.gather` backwards."""

import torch
import triton
import triton.language as tl

from kernels.gather import NUM_WARPS, TILE_LANES
from kernels.layout import lane_offsets, plan_copy


def scatter(payloads: torch.Tensor, pool_blocks: torch.Tensor, pool: torch.Tensor) -> None:
    """Copy `payloads[i]` into the pool blocks `pool_blocks[i]`; on a GPU on the current stream, without waiting.

    Shapes as in `kernels.layout.plan_copy`, which also says what raises ValueError. A pool block named twice gets one
    of its payloads or a mixture of them.
    """
    if not pool_blocks.numel():
        return
    plan = plan_copy(pool, pool_blocks, payloads)
    scatter_kernel[plan.grid](
        plan.payloads,
        pool_blocks,
        plan.pool,
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
def scatter_kernel(  # type: ignore[no-untyped-def]
    payloads,
    pool_blocks,
    pool,
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
    block = tl.load(pool_blocks + index).to(tl.int64)
    target = pool + block * block_stride + (segment // 2) * layer_stride + (segment % 2) * part_stride
    place = segment * POOL_BLOCKS_PER_BLOCK + index % POOL_BLOCKS_PER_BLOCK
    source = payloads + (index // POOL_BLOCKS_PER_BLOCK) * payload_stride + place * SEGMENT_LANES
    for first in range(0, SEGMENT_LANES, TILE):
        lanes = first + tl.arange(0, TILE)
        offsets = lane_offsets(lanes, token_stride, head_stride, NUM_HEADS, HEAD_LANES, IS_FLAT)
        inside = lanes < SEGMENT_LANES
        tl.store(target + offsets, tl.load(source + lanes, mask=inside), mask=inside)
