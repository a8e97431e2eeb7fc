"""kvstore: the tiers in this process, as LMCache's storage manager runs in its caller's, and a real daemon.

core_*          the RAM tier in this process
daemon_*        a client of a daemon, contiguous buffers on the engine's side: grants, copies and commits; fetch,
                copies, checks of the generations and release
paged_*         the same from and to a paged pool of 16-token pool blocks
durable_write   caller's buffer, slot, disk; each batch is synced with its index
cold_read       disk to slots, verified; all blocks in one request
lookup, ping    the daemon
"""

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from worker import Buffers, Task, check, drop_cache, prompt, serve, shuffled

from kvstore.bench.daemon import DEADLINE_S, BenchDaemon, fetch, prefix, store
from kvstore.bench.memory import copy
from kvstore.bench.paged import make_pool
from kvstore.bench.settings import MIB, Sizes, namespace
from kvstore.bench.ssd import batches, blocks, expect
from kvstore.core.key import chain_keys
from kvstore.core.outcome import Outcome, TierKind
from kvstore.version import VERSION
from kvstore.worker.serving import SSD_WRITERS
from tiers.hbm import HbmTier
from tiers.ram import RamTier
from tiers.region import Region
from tiers.ssd import SsdTier

_BLOCK_TOKENS = 256
_LOOKUP_BLOCK_BYTES = 4096
_EPOCH = 1


