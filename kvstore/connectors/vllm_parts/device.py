"""Pages in a GPU's memory: collected and spread by our kernels, on streams of their own, from and to the pinned region.

    store   compute stream ── mark ──► out stream: gather to staging ─► one transfer per block ─► slots
    load                               in stream:  one transfer per block ─► staging ─► scatter to pages

The kernels see vLLM's layers as one pool by strides: all layers lie in one buffer at one distance from each other, and
what a page holds does not matter to a copy, so each page counts as two halves of one token and one head. A mark is an
event on the compute stream: what was queued before it is done before pages are read, what comes after is not waited
for. A call returns when its bytes are there; leaving a lane waits for its stream, so nothing is written afterwards.

Written for CUDA and checked with the kernels' interpreter; it has not run on a GPU yet.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from kernels.gather import gather
from kernels.pinned import PinnedMemory
from kernels.scatter import scatter
from kvstore.connectors.vllm_parts.pages import Layer
from kvstore.connectors.vllm_parts.seal import SEAL_BYTES
from kvstore.core.errors import ConfigError

# Device memory that one direction may take for blocks on their way.
_STAGING_BYTES = 64 << 20


class Lane(Protocol):
    """One direction. Entered by one thread at a time; what is launched inside is done when it is left."""

    def mark(self) -> object: ...

    def entered(self, after: object) -> Any: ...


class CudaLane:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    def mark(self) -> object:
        """Return an event behind all that the calling thread's stream has been given."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def entered(self, after: object) -> Iterator[None]:
        with self._lock, torch.cuda.stream(self._stream):
            if isinstance(after, torch.cuda.Event):
                self._stream.wait_event(after)
            try:
                yield
            finally:
                # Also after an error: the caller may give the host memory, or the pages, to others now.
                self._stream.synchronize()


class DevicePages:
    """As `pages.Pages`. `lanes`: out of the pages, and into them."""

    def __init__(
        self,
        layers: Sequence[Layer],
        caches: Mapping[str, torch.Tensor],
        lanes: tuple[Lane, Lane] | None = None,
        pinned: PinnedMemory | None = None,
        staging_bytes: int = _STAGING_BYTES,
    ) -> None:
        """Raises ConfigError where the layers do not lie at one distance from each other."""
        self._pool = pool_of(layers, caches)
        device = self._pool.device
        both: tuple[Lane, Lane] = lanes or (CudaLane(device), CudaLane(device))
        self._out_lane, self._in_lane = both
        self._pinned = pinned or PinnedMemory()
        self.body_bytes = sum(layer.page_bytes for layer in layers)
        rows = max(1, staging_bytes // self.body_bytes)
        self._out_rows = torch.empty(rows, self.body_bytes, dtype=torch.uint8, device=device)
        self._in_rows = torch.empty_like(self._out_rows)

    @property
    def payload_bytes(self) -> int:
        return self.body_bytes + SEAL_BYTES

    def mark(self) -> object:
        return self._out_lane.mark()

    def gather(self, block_ids: Sequence[int], outs: Sequence[memoryview], after: object) -> None:
        with self._out_lane.entered(after):
            for some in _rounds(len(block_ids), len(self._out_rows)):
                ids, views = block_ids[some], outs[some]
                rows = self._out_rows[: len(ids)]
                gather(self._pool, self._indices(ids), rows)
                for row, view in zip(rows, views, strict=True):
                    self._transfer(row, view, to_host=True)

    def scatter(self, payloads: Sequence[memoryview], block_ids: Sequence[int], after: object) -> None:
        with self._in_lane.entered(after):
            for some in _rounds(len(block_ids), len(self._in_rows)):
                ids, views = block_ids[some], payloads[some]
                rows = self._in_rows[: len(ids)]
                for row, view in zip(rows, views, strict=True):
                    self._transfer(row, view, to_host=False)
                scatter(rows, self._indices(ids), self._pool)

    def pin(self, address: int, num_bytes: int, goes_on: Callable[[], bool]) -> None:
        """Raises ConfigError where the driver refuses; then nothing stays pinned."""
        try:
            self._pinned.pin(address, num_bytes, goes_on)
        except MemoryError as error:
            raise ConfigError(f"{error}; is the limit on locked memory (ulimit -l) large enough?") from error

    def unpin(self, address: int) -> None:
        self._pinned.unpin(address)

    def _transfer(self, row: torch.Tensor, view: memoryview, *, to_host: bool) -> None:
        host = torch.frombuffer(view, dtype=torch.uint8)
        start = 0
        for count in self._pinned.unbroken(host.data_ptr(), len(host)):
            here, there = host[start : start + count], row[start : start + count]
            target, source = (here, there) if to_host else (there, here)
            target.copy_(source, non_blocking=True)
            start += count

    def _indices(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([[block] for block in block_ids], dtype=torch.int64).to(self._pool.device)


def pool_of(layers: Sequence[Layer], caches: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the pages as `[num_blocks, num_layers, 2, 1, 1, half a page]` bytes. Raises ConfigError."""
    first = layers[0]
    distance = layers[1].address - first.address if len(layers) > 1 else first.page_bytes
    is_even = all(
        (layer.page_bytes, layer.stride_bytes) == (first.page_bytes, first.stride_bytes)
        and layer.address == first.address + index * distance
        for index, layer in enumerate(layers)
    )
    storages = {caches[layer.name].untyped_storage().data_ptr() for layer in layers}
    if not is_even or distance <= 0 or len(storages) != 1 or first.page_bytes % 2:
        raise ConfigError(
            "the layers' KV caches do not lie at one distance from each other in one buffer, so they cannot be copied "
            "together: choose another layout with VLLM_KV_CACHE_LAYOUT, such as LBNHC"
        )
    cache = caches[first.name]
    whole = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    half = first.page_bytes // 2
    return whole.as_strided(
        (first.num_blocks, len(layers), 2, 1, 1, half),
        (first.stride_bytes, distance, half, half, half, 1),
        storage_offset=first.address - cache.untyped_storage().data_ptr(),
    )


def _rounds(count: int, at_once: int) -> Iterator[slice]:
    """Rows are used again by the next round without waiting: everything of a lane happens in its stream's order."""
    for first in range(0, count, at_once):
        yield slice(first, first + at_once)
