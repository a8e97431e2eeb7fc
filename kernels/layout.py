"""How the copy kernels see a paged pool and the blocks they copy: as integers of the widest size that fits, by strides.

A *payload* is one block as it is stored and moved, `[num_layers, 2, block_tokens, num_kv_heads, head_dim]`
contiguous, and takes `pool_blocks_per_block` pool blocks of a pool seen as

    [num_pool_blocks, num_layers, 2, pool_block_tokens, num_kv_heads, head_dim]

in whatever order the pool has its dimensions, as long as a head's numbers lie beside each other. K or V of one layer
of one pool block is a *segment*: contiguous in the payload, and in most pools too.

    payload lanes:  | layer 0 K: segment of pool block 0 | 1 | … | k-1 | layer 0 V: 0 | 1 | … | layer 1 K: …
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Bytes are copied, not numbers: one kernel serves every dtype, and wide lanes make wide loads.
_LANES = (torch.int64, torch.int32, torch.int16, torch.int8)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """One launch over `num_pool_blocks` pool blocks; strides and sizes are in lanes, tensors are views in lanes."""

    pool: torch.Tensor
    payloads: torch.Tensor
    num_pool_blocks: int
    num_segments: int
    segment_lanes: int
    num_heads: int
    head_lanes: int
    is_flat: bool

    @property
    def grid(self) -> tuple[int, int]:
        return self.num_pool_blocks, self.num_segments


def plan_copy(pool: torch.Tensor, pool_blocks: torch.Tensor, payloads: torch.Tensor) -> CopyPlan:
    """Return how to copy between `pool` and `payloads`.

    `pool_blocks` is `[num_payloads, pool_blocks_per_block]` int64, `payloads` `[num_payloads, payload elements]` with
    contiguous rows of the pool's dtype. Raises ValueError where the three do not fit each other.
    """
    check_pool(pool, pool_blocks)
    per_payload = pool_blocks.shape[1] * pool[0].numel() if pool.shape[0] else 0
    if payloads.shape != (pool_blocks.shape[0], per_payload) or payloads.dtype != pool.dtype:
        raise ValueError(f"payloads are {tuple(payloads.shape)} {payloads.dtype}, expected {per_payload} each")
    if payloads.stride(1) != 1 or not pool.device == pool_blocks.device == payloads.device:
        raise ValueError("payload rows must be contiguous, and everything on one device")
    lane = widest_lane(pool, payloads)
    lanes = pool.view(lane)
    _, num_layers, parts, tokens, heads, head_lanes = lanes.shape
    return CopyPlan(
        pool=lanes,
        payloads=payloads.view(lane),
        num_pool_blocks=pool_blocks.numel(),
        num_segments=num_layers * parts,
        segment_lanes=tokens * heads * head_lanes,
        num_heads=heads,
        head_lanes=head_lanes,
        is_flat=lanes.stride(4) == head_lanes and lanes.stride(3) == heads * head_lanes,
    )


def check_pool(pool: torch.Tensor, pool_blocks: torch.Tensor) -> None:
    """Raise ValueError where these are no pool and no `[num_payloads, pool_blocks_per_block]` of its pool blocks."""
    if pool.dim() != 6 or pool.shape[2] != 2 or pool.stride(5) != 1:
        raise ValueError(f"not a pool of [blocks, layers, 2, tokens, heads, head_dim]: {tuple(pool.shape)}")
    if pool_blocks.dim() != 2 or pool_blocks.dtype != torch.int64 or not pool_blocks.is_contiguous():
        raise ValueError("pool_blocks must be a contiguous [num_payloads, pool_blocks_per_block] int64 tensor")


def widest_lane(*tensors: torch.Tensor) -> torch.dtype:
    """Return the widest integer dtype as which all tensors can be viewed."""
    return next(lane for lane in _LANES if all(_fits(tensor, lane.itemsize) for tensor in tensors))


def _fits(tensor: torch.Tensor, lane_bytes: int) -> bool:
    size = tensor.element_size()
    lengths: Sequence[int] = [tensor.shape[-1], *tensor.stride()[:-1]]
    return tensor.data_ptr() % lane_bytes == 0 and all(length * size % lane_bytes == 0 for length in lengths)


@triton.jit  # type: ignore[untyped-decorator]
def lane_offsets(  # type: ignore[no-untyped-def]
    lanes, token_stride, head_stride, NUM_HEADS: tl.constexpr, HEAD_LANES: tl.constexpr, IS_FLAT: tl.constexpr
):
    """Where in the pool a segment's lanes lie, counted from the segment's first."""
    if IS_FLAT:
        # Without the divisions the compiler sees that neighbours are neighbours, and loads 16 bytes at once.
        return lanes
    token = lanes // (NUM_HEADS * HEAD_LANES)
    head = (lanes // HEAD_LANES) % NUM_HEADS
    return token * token_stride + head * head_stride + lanes % HEAD_LANES
