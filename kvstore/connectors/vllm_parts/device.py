"""Pages in a GPU's memory: collected and spread by our kernels, on streams of their own, from and to the pinned region.

    store   compute stream ── mark ──► out stream: gather to staging ─► one transfer per block ─► slots
    load                               in stream:  one transfer per block ─► staging ─► scatter to pages

A mark is an event on the compute stream: what was queued before it is done before pages are read or written, what comes
after is not waited for. A call returns when its bytes are there; leaving a lane waits for its stream, so nothing is
written afterwards.

The kernels have a table of where each layer's pages lie (`kernels.pages`), so layers may be of several sizes and in
several buffers. Before anything else the copies are tried on the device itself, against torch: they were compiled for
GPUs and run by the kernels' interpreter, and have not run on a GPU yet.
"""

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from kernels.pages import PageRun, gather_pages, page_table, scatter_pages
from kernels.pinned import PinnedMemory
from kvstore.connectors.vllm_parts.pages import Layer
from kvstore.connectors.vllm_parts.seal import SEAL_BYTES
from kvstore.core.errors import ConfigError

# Device memory that one direction may take for blocks on their way.
_STAGING_BYTES = 64 << 20
# Never a request's: vLLM keeps block 0 for places that hold nothing.
_TRIED_BLOCK = 0


class Lane(Protocol):
    """One direction. Entered by one thread at a time; what is launched inside is done when it is left."""

    def mark(self) -> object:
        """Return a point behind all that the calling thread's stream has been given."""
        ...

    def entered(self, after: object) -> AbstractContextManager[None]:
        """Enter; what is launched inside comes after the mark `after`, None: after nothing."""
        ...

    def on_device(self) -> AbstractContextManager[None]:
        """Make the lane's device the calling thread's: a new thread has the first GPU, whatever its rank."""
        ...


