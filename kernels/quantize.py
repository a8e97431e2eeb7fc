"""Quantises blocks while it gathers them out of the paged pool, in one launch, and dequantises them on the way back.

What the bytes are is said in `kernels.quantized`. Float8 is converted with integer arithmetic: the conversion that
Triton offers needs sm_89, and is wrong in its interpreter. Link and host memory limit these copies, not arithmetic.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.e4m3 import from_e4m3, to_e4m3
from kernels.gather import NUM_WARPS
from kernels.layout import check_pool
from kernels.quantized import LARGEST_CODE, LEAST_MAGNITUDE, SCALE_BYTES, QuantizedDtype, quantized_layout

TILE_NUMBERS = 1024
# The bits of 2^-100 as float32.
_LEAST_BITS = torch.tensor(LEAST_MAGNITUDE, dtype=torch.float32).view(torch.int32).item()


def quantize_gather(
    pool: torch.Tensor, pool_blocks: torch.Tensor, payloads: torch.Tensor, store_dtype: QuantizedDtype
) -> None:
    """Quantise the pool blocks `pool_blocks[i]` into `payloads[i]`; on a GPU on the current stream, without waiting.

    `pool` and `pool_blocks` are as in `kernels.layout.plan_copy`, `payloads` is `[num_payloads, payload bytes]` uint8
    with contiguous rows. Raises ValueError where they do not fit each other. Block numbers are not checked.
    """
    if not pool_blocks.numel():
        return
    launch = _plan(pool, pool_blocks, payloads, store_dtype)
    # Fused multiply-adds would round otherwise than the oracle.
    quantize_kernel[launch.grid](
        pool,
        pool_blocks,
        *launch.arguments,
        **launch.constants,
        **quantize_constants(store_dtype),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )


def dequantize_scatter(
    payloads: torch.Tensor, pool_blocks: torch.Tensor, pool: torch.Tensor, store_dtype: QuantizedDtype
) -> None:
    """Dequantise `payloads[i]` into the pool blocks `pool_blocks[i]`: `quantize_gather` backwards."""
    if not pool_blocks.numel():
        return
    launch = _plan(pool, pool_blocks, payloads, store_dtype)
    dequantize_kernel[launch.grid](
        pool,
        pool_blocks,
        *launch.arguments,
        **launch.constants,
        LIMIT=torch.finfo(pool.dtype).max,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )


@dataclass(frozen=True, slots=True)
class _Launch:
    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def _plan(
    pool: torch.Tensor, pool_blocks: torch.Tensor, payloads: torch.Tensor, store_dtype: QuantizedDtype
) -> _Launch:
    check_pool(pool, pool_blocks)
    layout = quantized_layout(pool, pool_blocks.shape[1])
    if payloads.shape != (pool_blocks.shape[0], layout.payload_bytes) or payloads.dtype != torch.uint8:
        raise ValueError(
            f"payloads are {tuple(payloads.shape)} {payloads.dtype}, not {layout.payload_bytes} bytes each"
        )
    if payloads.stride(1) != 1 or payloads.stride(0) % SCALE_BYTES or payloads.data_ptr() % SCALE_BYTES:
        raise ValueError("payload rows must be contiguous and start at even addresses")
    if not pool.device == pool_blocks.device == payloads.device:
        raise ValueError("everything must be on one device")
    _, num_layers, parts, tokens, heads, head_dim = pool.shape
    scales = payloads[:, layout.code_bytes :].view(torch.int16)
    return _Launch(
        grid=(pool_blocks.numel(), num_layers * parts),
        arguments=(payloads, scales, *pool.stride()[:5], payloads.stride(0), scales.stride(0)),
        constants=kernel_constants(
            store_dtype,
            per_block=pool_blocks.shape[1],
            tokens=tokens,
            heads=heads,
            group=layout.group_numbers,
            groups_per_head=layout.groups_per_head,
            is_flat=pool.stride(4) == head_dim and pool.stride(3) == heads * head_dim,
        ),
    )


def kernel_constants(
    store_dtype: QuantizedDtype,
    *,
    per_block: int,
    tokens: int,
    heads: int,
    group: int,
    groups_per_head: int,
    is_flat: bool,
) -> dict[str, Any]:
    """Return what both kernels are compiled for."""
    columns = triton.next_power_of_2(group)
    return {
        "POOL_BLOCKS_PER_BLOCK": per_block,
        "SEGMENT_GROUPS": tokens * heads * groups_per_head,
        "NUM_HEADS": heads,
        "GROUPS_PER_HEAD": groups_per_head,
        "GROUP": group,
        "IS_FLAT": is_flat,
        "IS_FP8": store_dtype == "fp8",
        "ROWS": max(1, TILE_NUMBERS // columns),
        "COLUMNS": columns,
    }


def quantize_constants(store_dtype: QuantizedDtype) -> dict[str, Any]:
    """Return what `quantize_kernel` is compiled for beside."""
    return {"LEAST_BITS": _LEAST_BITS, "INVERSE_LARGEST": 1 / LARGEST_CODE[store_dtype]}


@triton.jit  # type: ignore[untyped-decorator]
def quantize_kernel(  # type: ignore[no-untyped-def]
    pool,
    pool_blocks,
    codes,
    scales,
    block_stride,
    layer_stride,
    part_stride,
    token_stride,
    head_stride,
    codes_stride,
    scales_stride,
    POOL_BLOCKS_PER_BLOCK: tl.constexpr,
    SEGMENT_GROUPS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUPS_PER_HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    IS_FLAT: tl.constexpr,
    IS_FP8: tl.constexpr,
    LEAST_BITS: tl.constexpr,
    INVERSE_LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (i, s) quantises segment s (layer s // 2, K or V by s % 2) of the i-th pool block of the launch, some
    groups, `[ROWS, COLUMNS]`, at a time."""
    index = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1).to(tl.int64)
    block = tl.load(pool_blocks + index).to(tl.int64)
    source = pool + block * block_stride + (segment // 2) * layer_stride + (segment % 2) * part_stride
    first_group = (segment * POOL_BLOCKS_PER_BLOCK + index % POOL_BLOCKS_PER_BLOCK) * SEGMENT_GROUPS
    payload = index // POOL_BLOCKS_PER_BLOCK
    code_target = codes + payload * codes_stride + first_group * GROUP
    scale_target = scales + payload * scales_stride + first_group
    columns = tl.arange(0, COLUMNS)[None, :]
    for first in range(0, SEGMENT_GROUPS, ROWS):
        rows = first + tl.arange(0, ROWS)
        places = _places(rows[:, None], columns, token_stride, head_stride, NUM_HEADS, GROUPS_PER_HEAD, GROUP, IS_FLAT)
        inside = (rows[:, None] < SEGMENT_GROUPS) & (columns < GROUP)
        numbers = tl.load(source + places, mask=inside, other=0.0).to(tl.float32)
        # As integers magnitudes have the same order, and NaN is the largest.
        largest = tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        scaled = tl.maximum(largest, LEAST_BITS).to(tl.float32, bitcast=True) * INVERSE_LARGEST
        bits = scaled.to(tl.int32, bitcast=True)
        # To bfloat16, ties to even; infinity and NaN become NaN.
        is_finite = largest < 0x7F800000
        short = tl.where(is_finite, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        tl.store(scale_target + rows, short.to(tl.int16), mask=rows < SEGMENT_GROUPS)
        scale = (tl.where(is_finite, short, 0x3F80) << 16).to(tl.float32, bitcast=True)
        inverse = tl.math.div_rn(tl.full([ROWS], 1.0, tl.float32), scale)
        wanted = tl.where(is_finite[:, None], numbers, 0.0) * inverse[:, None]
        if IS_FP8:
            made = to_e4m3(wanted)
        else:
            # Adding 1.5 * 2^23 leaves the number, rounded to the nearest even, in the lowest bits.
            made = (wanted + 12582912.0).to(tl.int32, bitcast=True) & 0xFF
        tl.store(code_target + rows[:, None] * GROUP + columns, made.to(tl.uint8), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def dequantize_kernel(  # type: ignore[no-untyped-def]
    pool,
    pool_blocks,
    codes,
    scales,
    block_stride,
    layer_stride,
    part_stride,
    token_stride,
    head_stride,
    codes_stride,
    scales_stride,
    POOL_BLOCKS_PER_BLOCK: tl.constexpr,
    SEGMENT_GROUPS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUPS_PER_HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    IS_FLAT: tl.constexpr,
    IS_FP8: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (i, s) fills segment s of the i-th pool block of the launch: `quantize_kernel` backwards."""
    index = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1).to(tl.int64)
    block = tl.load(pool_blocks + index).to(tl.int64)
    target = pool + block * block_stride + (segment // 2) * layer_stride + (segment % 2) * part_stride
    first_group = (segment * POOL_BLOCKS_PER_BLOCK + index % POOL_BLOCKS_PER_BLOCK) * SEGMENT_GROUPS
    payload = index // POOL_BLOCKS_PER_BLOCK
    code_source = codes + payload * codes_stride + first_group * GROUP
    scale_source = scales + payload * scales_stride + first_group
    columns = tl.arange(0, COLUMNS)[None, :]
    for first in range(0, SEGMENT_GROUPS, ROWS):
        rows = first + tl.arange(0, ROWS)
        places = _places(rows[:, None], columns, token_stride, head_stride, NUM_HEADS, GROUPS_PER_HEAD, GROUP, IS_FLAT)
        inside = (rows[:, None] < SEGMENT_GROUPS) & (columns < GROUP)
        short = tl.load(scale_source + rows, mask=rows < SEGMENT_GROUPS, other=0).to(tl.int32)
        scale = (short << 16).to(tl.float32, bitcast=True)
        code = tl.load(code_source + rows[:, None] * GROUP + columns, mask=inside, other=0).to(tl.int32)
        if IS_FP8:
            numbers = from_e4m3(code)
        else:
            numbers = ((code ^ 0x80) - 0x80).to(tl.float32)
        values = numbers * scale[:, None]
        # The largest may round up past the dtype's range; NaN compares false and stays.
        values = tl.where(values > LIMIT, LIMIT, values)
        values = tl.where(values < -LIMIT, -LIMIT, values)
        tl.store(target + places, values.to(pool.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _places(  # type: ignore[no-untyped-def]
    groups,
    columns,
    token_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    GROUPS_PER_HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    IS_FLAT: tl.constexpr,
):
    """Where in the pool a segment's groups lie, counted from the segment's first number."""
    if IS_FLAT:
        return groups * GROUP + columns
    token = groups // (NUM_HEADS * GROUPS_PER_HEAD)
    head = (groups // GROUPS_PER_HEAD) % NUM_HEADS
    return token * token_stride + head * head_stride + (groups % GROUPS_PER_HEAD) * GROUP + columns
