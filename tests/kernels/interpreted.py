"""The kernels in Triton's interpreter, on tiny shapes. Run by `test_interpreted.py`, in a process of its own:
triton must be imported under TRITON_INTERPRET=1, which other tests in the same process could not bear, and a kernel
that writes outside of its tensors takes the process with it."""

import os
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from kernels import reference
from kernels.gather import gather
from kernels.layout import widest_lane
from kernels.pages import PageRun, gather_pages, page_table, scatter_pages
from kernels.pinned import PinnedMemory
from kernels.quantize import quantize_gather
from kernels.quantize_cpu import CpuQuantizer
from kernels.quantized import QUANTIZED_DTYPES, QuantizedDtype
from kernels.transfer import HostTransfers
from tests.kernels import cases, quantized_cases

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/kernels/test_interpreted.py instead"


@pytest.mark.parametrize("case", cases.SMALL_CASES, ids=str)
def test_gather_copies_what_the_oracle_copies(case: cases.Case) -> None:
    cases.check_gather(case, "cpu")


@pytest.mark.parametrize("case", cases.SMALL_CASES, ids=str)
def test_scatter_copies_what_the_oracle_copies(case: cases.Case) -> None:
    cases.check_scatter(case, "cpu")


@pytest.mark.parametrize("store_dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize("case", quantized_cases.SMALL_CASES, ids=str)
def test_quantising_makes_the_bytes_of_the_oracle(case: cases.Case, store_dtype: QuantizedDtype) -> None:
    quantized_cases.check_quantize(case, store_dtype, "cpu")


@pytest.mark.parametrize("store_dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize("case", quantized_cases.SMALL_CASES, ids=str)
def test_dequantising_makes_the_numbers_of_the_oracle(case: cases.Case, store_dtype: QuantizedDtype) -> None:
    quantized_cases.check_dequantize(case, store_dtype, "cpu")


def test_every_float8_there_is_is_converted_both_ways_exactly() -> None:
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    every = every[(every & 0x7F) != 0x7F]
    numbers = every.view(torch.float8_e4m3fn).float()
    # The middle between two neighbours, and a hair to both sides of it, are where rounding can go wrong.
    middles = (numbers[1:127] + numbers[:126]) / 2
    values = torch.cat([numbers, middles, middles * (1 + 2**-20), -middles * (1 - 2**-20)])
    pool = torch.zeros(1, 1, 2, len(values), 1, 16)
    # A largest number of 448 makes a scale of 1.
    pool[0, 0, 0, :, 0, 0] = 448.0
    pool[0, 0, 0, :, 0, 1] = values
    found = torch.empty(1, 2 * len(values) * 18, dtype=torch.uint8)
    quantize_gather(pool, torch.tensor([[0]]), found, "fp8")
    codes = found[0, : len(values) * 16].view(-1, 16)[:, 1]
    assert codes.tolist() == values.to(torch.float8_e4m3fn).view(torch.uint8).tolist()


def test_no_blocks_are_no_launch() -> None:
    cases.check_nothing_to_do("cpu")


def test_lanes_are_as_wide_as_all_strides_and_addresses_allow() -> None:
    whole = torch.zeros(4, 8, dtype=torch.float32)
    assert widest_lane(whole) == torch.int64
    assert widest_lane(whole[:, 1:7]) == torch.int32
    assert widest_lane(whole, torch.zeros(2, 3, dtype=torch.bfloat16)) == torch.int16
    assert widest_lane(torch.zeros(2, 3, dtype=torch.int8)) == torch.int8


@pytest.mark.parametrize(
    ("pool_shape", "blocks_shape", "payload_shape"),
    [
        ((4, 1, 2, 2, 1), (1, 1), (1, 4)),
        ((4, 1, 3, 2, 1, 4), (1, 1), (1, 24)),
        ((4, 1, 2, 2, 1, 4), (1,), (1, 16)),
        ((4, 1, 2, 2, 1, 4), (2, 1), (1, 16)),
        ((4, 1, 2, 2, 1, 4), (1, 2), (1, 16)),
    ],
)
def test_shapes_that_do_not_fit_each_other_are_refused(
    pool_shape: tuple[int, ...], blocks_shape: tuple[int, ...], payload_shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError):
        gather(torch.zeros(pool_shape), torch.zeros(blocks_shape, dtype=torch.int64), torch.zeros(payload_shape))
    if len(pool_shape) == 6 and pool_shape[2] == 2 and payload_shape == (1, 16):
        with pytest.raises(ValueError, match="int64"):
            gather(torch.zeros(pool_shape), torch.zeros(1, 1), torch.zeros(payload_shape))


@pytest.mark.parametrize(("page_bytes", "lane"), [((48, 16), 8), ((48, 24), 8), ((12, 8), 4), ((6, 8), 2), ((7, 8), 1)])
def test_pages_of_any_length_go_to_their_places_in_a_row_and_back(page_bytes: tuple[int, int], lane: int) -> None:
    memory = torch.randint(0, 256, (1 << 12,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before = memory.clone()
    # Two layers beside each other, block by block, with a gap behind each block.
    stride = sum(page_bytes) + 8 * lane
    first = memory.data_ptr() + 8 * lane
    runs = [PageRun(first, stride, page_bytes[0]), PageRun(first + page_bytes[0], stride, page_bytes[1])]
    table = page_table(runs, memory.device)
    assert table.lane.itemsize == lane
    rows = torch.empty(3, sum(page_bytes), dtype=torch.uint8)
    blocks = torch.tensor([7, 0, 4])
    gather_pages(table, blocks, rows)
    for row, block in zip(rows, blocks.tolist(), strict=True):
        start = 8 * lane + block * stride
        assert torch.equal(row, memory[start : start + sum(page_bytes)])
    memory.fill_(93)
    scatter_pages(rows, blocks, table)
    expected = torch.full_like(before, 93)
    for block in blocks.tolist():
        page = slice(8 * lane + block * stride, 8 * lane + block * stride + sum(page_bytes))
        expected[page] = before[page]
    assert torch.equal(memory, expected)


def test_rows_and_blocks_that_do_not_fit_the_pages_are_refused() -> None:
    memory = torch.zeros(256, dtype=torch.uint8)
    table = page_table([PageRun(memory.data_ptr(), 32, 32)], memory.device)
    rows, blocks = torch.zeros(2, 32, dtype=torch.uint8), torch.tensor([0, 1])
    for wrong_blocks, wrong_rows in [
        (blocks.view(2, 1), rows),
        (blocks.to(torch.int32), rows),
        (blocks[:1], rows),
        (blocks, rows[:, :31]),
        (blocks, rows.view(torch.int8)),
        (blocks, torch.zeros(65, dtype=torch.uint8)[1:].view(2, 32)),
    ]:
        with pytest.raises(ValueError):
            gather_pages(table, wrong_blocks, wrong_rows)
    gather_pages(table, blocks[:0], rows[:0])


class _HereAndNow:
    """A lane without a stream: on the CPU what is launched is done."""

    def after_steps(self) -> AbstractContextManager[None]:
        return nullcontext()

    def beside_steps(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.mark.parametrize(("per_block", "staging_bytes"), [(1, 1 << 20), (2, 1 << 20), (2, 1), (2, 2 * 2 * 96)])
def test_host_transfers_move_blocks_out_and_back_through_any_staging(per_block: int, staging_bytes: int) -> None:
    pool = torch.arange(8 * 24, dtype=torch.float32).reshape(8, 2, 2, 3, 1, 2)
    before = pool.clone()
    transfers = HostTransfers(pool, per_block, (_HereAndNow(), _HereAndNow()), PinnedMemory(), staging_bytes)
    groups = [[6, 1], [0, 3], [7, 2]] if per_block == 2 else [[6], [1], [4]]
    payload_bytes = pool[0].nbytes * per_block
    payloads = [memoryview(bytearray(payload_bytes)) for _ in groups]
    transfers.gather(groups, payloads)
    expected = torch.empty(len(groups), payload_bytes // 4)
    reference.gather(pool, torch.tensor(groups), expected)
    assert [bytes(payload) for payload in payloads] == [row.numpy().tobytes() for row in expected]

    pool[[block for group in groups for block in group]] = -1
    transfers.scatter([payload.toreadonly() for payload in payloads], groups)
    assert torch.equal(pool, before)


@pytest.mark.parametrize(("per_block", "staging_bytes"), [(1, 1 << 20), (2, 1 << 20), (2, 1)])
def test_host_transfers_copy_some_layers_and_leave_the_others(per_block: int, staging_bytes: int) -> None:
    pool = torch.arange(8 * 36, dtype=torch.float32).reshape(8, 3, 2, 3, 1, 2)
    before = pool.clone()
    transfers = HostTransfers(pool, per_block, (_HereAndNow(), _HereAndNow()), PinnedMemory(), staging_bytes)
    groups = [[6, 1], [0, 3], [7, 2]] if per_block == 2 else [[6], [1], [4]]
    payloads = [memoryview(bytearray(pool[0].nbytes * per_block)) for _ in groups]
    transfers.gather(groups, payloads)
    taken = [block for group in groups for block in group]
    pool[taken] = -1
    transfers.scatter_layers(payloads, groups, 1, 2)
    assert torch.equal(pool[taken, 1], before[taken, 1])
    assert bool((pool[taken][:, [0, 2]] == -1).all())
    transfers.scatter_layers(payloads, groups, 0, 1)
    transfers.scatter_layers(payloads, groups, 2, 3)
    assert torch.equal(pool, before)


@pytest.mark.parametrize("store_dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize(("per_block", "staging_bytes"), [(1, 1 << 20), (2, 1)])
def test_host_transfers_quantise_as_the_cpu_does(
    per_block: int, staging_bytes: int, store_dtype: QuantizedDtype
) -> None:
    pool = torch.randn(8, 2, 2, 3, 1, 16, generator=torch.Generator().manual_seed(0))
    lanes = (_HereAndNow(), _HereAndNow())
    transfers = HostTransfers(pool, per_block, lanes, PinnedMemory(), staging_bytes, store_dtype)
    on_cpu = CpuQuantizer(pool, per_block, store_dtype)
    groups = [[6, 1], [0, 3], [7, 2]] if per_block == 2 else [[6], [1], [4]]
    found = [memoryview(bytearray(on_cpu.payload_bytes)) for _ in groups]
    expected = [memoryview(bytearray(on_cpu.payload_bytes)) for _ in groups]
    transfers.gather(groups, found)
    on_cpu.gather(groups, expected)
    assert found == expected

    on_cpu.scatter(found, groups)
    from_cpu = pool.clone()
    pool.fill_(-1)
    transfers.scatter(found, groups)
    named = [block for group in groups for block in group]
    assert torch.equal(pool[named], from_cpu[named])
    assert bool((pool[5] == -1).all())