class CudaLane:
    """A lane on a CUDA stream of its own. `cuda` is torch's module of that name."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device)
        self._lock = threading.Lock()

    def mark(self) -> object:
        # vLLM computes on a stream that is current for its own thread and is not the default one.
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        return event

    @contextmanager
    def entered(self, after: object) -> Iterator[None]:
        # Entering the stream makes its device current as well.
        with self._lock, self._cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            try:
                yield
            finally:
                # Also after an error: the caller may give the host memory, or the pages, to others now.
                self._stream.synchronize()

    def on_device(self) -> AbstractContextManager[None]:
        current: AbstractContextManager[None] = self._cuda.device(self._device)
        return current


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
        """Raises ConfigError where the layers are on several devices."""
        devices = {caches[layer.name].device for layer in layers}
        if len(devices) != 1:
            raise ConfigError(f"one worker's KV caches are on several devices: {', '.join(sorted(map(str, devices)))}")
        (self._device,) = devices
        self._layers = list(layers)
        # Holds the memory alive.
        self._caches = caches
        self._num_blocks = min(layer.num_blocks for layer in layers)
        runs = [PageRun(layer.address, layer.stride_bytes, layer.page_bytes) for layer in layers]
        self._table = page_table(runs, self._device)
        self._out_lane, self._in_lane = lanes or (CudaLane(self._device), CudaLane(self._device))
        self._pinned = pinned or PinnedMemory()
        self.body_bytes = self._table.row_bytes
        rows = max(1, min(self._num_blocks, staging_bytes // self.body_bytes))
        self._out_rows = torch.empty(rows, self.body_bytes, dtype=torch.uint8, device=self._device)
        self._in_rows = torch.empty_like(self._out_rows)

    @property
    def payload_bytes(self) -> int:
        return self.body_bytes + SEAL_BYTES

    def mark(self) -> object:
        return self._out_lane.mark()

    def gather(self, block_ids: Sequence[int], outs: Sequence[memoryview], after: object) -> None:
        self._check(block_ids, outs)
        with self._out_lane.entered(after):
            for some in _rounds(len(block_ids), len(self._out_rows)):
                ids, views = block_ids[some], outs[some]
                rows = self._out_rows[: len(ids)]
                gather_pages(self._table, self._on_device(ids), rows)
                for row, view in zip(rows, views, strict=True):
                    self._transfer(row, view, to_host=True)

    def scatter(self, payloads: Sequence[memoryview], block_ids: Sequence[int], after: object) -> None:
        self._check(block_ids, payloads)
        with self._in_lane.entered(after):
            for some in _rounds(len(block_ids), len(self._in_rows)):
                ids, views = block_ids[some], payloads[some]
                rows = self._in_rows[: len(ids)]
                for row, view in zip(rows, views, strict=True):
                    self._transfer(row, view, to_host=False)
                scatter_pages(rows, self._on_device(ids), self._table)

    def pin(self, address: int, num_bytes: int, goes_on: Callable[[], bool]) -> None:
        """Raises ConfigError where the driver refuses; then nothing stays pinned."""
        try:
            with self._in_lane.on_device():
                self._pinned.pin(address, num_bytes, goes_on)
        except MemoryError as error:
            raise ConfigError(f"{error}; is the limit on locked memory (ulimit -l) large enough?") from error

    def unpin(self, address: int) -> None:
        with self._in_lane.on_device():
            self._pinned.unpin(address)

    def try_out(self) -> None:
        """Copy one block in and out and compare with what torch reads; compiles the kernels, so that no request waits
        for that. Nothing else may use the KV cache meanwhile, which keeps its content. Raises ConfigError on any
        difference."""
        pages = [_bytes_of(self._caches[layer.name], layer) for layer in self._layers]
        sample = memoryview(bytearray(random.Random(0).randbytes(self.body_bytes)))
        before, again = memoryview(bytearray(self.body_bytes)), memoryview(bytearray(self.body_bytes))
        neighbours = [page[_TRIED_BLOCK + 1 :][:1].cpu() for page in pages]
        self.gather([_TRIED_BLOCK], [before], self.mark())
        self.scatter([sample], [_TRIED_BLOCK], None)
        read = b"".join(page[_TRIED_BLOCK].cpu().numpy().tobytes() for page in pages)
        self.gather([_TRIED_BLOCK], [again], None)
        self.scatter([before], [_TRIED_BLOCK], None)
        is_left_alone = all(
            torch.equal(page[_TRIED_BLOCK + 1 :][:1].cpu(), neighbour)
            for page, neighbour in zip(pages, neighbours, strict=True)
        )
        if read != sample or again != sample or not is_left_alone:
            raise ConfigError(
                f"kvstore's copies of KV-cache blocks came out wrong on {self._device}; do not use it there"
            )

    def _check(self, block_ids: Sequence[int], views: Sequence[memoryview]) -> None:
        if len(block_ids) != len(views) or any(view.nbytes != self.body_bytes for view in views):
            raise ValueError(f"each of {len(block_ids)} blocks needs {self.body_bytes} bytes")
        # On a GPU a wrong number would be somebody else's memory.
        if any(not 0 <= block < self._num_blocks for block in block_ids):
            raise ValueError(f"a block lies outside of the KV cache's {self._num_blocks}")

    def _transfer(self, row: torch.Tensor, view: memoryview, *, to_host: bool) -> None:
        host = torch.frombuffer(view, dtype=torch.uint8)
        start = 0
        for count in self._pinned.unbroken(host.data_ptr(), len(host)):
            here, there = host[start : start + count], row[start : start + count]
            target, source = (here, there) if to_host else (there, here)
            target.copy_(source, non_blocking=True)
            start += count

    def _on_device(self, block_ids: Sequence[int]) -> torch.Tensor:
        # Not blocking, so that transfers queue up behind it; the driver has taken the few bytes when this returns.
        return torch.tensor(block_ids, dtype=torch.int64).to(self._device, non_blocking=True)


def _bytes_of(cache: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Return the layer's pages as torch sees them, `[num_blocks, page_bytes]` uint8."""
    storage = cache.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)
    return whole.as_strided(
        (layer.num_blocks, layer.page_bytes), (layer.stride_bytes, 1), layer.address - storage.data_ptr()
    )


def _rounds(count: int, at_once: int) -> Iterator[slice]:
    """Rows are used again by the next round without waiting: everything of a lane happens in its stream's order."""
    for first in range(0, count, at_once):
        yield slice(first, first + at_once)
