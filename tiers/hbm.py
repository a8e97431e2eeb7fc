"""The HBM tier: the engine's paged pool as a tensor, and copies between its pool blocks and block payloads.

Covers: the bytes. `gather` and `scatter` copy one block for the engine's movers, who know the pool blocks from the
engine's own allocator (`engine.pool`); the methods of `tiers.base.Tier` use a key index and a free list of this
class, for a pool that nobody else hands out. Does not cover: computing KV, deciding what stays.

The pool is `[num_pool_blocks, num_layers, 2, pool_block_tokens, num_kv_heads, head_dim]` contiguous; a payload is
`[num_layers, 2, block_tokens, num_kv_heads, head_dim]`. With one pool block per block the two are equal byte for byte
and a copy is one memcpy; else each of the num_layers * 2 segments of a pool block has its own place in the payload.
With a `store_dtype` a payload is smaller than the block, and not quite it: `kernels.quantized` says what it holds.

The copy of a block between the paged pool and a slot, in one call each way, on a CPU as on a GPU:

    hbm = HbmTier(pool, block_tokens)
    hbm.gather(pool_blocks, slot); hbm.scatter(slot, pool_blocks)      # slot: a memoryview of payload_bytes

On a GPU the copies run on streams of their own (`kernels.transfer`); payloads should lie in memory that was pinned.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kernels.pinned import PIECE_BYTES, PinnedMemory
from kernels.quantize_cpu import CpuQuantizer
from kernels.quantized import QuantizedDtype, payload_bytes_of
from kvstore.core.block import BlockMeta
from kvstore.core.errors import ConfigError
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome, TierKind
from tiers import pages
from tiers.base import RecoveredBatch, Usage
from tiers.batch import check_lengths


class _Copies(Protocol):
    """Copies blocks, given as groups of pool blocks, to and from payload views; returns when all is copied."""

    def gather(self, groups: Sequence[Sequence[int]], outs: Sequence[memoryview]) -> None: ...

    def scatter(self, payloads: Sequence[memoryview], groups: Sequence[Sequence[int]]) -> None: ...


class _LayerCopies(_Copies, Protocol):
    """Knows the layers of a payload."""

    def scatter_layers(
        self, payloads: Sequence[memoryview], groups: Sequence[Sequence[int]], first: int, end: int
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class _Resident:
    meta: BlockMeta
    pool_blocks: tuple[int, ...]


class HbmTier:
    """Implements `tiers.base.Tier` over a pool tensor, which it does not own. Thread-safe; copies release the
    interpreter lock.

    `gather` and `scatter` take no lock against each other: that nobody reads a pool block while it is written is up
    to whoever hands pool blocks out. The Tier methods hold this tier's lock while they copy.
    """

    def __init__(self, pool: torch.Tensor, block_tokens: int, store_dtype: QuantizedDtype | None = None) -> None:
        if pool.dim() != 6 or pool.shape[2] != 2 or not pool.is_contiguous():
            raise ConfigError(f"{tuple(pool.shape)} is no contiguous pool [blocks, layers, 2, tokens, heads, head_dim]")
        if block_tokens < 1 or block_tokens % pool.shape[3]:
            raise ConfigError(f"block_tokens {block_tokens} is not a whole number of pool blocks of {pool.shape[3]}")
        self.pool_blocks_per_block = block_tokens // pool.shape[3]
        try:
            self.payload_bytes = payload_bytes_of(pool, self.pool_blocks_per_block, store_dtype)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._pool_block_bytes = pool[0].nbytes
        self._num_pool_blocks = pool.shape[0]
        self._num_layers = pool.shape[1]
        self._pinned = PinnedMemory() if pool.is_cuda else None
        self._copies: _Copies
        self._layer_copies: _LayerCopies | None = None
        if store_dtype is not None and self._pinned is None:
            self._copies = CpuQuantizer(pool, self.pool_blocks_per_block, store_dtype)
        else:
            self._copies = copies = self._make_copies(pool, store_dtype)
            self._layer_copies = copies if store_dtype is None else None
        self._lock = threading.Lock()
        self._residents: dict[BlockKey, _Resident] = {}
        self._free = list(range(self._num_pool_blocks - 1, -1, -1))
        self._faults: dict[str, int] = {}

    @property
    def kind(self) -> TierKind:
        return TierKind.HBM

    # ------------------------------------------------------------ bytes by pool block, for the engine's movers

    def gather(self, pool_blocks: Sequence[int], out: memoryview) -> None:
        """Copy one block out of its pool blocks into `out`, payload_bytes writable bytes; returns when it is there.

        On a GPU it waits for the steps queued on the default stream so far. Raises ValueError for a wrong length or
        a pool block outside of the pool; then `out` is as it was.
        """
        self._check(pool_blocks, out)
        self._copies.gather([pool_blocks], [out])

    def scatter(self, payload: memoryview, pool_blocks: Sequence[int]) -> None:
        """Copy one block's payload into its pool blocks; returns when it is there.

        No step that is queued may still use these pool blocks. Raises ValueError as `gather`; then the pool is as it
        was.
        """
        self._check(pool_blocks, payload)
        self._copies.scatter([payload], [pool_blocks])

    def scatter_layers(
        self, payloads: Sequence[memoryview], groups: Sequence[Sequence[int]], first: int, end: int
    ) -> None:
        """Copy the layers [first, end) of block i, whose whole payload is `payloads[i]`, into its pool blocks
        `groups[i]`; returns when they are there.

        As `scatter`, but a queued step may use these pool blocks' other layers. Raises ValueError also for blocks that
        are stored quantised: their layers do not lie together.
        """
        if self._layer_copies is None:
            raise ValueError("quantised blocks are not copied layer by layer")
        if not 0 <= first < end <= self._num_layers:
            raise ValueError(f"layers {first} to {end} are not some of {self._num_layers}")
        for payload, pool_blocks in zip(payloads, groups, strict=True):
            self._check(pool_blocks, payload)
        self._layer_copies.scatter_layers(payloads, groups, first, end)

    def pin(self, address: int, num_bytes: int, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Lock host memory so that the GPU can copy from and to it by itself; for a pool on the CPU, enter its pages
        into the page table. Takes seconds for a large range, and copies may run meanwhile.

        `address` is page-aligned, such as `Region.address`. Asks every now and then whether it goes on; raises
        ConfigError where the system refuses. In both cases nothing stays pinned.
        """
        if self._pinned is None:
            # What cannot be entered now is when it is used.
            with contextlib.suppress(OSError):
                for start in range(0, num_bytes, PIECE_BYTES):
                    if not goes_on() or not pages.populate(address + start, min(PIECE_BYTES, num_bytes - start), 1):
                        return
            return
        try:
            self._pinned.pin(address, num_bytes, goes_on)
        except MemoryError as error:
            raise ConfigError(f"{error}; is the limit on locked memory (ulimit -l) large enough?") from error

    def unpin(self, address: int) -> None:
        """Undo `pin`; must come before the memory is unmapped. Idempotent."""
        if self._pinned is not None:
            self._pinned.unpin(address)

    # ------------------------------------------------------------ Tier

    def put_resident(self, meta: BlockMeta, pool_blocks: Sequence[int]) -> None:
        """Take over a block whose payload is in these free pool blocks already. Raises ValueError where one of them
        is taken, or the key is known."""
        with self._lock:
            if meta.key in self._residents or len(set(pool_blocks)) != self.pool_blocks_per_block:
                raise ValueError(f"block {meta.key.hex()[:12]} is there, or has {len(set(pool_blocks))} pool blocks")
            if not set(pool_blocks) <= set(self._free):
                raise ValueError("a pool block is not free")
            self._free = [block for block in self._free if block not in pool_blocks]
            self._residents[meta.key] = _Resident(meta, tuple(pool_blocks))

    def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        with self._lock:
            return [Outcome.OK if key in self._residents else Outcome.MISS for key in keys]

    def read(self, blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> list[Outcome]:
        """As `Tier.read`; all blocks that are there are copied in one go."""
        check_lengths(blocks, into)
        with self._lock:
            outcomes = [self._find(meta) for meta in blocks]
            found = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.OK]
            groups = [self._residents[blocks[i].key].pool_blocks for i in found]
            self._copies.gather(groups, [into[i] for i in found])
        return outcomes

    def write(self, blocks: Sequence[BlockMeta], payloads: Sequence[memoryview]) -> list[Outcome]:
        """As `Tier.write`; a block of another size than this pool's answers FULL: there is no place of its size."""
        check_lengths(blocks, payloads)
        with self._lock:
            return [self._write_one(meta, payload) for meta, payload in zip(blocks, payloads, strict=True)]

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        with self._lock:
            return [Outcome.MISS if self._forget(key) is None else Outcome.OK for key in keys]

    def usage(self) -> Usage:
        with self._lock:
            num_taken = self._num_pool_blocks - len(self._free)
            capacity_bytes = self._num_pool_blocks * self._pool_block_bytes
            return Usage(len(self._residents), num_taken * self._pool_block_bytes, capacity_bytes)

    def recover_batches(self) -> Iterator[RecoveredBatch]:
        """Yields nothing: HBM does not outlive its process."""
        return iter(())

    def faults(self) -> dict[str, int]:
        """Return how often which fault was met since the start."""
        with self._lock:
            return dict(self._faults)

    def close(self) -> None:
        """Forget every block; the pool belongs to whoever made it."""
        with self._lock:
            self._residents.clear()
            self._free = list(range(self._num_pool_blocks - 1, -1, -1))

    # ------------------------------------------------------------ helpers

    def _make_copies(self, pool: torch.Tensor, store_dtype: QuantizedDtype | None) -> _LayerCopies:
        if self._pinned is None:
            return _CpuCopies(pool, self.pool_blocks_per_block)
        # Only here, so that a machine without a GPU needs no triton.
        from kernels.transfer import HostTransfers, StreamLane

        lanes = (StreamLane(pool.device), StreamLane(pool.device))
        return HostTransfers(pool, self.pool_blocks_per_block, lanes, self._pinned, store_dtype=store_dtype)

    def _check(self, pool_blocks: Sequence[int], view: memoryview) -> None:
        if len(pool_blocks) != self.pool_blocks_per_block or view.nbytes != self.payload_bytes:
            wanted = f"{self.pool_blocks_per_block} pool blocks and {self.payload_bytes} bytes"
            raise ValueError(f"a block has {wanted}, not {len(pool_blocks)} and {view.nbytes}")
        # On a GPU a wrong number would be somebody else's memory.
        if min(pool_blocks) < 0 or max(pool_blocks) >= self._num_pool_blocks:
            raise ValueError(f"a pool block lies outside of the pool's {self._num_pool_blocks}")

    def _find(self, meta: BlockMeta) -> Outcome:
        resident = self._residents.get(meta.key)
        if resident is None:
            return Outcome.MISS
        if resident.meta != meta:
            self._forget(meta.key)
            self._faults["corrupt"] = self._faults.get("corrupt", 0) + 1
            return Outcome.CORRUPT
        return Outcome.OK

    def _write_one(self, meta: BlockMeta, payload: memoryview) -> Outcome:
        if meta.key in self._residents:
            return Outcome.EXISTS
        if meta.payload_bytes != self.payload_bytes or len(self._free) < self.pool_blocks_per_block:
            return Outcome.FULL
        pool_blocks = tuple(self._free[-self.pool_blocks_per_block :])
        self._copies.scatter([payload], [pool_blocks])
        del self._free[-self.pool_blocks_per_block :]
        self._residents[meta.key] = _Resident(meta, pool_blocks)
        return Outcome.OK

    def _forget(self, key: BlockKey) -> _Resident | None:
        resident = self._residents.pop(key, None)
        if resident is not None:
            self._free.extend(resident.pool_blocks)
        return resident


