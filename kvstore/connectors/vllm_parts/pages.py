"""The bytes of vLLM's KV cache, block by block: where they lie, and copies from and to a slot.

Each layer has one page per pool block, a run of `page_bytes` bytes; what is in a page (heads, K and V, packing for the
instruction set) is the attention backend's own and is copied as it is. A payload is the pages of one block, layer after
layer, followed by the seal (`seal.py`):

    | layer 0's page | layer 1's page | … | seal |
"""

import contextlib
import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.connectors.vllm_parts.seal import SEAL_BYTES
from kvstore.core.errors import ConfigError
from tiers import pages as tier_pages

_PIN_STEP_BYTES = 256 << 20
_Bytes = npt.NDArray[np.uint8]


class Tensor(Protocol):
    """What is asked of a torch tensor."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def device(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...

    def data_ptr(self) -> int: ...

    def element_size(self) -> int: ...

    def stride(self) -> Sequence[int]: ...


class Pages(Protocol):
    """Copies of whole blocks without their seals. Thread-safe; both return when the bytes are there."""

    @property
    def payload_bytes(self) -> int: ...

    def mark(self) -> object:
        """Return a point in the device's work: what has been queued so far."""
        ...

    def gather(self, block_ids: Sequence[int], outs: Sequence[memoryview], after: object) -> None:
        """Copy the pages of block i into `outs[i]`, once the work before the mark `after` is done."""
        ...

    def scatter(self, payloads: Sequence[memoryview], block_ids: Sequence[int], after: object) -> None: ...

    def pin(self, address: int, num_bytes: int, goes_on: Callable[[], bool]) -> None:
        """See `kvstore.region_pin.Pinning`."""
        ...

    def unpin(self, address: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's pages: block b's begins at `address + b * stride_bytes`."""

    name: str
    address: int
    stride_bytes: int
    page_bytes: int
    num_blocks: int
    form: str


def describe(name: str, cache: Tensor, num_blocks: int) -> Layer:
    """Return where the layer's pages lie. Raises ConfigError where a block of it is not one run of bytes.

    `cache` has kernel blocks in its first dimension, a whole number of them for each of `num_blocks` pool blocks.
    """
    size = cache.element_size()
    shape, strides = tuple(cache.shape), tuple(cache.stride())
    if len(shape) < 2 or shape[0] % num_blocks:
        raise ConfigError(f"the KV cache of {name} has the shape {shape}, which is not one of {num_blocks} blocks")
    per_block = shape[0] // num_blocks
    inner = 1
    for extent in shape[1:]:
        inner *= extent
    dims = sorted((stride, extent) for extent, stride in zip(shape[1:], strides[1:], strict=True) if extent > 1)
    run = 1
    for stride, extent in dims:
        if stride != run:
            break
        run *= extent
    # Kernel blocks of one pool block must follow each other as well.
    if run != inner or (per_block > 1 and strides[0] != inner):
        raise ConfigError(
            f"the KV cache of {name} does not keep a block's bytes together (shape {shape}, strides {strides}): choose "
            "another layout with VLLM_KV_CACHE_LAYOUT, such as LBNHC, or another attention backend"
        )
    form = f"{shape[1:]} {strides[1:]} {per_block} {cache.dtype}"
    return Layer(name, cache.data_ptr(), strides[0] * per_block * size, inner * per_block * size, num_blocks, form)


def describe_all(caches: Mapping[str, Tensor], names: Sequence[str], num_blocks: int) -> list[Layer]:
    """Return the layers in the order of `names`. Layers that share their memory (KV sharing) are taken once."""
    layers = []
    seen: set[int] = set()
    for name in names:
        if name not in caches:
            raise ConfigError(f"vLLM registered no KV cache for the layer {name}")
        layer = describe(name, caches[name], num_blocks)
        if layer.address not in seen:
            seen.add(layer.address)
            layers.append(layer)
    return layers


class HostPages:
    """Pages in host memory, copied with numpy, which lets other threads run meanwhile."""

    def __init__(self, layers: Sequence[Layer], keep: object) -> None:
        """`keep` holds the memory alive."""
        self._keep = keep
        self.num_blocks = layers[0].num_blocks
        self.body_bytes = sum(layer.page_bytes for layer in layers)
        self._tables = _tables(layers)

    @property
    def payload_bytes(self) -> int:
        return self.body_bytes + SEAL_BYTES

    def mark(self) -> object:
        return None

    def gather(self, block_ids: Sequence[int], outs: Sequence[memoryview], after: object) -> None:
        for block_id, out in zip(block_ids, outs, strict=True):
            for start, end, table in self._tables:
                part = np.frombuffer(out[start:end], np.uint8).reshape(table.shape[1:])
                np.copyto(part, table[block_id])

    def scatter(self, payloads: Sequence[memoryview], block_ids: Sequence[int], after: object) -> None:
        for block_id, payload in zip(block_ids, payloads, strict=True):
            for start, end, table in self._tables:
                part = np.frombuffer(payload[start:end], np.uint8).reshape(table.shape[1:])
                np.copyto(table[block_id], part)

    def pin(self, address: int, num_bytes: int, goes_on: Callable[[], bool]) -> None:
        """Enter the region into the page table ahead of the copies; a first touch costs as much as eight warm ones."""
        # What cannot be entered now is when it is used.
        with contextlib.suppress(OSError):
            for start in range(0, num_bytes, _PIN_STEP_BYTES):
                step = min(_PIN_STEP_BYTES, num_bytes - start)
                if not goes_on() or not tier_pages.populate(address + start, step, 1):
                    return

    def unpin(self, address: int) -> None:
        return


def _tables(layers: Sequence[Layer]) -> list[tuple[int, int, _Bytes]]:
    """Return (start, end, table) of each part of the payload: tables are [num_blocks, layers of the part, page_bytes],
    over as many layers as lie at one distance from each other."""
    tables = []
    start = first = 0
    while first < len(layers):
        last = first + 1
        while last < len(layers) and _continues(layers[first : last + 1]):
            last += 1
        part = layers[first:last]
        end = start + sum(layer.page_bytes for layer in part)
        tables.append((start, end, _table(part)))
        start, first = end, last
    return tables


def _continues(layers: Sequence[Layer]) -> bool:
    distance = layers[1].address - layers[0].address
    return (
        distance > 0
        and layers[-1].address - layers[-2].address == distance
        and len({(layer.page_bytes, layer.stride_bytes) for layer in layers}) == 1
    )


def _table(layers: Sequence[Layer]) -> _Bytes:
    first, last = layers[0], layers[-1]
    distance = layers[1].address - first.address if len(layers) > 1 else first.page_bytes
    extent = last.address - first.address + (first.num_blocks - 1) * first.stride_bytes + first.page_bytes
    whole = np.ctypeslib.as_array((ctypes.c_uint8 * extent).from_address(first.address))
    return np.lib.stride_tricks.as_strided(
        whole, (first.num_blocks, len(layers), first.page_bytes), (first.stride_bytes, distance, 1)
    )
