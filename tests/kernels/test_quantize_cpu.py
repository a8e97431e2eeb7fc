"""Quantised payloads: their sizes, their errors, what survives; and the CPU's copies against the oracle."""

import pytest
import torch

from kernels import reference
from kernels.quantize_cpu import CpuQuantizer
from kernels.quantized import (
    QUANTIZED_DTYPES,
    QuantizedDtype,
    group_numbers,
    payload_bytes_of,
    quantized_dtype,
    quantized_layout,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
_LAYERS, _TOKENS, _HEADS, _NUM_BLOCKS = 3, 4, 2, 6


def kv(dtype: torch.dtype, head_dim: int = 64, seed: int = 0) -> torch.Tensor:
    """A pool of numbers that differ in size from token to token and from head to head."""
    generator = torch.Generator().manual_seed(seed)
    shape = (_NUM_BLOCKS, _LAYERS, 2, _TOKENS, _HEADS, head_dim)
    sizes = torch.exp2(torch.randint(-8, 9, (*shape[:-1], 1), generator=generator).float())
    return (torch.randn(shape, generator=generator) * sizes).to(dtype)


def round_trip(pool: torch.Tensor, store_dtype: QuantizedDtype, per_block: int = 1) -> torch.Tensor:
    """Return what the pool is after all its blocks were stored and fetched."""
    groups = torch.arange(len(pool)).view(-1, per_block).tolist()
    copies = CpuQuantizer(pool, per_block, store_dtype)
    payloads = [memoryview(bytearray(copies.payload_bytes)) for _ in groups]
    copies.gather(groups, payloads)
    back = torch.full_like(pool, 7.0)
    CpuQuantizer(back, per_block, store_dtype).scatter(payloads, groups)
    return back


@pytest.mark.parametrize("store_dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("per_block", "head_dim"), [(1, 64), (2, 80), (3, 7)])
def test_the_cpu_makes_the_bytes_and_the_numbers_of_the_oracle(
    store_dtype: QuantizedDtype, dtype: torch.dtype, per_block: int, head_dim: int
) -> None:
    pool = kv(dtype, head_dim)
    pool[1, 0, 0, 0, 0, 0] = torch.finfo(dtype).max
    pool[2, 1, 1, 2, 1, 3] = float("nan")
    pool[3, 1, 0, 1, 0, 2] = float("inf")
    pool[4, 0, 1, 0] = 0.0
    blocks = torch.tensor([5, 1, 3, 2, 4, 0]).view(-1, per_block)
    copies = CpuQuantizer(pool, per_block, store_dtype)
    expected = torch.empty(len(blocks), copies.payload_bytes, dtype=torch.uint8)
    reference.quantize_gather(pool, blocks, expected, store_dtype)
    found = [memoryview(bytearray(copies.payload_bytes)) for _ in blocks]
    copies.gather(blocks.tolist(), found)
    assert [bytes(view) for view in found] == [row.numpy().tobytes() for row in expected]

    back, oracle = torch.zeros_like(pool), torch.zeros_like(pool)
    CpuQuantizer(back, per_block, store_dtype).scatter([view.toreadonly() for view in found], blocks.tolist())
    reference.dequantize_scatter(expected, blocks, oracle, store_dtype)
    torch.testing.assert_close(back, oracle, rtol=0, atol=0, equal_nan=True)


def test_every_float8_there_is_comes_back_as_itself() -> None:
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    every = every[(every & 0x7F) != 0x7F]
    pool = torch.zeros(1, 1, 2, len(every), 1, 16)
    # A largest number of 448 makes a scale of 1.
    pool[0, 0, 0, :, 0, 0] = 448.0
    pool[0, 0, 0, :, 0, 1] = every.view(torch.float8_e4m3fn).float()
    assert torch.equal(round_trip(pool, "fp8"), pool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_is_off_by_half_a_step_of_its_group_at_most(dtype: torch.dtype) -> None:
    pool = kv(dtype)
    groups, back = (tensor.float().unflatten(-1, (2, 32)) for tensor in (pool, round_trip(pool, "int8")))
    largest = groups.abs().amax(dim=-1, keepdim=True)
    # A scale is off by 2^-9 of itself at most; then the pool's own rounding comes on top.
    step = largest / 127 * (1 + 2**-8)
    assert bool(((back - groups).abs() <= step / 2 + largest * torch.finfo(dtype).eps).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_is_off_by_a_sixteenth_of_each_number_at_most(dtype: torch.dtype) -> None:
    pool = kv(dtype)
    groups, back = (tensor.float().unflatten(-1, (2, 32)) for tensor in (pool, round_trip(pool, "fp8")))
    largest = groups.abs().amax(dim=-1, keepdim=True)
    # Below 2^-6 of 448 steps no longer shrink with the number.
    least_step = largest / 448 * 2**-9 * (1 + 2**-8)
    assert bool(((back - groups).abs() <= groups.abs() * (2**-4 + torch.finfo(dtype).eps) + least_step).all())


@pytest.mark.parametrize("store_dtype", QUANTIZED_DTYPES)
def test_what_was_dequantised_is_quantised_to_itself(store_dtype: QuantizedDtype) -> None:
    """A block that is dropped and stored again, on and on, does not drift away."""
    once = round_trip(kv(torch.float32), store_dtype)
    assert torch.equal(round_trip(once, store_dtype), once)


@pytest.mark.parametrize("store_dtype", QUANTIZED_DTYPES)
def test_a_fault_of_the_model_stays_visible_and_stays_where_it_is(store_dtype: QuantizedDtype) -> None:
    pool = kv(torch.float32)
    pool[2, 1, 0, 3, 1, 40] = float("inf")
    back = round_trip(pool, store_dtype)
    is_bad = back.isnan()
    assert bool(is_bad[2, 1, 0, 3, 1, 32:].all())
    assert int(is_bad.sum()) == 32


@pytest.mark.parametrize("store_dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_and_the_smallest_numbers_stay_finite(store_dtype: QuantizedDtype, dtype: torch.dtype) -> None:
    pool = torch.zeros(1, 1, 2, 1, 1, 32, dtype=dtype)
    pool[..., 0], pool[..., 1] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    pool[:, :, 1] = torch.finfo(dtype).smallest_normal
    back = round_trip(pool, store_dtype)
    assert bool(back.isfinite().all())
    assert bool((back[0, 0, 0, 0, 0, :2].abs() > 0.98 * torch.finfo(dtype).max).all())


def test_a_group_is_at_most_32_numbers_and_divides_the_head() -> None:
    assert {size: group_numbers(size) for size in (64, 128, 96, 80, 112, 12, 7, 43)} == {
        64: 32,
        128: 32,
        96: 32,
        80: 20,
        112: 28,
        12: 12,
        7: 7,
        43: 43,
    }


def test_a_payload_is_its_codes_and_two_bytes_per_group() -> None:
    layout = quantized_layout(torch.empty(1, 30, 2, 16, 3, 64, dtype=torch.bfloat16), 2)
    assert layout.code_bytes == 30 * 2 * 32 * 3 * 64
    assert layout.payload_bytes == layout.code_bytes + 30 * 2 * 32 * 3 * 2 * 2
    pool = torch.empty(1, 30, 2, 16, 3, 64)
    assert payload_bytes_of(pool, 2, None) == 2 * pool.nbytes
    assert payload_bytes_of(pool, 2, "int8") == payload_bytes_of(pool, 2, "fp8") == layout.payload_bytes


def test_names_and_pools_that_cannot_be_quantised_are_refused() -> None:
    assert [quantized_dtype(name) for name in ("auto", "int8", "fp8")] == [None, "int8", "fp8"]
    with pytest.raises(ValueError, match="'int4' is not one of auto, int8, fp8"):
        quantized_dtype("int4")
    with pytest.raises(ValueError, match="a pool of float64 cannot be quantised"):
        CpuQuantizer(torch.zeros(1, 1, 2, 1, 1, 8, dtype=torch.float64), 1, "int8")