class _CpuCopies:
    """Copies with numpy: 6 GB/s on one thread of the reference machine, near memcpy, without the interpreter lock.

    torch's copy is faster alone (8.5 GB/s), because it takes a second thread for it; beside a step, which needs both
    cores, that thread makes both wait.
    """

    def __init__(self, pool: torch.Tensor, pool_blocks_per_block: int) -> None:
        num_pool_blocks, num_layers = pool.shape[:2]
        self._pool = pool.view(torch.uint8).numpy().reshape(num_pool_blocks, num_layers * 2, -1)
        self._pool_blocks_per_block = pool_blocks_per_block

    def gather(self, groups: Sequence[Sequence[int]], outs: Sequence[memoryview]) -> None:
        for pool_blocks, out in zip(groups, outs, strict=True):
            for segments, block in zip(self._segments(out), pool_blocks, strict=True):
                np.copyto(segments, self._pool[block])

    def scatter(self, payloads: Sequence[memoryview], groups: Sequence[Sequence[int]]) -> None:
        for payload, pool_blocks in zip(payloads, groups, strict=True):
            for segments, block in zip(self._segments(payload), pool_blocks, strict=True):
                np.copyto(self._pool[block], segments)

    def scatter_layers(
        self, payloads: Sequence[memoryview], groups: Sequence[Sequence[int]], first: int, end: int
    ) -> None:
        some = slice(2 * first, 2 * end)
        for payload, pool_blocks in zip(payloads, groups, strict=True):
            for segments, block in zip(self._segments(payload), pool_blocks, strict=True):
                np.copyto(self._pool[block, some], segments[some])

    def _segments(self, view: memoryview) -> Iterable[Any]:
        """Return the payload's parts per pool block, `[num_layers * 2, segment_bytes]` each."""
        shape = (self._pool.shape[1], self._pool_blocks_per_block, self._pool.shape[2])
        return np.frombuffer(view, dtype=np.uint8).reshape(shape).swapaxes(0, 1)
