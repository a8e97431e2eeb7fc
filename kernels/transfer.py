"""Moves blocks between the paged pool on a GPU and host memory.

Where a block is one pool block and stored as it is, each is one transfer. Else the segments of its pool blocks are
collected by a kernel in a staging buffer, quantised on the way if asked for, for many blocks in one launch, and each
block is one transfer from there; backwards likewise.
Each direction has a stream of its own, so that a load, a store and a step of the model overlap.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from kernels.gather import gather
from kernels.pinned import PinnedMemory
from kernels.quantize import dequantize_scatter, quantize_gather
from kernels.quantized import QuantizedDtype, payload_bytes_of
from kernels.scatter import scatter

# Device memory that one direction may take for blocks on their way.
STAGING_BYTES = 64 << 20


class Lane(Protocol):
    """One direction's place in the order of things: entered by one thread at a time; what is launched inside runs in
    order, and is done when the lane is left."""

    def after_steps(self) -> AbstractContextManager[None]:
        """Enter, and let what is launched inside wait for the model's steps queued so far."""
        ...

    def beside_steps(self) -> AbstractContextManager[None]:
        """Enter, and let what is launched inside run whatever the model does."""
        ...


class HostTransfers:
    """Copies blocks, given as groups of pool blocks, out of and into `pool`. Thread-safe.

    `pool` is contiguous, `[num_pool_blocks, num_layers, 2, pool_block_tokens, num_kv_heads, head_dim]`. Block numbers
    and lengths are taken as valid.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        pool_blocks_per_block: int,
        lanes: tuple[Lane, Lane],
        pinned: PinnedMemory,
        staging_bytes: int = STAGING_BYTES,
        store_dtype: QuantizedDtype | None = None,
    ) -> None:
        self._pool = pool
        self._pool_bytes = pool.view(torch.uint8).view(pool.shape[0], -1)
        self._per_block = pool_blocks_per_block
        self._out_lane, self._in_lane = lanes
        payload_bytes = payload_bytes_of(pool, pool_blocks_per_block, store_dtype)
        self._out_staging = _Staging(payload_bytes, pool.device, staging_bytes)
        self._in_staging = _Staging(payload_bytes, pool.device, staging_bytes)
        self._store_dtype = store_dtype
        self._pinned = pinned

    def gather(self, groups: Sequence[Sequence[int]], outs: Sequence[memoryview]) -> None:
        """Copy block i out of the pool blocks `groups[i]` into `outs[i]`; returns when all bytes are there."""
        with self._out_lane.after_steps():
            if self._per_block == 1 and self._store_dtype is None:
                for (block,), out in zip(groups, outs, strict=True):
                    self._transfer(self._pool_bytes[block], out, to_host=True)
                return
            for some, rows in self._out_staging.rounds(len(groups)):
                self._pack(self._indices(groups[some]), rows)
                for row, out in zip(rows, outs[some], strict=True):
                    self._transfer(row, out, to_host=True)

    def scatter(self, payloads: Sequence[memoryview], groups: Sequence[Sequence[int]]) -> None:
        """Copy `payloads[i]` into the pool blocks `groups[i]`; returns when all bytes are there.

        No queued step may still use these pool blocks: the copies run beside it.
        """
        with self._in_lane.beside_steps():
            if self._per_block == 1 and self._store_dtype is None:
                for payload, (block,) in zip(payloads, groups, strict=True):
                    self._transfer(self._pool_bytes[block], payload, to_host=False)
                return
            for some, rows in self._in_staging.rounds(len(groups)):
                for row, payload in zip(rows, payloads[some], strict=True):
                    self._transfer(row, payload, to_host=False)
                self._unpack(rows, self._indices(groups[some]))

    def scatter_layers(
        self, payloads: Sequence[memoryview], groups: Sequence[Sequence[int]], first: int, end: int
    ) -> None:
        """As `scatter`, the layers [first, end) alone, of blocks that are stored as they are; queued steps may use the
        others."""
        assert self._store_dtype is None, "the layers of a quantised payload do not lie together"
        num_layers = self._pool.shape[1]
        layer_bytes = self._pool_bytes.shape[1] * self._per_block // num_layers
        part = slice(first * layer_bytes, end * layer_bytes)
        with self._in_lane.beside_steps():
            if self._per_block == 1:
                for payload, (block,) in zip(payloads, groups, strict=True):
                    self._transfer(self._pool_bytes[block, part], payload[part], to_host=False)
                return
            for some, rows in self._in_staging.rounds(len(groups)):
                for row, payload in zip(rows, payloads[some], strict=True):
                    self._transfer(row[part], payload[part], to_host=False)
                layers = self._pool[:, first:end]
                scatter(rows[:, part].view(self._pool.dtype), self._indices(groups[some]), layers)

    def _pack(self, pool_blocks: torch.Tensor, rows: torch.Tensor) -> None:
        if self._store_dtype is None:
            gather(self._pool, pool_blocks, rows.view(self._pool.dtype))
        else:
            quantize_gather(self._pool, pool_blocks, rows, self._store_dtype)

    def _unpack(self, rows: torch.Tensor, pool_blocks: torch.Tensor) -> None:
        if self._store_dtype is None:
            scatter(rows.view(self._pool.dtype), pool_blocks, self._pool)
        else:
            dequantize_scatter(rows, pool_blocks, self._pool, self._store_dtype)

    def _transfer(self, device_bytes: torch.Tensor, view: memoryview, *, to_host: bool) -> None:
        # A read-only buffer cannot become a tensor; no region hands one out, so the extra copy does not matter.
        host = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
        start = 0
        for count in self._pinned.unbroken(host.data_ptr(), len(host)):
            here, there = host[start : start + count], device_bytes[start : start + count]
            target, source = (here, there) if to_host else (there, here)
            target.copy_(source, non_blocking=True)
            start += count

    def _indices(self, groups: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor([list(group) for group in groups], dtype=torch.int64).to(self._pool.device)


class _Staging:
    """One direction's buffer for blocks on their way, `[rows, payload bytes]`; it grows up to a limit and stays."""

    def __init__(self, payload_bytes: int, device: torch.device, limit_bytes: int) -> None:
        self._payload_bytes = payload_bytes
        self._device = device
        self._max_rows = max(1, limit_bytes // payload_bytes)
        self._rows: torch.Tensor | None = None

    def rounds(self, num_blocks: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield which of `num_blocks` blocks go next, and their rows. Rows are used again by the next round without
        waiting: everything of a lane happens in the order of its stream."""
        want = min(self._max_rows, num_blocks)
        if self._rows is None or len(self._rows) < want:
            self._rows = torch.empty(want, self._payload_bytes, dtype=torch.uint8, device=self._device)
        for first in range(0, num_blocks, len(self._rows)):
            some = slice(first, min(first + len(self._rows), num_blocks))
            yield some, self._rows[: some.stop - some.start]


class StreamLane:
    """A lane on a CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    def after_steps(self) -> AbstractContextManager[None]:
        return self._entered(torch.cuda.default_stream(self._device))

    def beside_steps(self) -> AbstractContextManager[None]:
        return self._entered(None)

    @contextmanager
    def _entered(self, awaited: torch.cuda.Stream | None) -> Iterator[None]:
        with self._lock, torch.cuda.stream(self._stream):
            if awaited is not None:
                self._stream.wait_stream(awaited)
            try:
                yield
            finally:
                # Also after an error: the caller may give the host memory back now.
                self._stream.synchronize()