class Ours:
    """Implements worker.Contender."""

    def __init__(self, task: Task) -> None:
        self.about = f"kvstore {VERSION}"
        self._task = task
        self._sizes = Sizes(task.block_bytes, task.num_blocks)
        self._space = namespace(task.block_bytes, _BLOCK_TOKENS)
        self._here = Buffers(task.num_blocks, task.block_bytes, filled=True)
        self._there = Buffers(task.num_blocks, task.block_bytes, filled=False)
        self._closing = contextlib.ExitStack()
        self._writers = ThreadPoolExecutor(SSD_WRITERS)
        self._closing.callback(self._writers.shutdown)
        room = task.total_bytes * 5 // 4 + 4 * task.block_bytes
        self._region = Region.create(Path(task.shm_dir) / "core", room, _EPOCH, prefault=lambda _done, _total: None)
        self._closing.callback(self._region.unlink)
        self._ram = RamTier(self._region)
        self._closing.callback(self._ram.close)
        cap = 2 * task.total_bytes + 64 * MIB
        self._ssd = SsdTier(
            Path(task.folder) / "ssd", max_bytes=cap, segment_bytes=cap // 4, huge_slots=self._region.is_huge()
        )
        self._closing.callback(self._ssd.close)
        self._daemon = BenchDaemon(Path(task.folder) / "daemon", Path(task.shm_dir), {"ram.size": room + 64 * MIB})
        self._closing.callback(self._daemon.stop)
        self._daemon.start()
        self._engine = self._closing.enter_context(contextlib.closing(self._daemon.engine(self._space)))
        pool = make_pool(self._sizes)
        self._hbm = HbmTier(pool, _BLOCK_TOKENS)
        per_block = self._hbm.pool_blocks_per_block
        order = shuffled(len(pool), 1)
        self._groups = [order[first : first + per_block] for first in range(0, len(order), per_block)]
        self._lookup_space = namespace(_LOOKUP_BLOCK_BYTES, task.block_tokens, "lookup")
        self._lookup_engine = self._closing.enter_context(contextlib.closing(self._daemon.engine(self._lookup_space)))
        self._tokens = np.array(prompt(task.lookup_tokens), dtype=np.uint32)
        self._store_prompt()
        self.ops: dict[str, Callable[[int], float]] = {
            "core_store": self._core_store,
            "core_fetch": self._core_fetch,
            "daemon_store": self._daemon_store,
            "daemon_fetch": self._daemon_fetch,
            "paged_store": self._paged_store,
            "paged_fetch": self._paged_fetch,
            "durable_write": self._durable_write,
            "cold_read": self._cold_read,
            "lookup": self._lookup,
            "ping": lambda _: self._engine.ping(),
        }

    def close(self) -> None:
        self._closing.close()

    # ------------------------------------------------------------ in this process

    def _core_store(self, number: int) -> float:
        metas = blocks(self._sizes, number)
        started = time.perf_counter()
        expect(self._ram.write(metas, self._here.views))
        return time.perf_counter() - started

    def _core_fetch(self, number: int) -> float:
        metas = blocks(self._sizes, number)
        started = time.perf_counter()
        expect(self._ram.read(metas, self._there.views))
        taken_s = time.perf_counter() - started
        self._ram.delete([meta.key for meta in metas])
        check(self._there, self._here)
        return taken_s

    def _durable_write(self, number: int) -> float:
        metas = blocks(self._sizes, number)

        def write(batch: range) -> list[Outcome]:
            return self._ssd.write([metas[i] for i in batch], [self._slot(metas[i].key) for i in batch])

        started = time.perf_counter()
        written = []
        # As in the daemon, one batch is on its way to the disk while the next is copied.
        for batch in batches(self._sizes):
            expect(self._ram.write([metas[i] for i in batch], [self._here.views[i] for i in batch]))
            written.append(self._writers.submit(write, batch))
        for outcomes in written:
            expect(outcomes.result())
        return time.perf_counter() - started

    def _cold_read(self, number: int) -> float:
        metas = blocks(self._sizes, number)
        slots = [self._slot(meta.key) for meta in metas]
        for slot in slots:
            slot[:8] = bytes(8)
        drop_cache(f"{self._task.folder}/ssd")
        order = shuffled(len(metas), number)
        started = time.perf_counter()
        # One request for all of them, as LMCache gets.
        expect(self._ssd.read([metas[i] for i in order], [slots[i] for i in order]))
        taken_s = time.perf_counter() - started
        for there, slot in zip(self._there.views, slots, strict=True):
            there[:] = slot
        check(self._there, self._here)
        self._ram.delete([meta.key for meta in metas])
        expect(self._ssd.delete([meta.key for meta in metas]))
        return taken_s

    def _slot(self, key: bytes) -> memoryview:
        slot = self._ram.slot(key)  # type: ignore[arg-type]
        assert slot is not None
        return self._region.view(slot.offset, slot.num_bytes)

    # ------------------------------------------------------------ through the daemon

    def _daemon_store(self, number: int) -> float:
        keys = prefix(self._space, self._sizes.num_blocks, number)
        return store(self._engine, self._space, keys, lambda i, view: copy(view, self._here.views[i]))["path"]

    def _daemon_fetch(self, number: int) -> float:
        keys = prefix(self._space, self._sizes.num_blocks, number)
        taken = fetch(self._engine, keys, TierKind.RAM, lambda i, view: copy(self._there.views[i], view))
        self._engine.evict(["ram"], drop=True)
        self._store_prompt()
        check(self._there, self._here)
        return taken["path"]

    def _paged_store(self, number: int) -> float:
        keys = prefix(self._space, self._sizes.num_blocks, number)
        return store(self._engine, self._space, keys, lambda i, view: self._hbm.gather(self._groups[i], view))["path"]

    def _paged_fetch(self, number: int) -> float:
        keys = prefix(self._space, self._sizes.num_blocks, number)
        taken = fetch(self._engine, keys, TierKind.RAM, lambda i, view: self._hbm.scatter(view, self._groups[i]))
        self._engine.evict(["ram"], drop=True)
        self._store_prompt()
        return taken["path"]

    def _store_prompt(self) -> None:
        """The prompt's blocks, small ones, of another namespace."""
        keys = chain_keys(self._lookup_space, self._tokens)
        store(self._lookup_engine, self._lookup_space, keys, lambda _i, _view: None)

    def _lookup(self, _: int) -> float:
        started = time.perf_counter()
        found = self._lookup_engine.lookup(chain_keys(self._lookup_space, self._tokens), DEADLINE_S)
        taken_s = time.perf_counter() - started
        if found.next is not Outcome.OK or len(found.tiers) != self._task.lookup_tokens // self._task.block_tokens:
            raise ValueError(f"only {len(found.tiers)} blocks were found: {found.why}")
        return taken_s


if __name__ == "__main__":
    serve(Ours)
