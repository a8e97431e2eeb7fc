"""Copies blocks between pages of layers that lie anywhere in device memory and rows of bytes, in one launch each way.

For engines whose layers are tensors of their own, of one size or of several: `kernels.gather` and `kernels.scatter`
need one pool of equal layers. A layer has one page per pool block, a run of bytes; a row is a block's pages, layer
after layer:

    | layer 0's page | layer 1's page | … |

What a page holds does not matter. Addresses go to the device in a table, once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gather import NUM_WARPS, TILE_LANES

# A large page is the work of several programs: one block alone should keep more than a few multiprocessors busy.
TILES_PER_PROGRAM = 4
_LANES = (torch.int64, torch.int32, torch.int16, torch.int8)
# The widest that one thread loads at once.
_ALIGNED_BYTES = 16


@dataclass(frozen=True, slots=True)
class PageRun:
    """One layer's pages: block b's are the `page_bytes` bytes from `address + b * stride_bytes` on."""

    address: int
    stride_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class PageTable:
    """`entries` is `[num_layers, 4]` int64 on the device: address, bytes from block to block, then place in a row and
    length, both in lanes of the dtype `lane`. `is_aligned`: all of them are multiples of 16 bytes."""

    entries: torch.Tensor
    lane: torch.dtype
    row_bytes: int
    max_page_lanes: int
    is_aligned: bool


def page_table(runs: Sequence[PageRun], device: torch.device) -> PageTable:
    """Return the table of layers whose pages lie on `device`. The memory must stay for as long as the table is used."""
    starts = [sum(run.page_bytes for run in runs[:index]) for index in range(len(runs))]
    row_bytes = sum(run.page_bytes for run in runs)
    numbers = [row_bytes, *starts]
    for run in runs:
        numbers += [run.address, run.stride_bytes, run.page_bytes]
    lane = next(lane for lane in _LANES if not any(number % lane.itemsize for number in numbers))
    entries = [
        [run.address, run.stride_bytes, start // lane.itemsize, run.page_bytes // lane.itemsize]
        for run, start in zip(runs, starts, strict=True)
    ]
    return PageTable(
        entries=torch.tensor(entries, dtype=torch.int64).to(device),
        lane=lane,
        row_bytes=row_bytes,
        max_page_lanes=max(run.page_bytes for run in runs) // lane.itemsize,
        is_aligned=not any(number % _ALIGNED_BYTES for number in numbers),
    )


def gather_pages(table: PageTable, blocks: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy the pages of block `blocks[i]` into `rows[i]`; on a GPU on the current stream, without waiting.

    `blocks` is `[num_rows]` int64, `rows` `[num_rows, table.row_bytes]` uint8, contiguous. Raises ValueError where they
    do not fit each other. Block numbers are not checked: they are on the device.
    """
    _launch(gather_pages_kernel, table, blocks, rows)


def scatter_pages(rows: torch.Tensor, blocks: torch.Tensor, table: PageTable) -> None:
    """Copy `rows[i]` into the pages of block `blocks[i]`: `gather_pages` backwards. A block named twice gets one of its
    rows or a mixture of them."""
    _launch(scatter_pages_kernel, table, blocks, rows)


def _launch(kernel: Any, table: PageTable, blocks: torch.Tensor, rows: torch.Tensor) -> None:
    if blocks.dim() != 1 or blocks.dtype != torch.int64 or not blocks.is_contiguous():
        raise ValueError("blocks must be a contiguous [num_rows] int64 tensor")
    if rows.shape != (len(blocks), table.row_bytes) or rows.dtype != torch.uint8 or not rows.is_contiguous():
        raise ValueError(
            f"rows are {tuple(rows.shape)} {rows.dtype}, expected {len(blocks)} of {table.row_bytes} bytes"
        )
    if not blocks.device == rows.device == table.entries.device:
        raise ValueError("blocks, rows and pages must be on one device")
    if rows.data_ptr() % table.lane.itemsize:
        raise ValueError(f"rows must begin at a multiple of {table.lane.itemsize} bytes")
    if not len(blocks):
        return
    parts = triton.cdiv(table.max_page_lanes, TILE_LANES * TILES_PER_PROGRAM)
    kernel[(len(blocks), len(table.entries), parts)](
        table.entries,
        blocks,
        rows.view(table.lane),
        table.row_bytes // table.lane.itemsize,
        IS_ALIGNED=table.is_aligned and rows.data_ptr() % _ALIGNED_BYTES == 0,
        TILE=TILE_LANES,
        TILES=TILES_PER_PROGRAM,
        num_warps=NUM_WARPS,
    )


@triton.jit  # type: ignore[untyped-decorator]
def gather_pages_kernel(  # type: ignore[no-untyped-def]
    entries, blocks, rows, row_lanes, IS_ALIGNED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr
):
    """Program (i, l, p) copies part p of layer l's page of the i-th block of the launch."""
    page, place, page_lanes = _page_and_place(entries, blocks, rows, row_lanes, IS_ALIGNED)
    for tile in tl.static_range(TILES):
        lanes = (tl.program_id(2) * TILES + tile) * TILE + tl.arange(0, TILE)
        inside = lanes < page_lanes
        tl.store(place + lanes, tl.load(page + lanes, mask=inside), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def scatter_pages_kernel(  # type: ignore[no-untyped-def]
    entries, blocks, rows, row_lanes, IS_ALIGNED: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr
):
    """As `gather_pages_kernel`, the other way."""
    page, place, page_lanes = _page_and_place(entries, blocks, rows, row_lanes, IS_ALIGNED)
    for tile in tl.static_range(TILES):
        lanes = (tl.program_id(2) * TILES + tile) * TILE + tl.arange(0, TILE)
        inside = lanes < page_lanes
        tl.store(page + lanes, tl.load(place + lanes, mask=inside), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _page_and_place(entries, blocks, rows, row_lanes, IS_ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0).to(tl.int64)
    entry = entries + tl.program_id(1) * 4
    # 64 bits: block times stride is more than 2^31 bytes in ordinary pools.
    address = tl.load(entry) + tl.load(blocks + index) * tl.load(entry + 1)
    page = address.to(rows.dtype)
    place = rows + index * row_lanes + tl.load(entry + 2)
    page_lanes = tl.load(entry + 3)
    if IS_ALIGNED:
        # Else nothing tells the compiler so of what comes out of memory, and each thread loads 8 bytes at once, not 16.
        page = tl.multiple_of(page, 16)
        place = tl.multiple_of(place, 16)
        page_lanes = tl.multiple_of(page_lanes, 2)
    return page, place, page_lanes
