"""The peer LMCache, its storage manager in this process: L1 in memory and one L2 adapter that writes files.

`core_*`: reserve, copy, finish; prefetch, copy out, finish. `write` and `durable_write`: the same store until every
block is a whole file of the L2 adapter; LMCache itself never syncs, so `durable_write` syncs the files and their
folder afterwards, which is what durability would cost it at least. `cold_read`: prefetch of all blocks from L2 to L1,
the page cache dropped before.

The adapter (`fs` or `fs_native`, buffered or O_DIRECT) is the argument; each is a contender of its own, so that the
fastest counts.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from worker import Buffers, Task, check, drop_cache, files_below, serve, shuffled, sync_files

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager

_TIMEOUT_S = 120.0
_LOOK_EVERY_S = 0.0005
_BYTES_PER_NUMBER = 2


class StorageCore:
    """Implements worker.Contender. With `adapter` None there is L1 alone."""

    def __init__(self, task: Task, adapter: dict[str, Any] | None) -> None:
        self._task = task
        self._l2_folder = os.path.join(task.folder, "l2")
        what = "L1 alone" if adapter is None else json.dumps(adapter)
        self.about = f"lmcache {importlib.metadata.version('lmcache')}, storage manager, {what}"
        self._here = Buffers(task.num_blocks, task.block_bytes, filled=True)
        self._there = Buffers(task.num_blocks, task.block_bytes, filled=False)
        self._sources, self._targets = (
            [torch.frombuffer(view, dtype=torch.uint8).view(torch.bfloat16) for view in buffers.views]
            for buffers in (self._here, self._there)
        )
        numbers = task.block_bytes // _BYTES_PER_NUMBER
        self._layout = MemoryLayoutDesc(shapes=[torch.Size([2, 1, 256, numbers // 512])], dtypes=[torch.bfloat16])
        self._manager = self._open(adapter)
        self.ops: dict[str, Callable[[int], float]]
        if adapter is None:
            self.ops = {"core_store": self._store, "core_fetch": self._fetch}
        else:
            self.ops = {
                "write": lambda number: self._write(number, is_durable=False, is_kept=False),
                "durable_write": lambda number: self._write(number, is_durable=True, is_kept=True),
                "cold_read": self._cold_read,
            }

    def close(self) -> None:
        self._manager.close()

    def _open(self, adapter: dict[str, Any] | None) -> StorageManager:
        options: dict[str, Any] = {}
        if adapter is not None:
            os.makedirs(self._l2_folder)
            chosen = argparse.Namespace(l2_adapter=[json.dumps(adapter | {"base_path": self._l2_folder})])
            options["l2_adapter_config"] = parse_args_to_l2_adapters_config(chosen)
        memory = L1MemoryManagerConfig(
            size_in_bytes=2 * self._task.total_bytes + (256 << 20), use_lazy=False, align_bytes=4096, shm_name=""
        )
        eviction = EvictionConfig(eviction_policy="LRU", trigger_watermark=0.99, eviction_ratio=0.1)
        manager_config = L1ManagerConfig(memory_config=memory)
        return StorageManager(
            StorageManagerConfig(l1_manager_config=manager_config, eviction_config=eviction, **options)
        )

    def _keys(self, number: int, kind: str = "") -> list[ObjectKey]:
        rank = ObjectKey.ComputeKVRank(world_size=1, global_rank=0, local_world_size=1, local_rank=0)
        return [
            ObjectKey(chunk_hash=f"{kind}{number}-{i}".encode().rjust(32, b"-"), model_name="bench", kv_rank=rank)
            for i in range(self._task.num_blocks)
        ]

    # ------------------------------------------------------------ L1

    def _store(self, number: int, kind: str = "") -> float:
        keys = self._keys(number, kind)
        started = time.perf_counter()
        objects = self._manager.reserve_write(keys, self._layout)
        for key, source in zip(keys, self._sources, strict=True):
            objects[key].tensor.view(-1).copy_(source)
        self._manager.finish_write(keys)
        return time.perf_counter() - started

    def _fetch(self, number: int) -> float:
        keys = self._keys(number)
        started = time.perf_counter()
        self._prefetch(keys)
        self._copy_out(keys)
        taken_s = time.perf_counter() - started
        self._manager.delete_l1_keys(keys, force=True)
        check(self._there, self._here)
        return taken_s

    def _prefetch(self, keys: list[ObjectKey]) -> None:
        group = GroupedObjectKeys(keys=keys, object_group_id=0, layout_desc=self._layout)
        handle = self._manager.submit_prefetch_task(PrefetchTaskSpec(key_groups=[group]))
        if not self._manager.wait_prefetch_status(handle, _TIMEOUT_S):
            raise TimeoutError("the prefetch did not end")
        found = sum(cells.popcount() for cells in self._manager.query_prefetch_status(handle).hit_cells)
        if found != len(keys):
            raise ValueError(f"only {found} blocks came back")

    def _copy_out(self, keys: list[ObjectKey]) -> None:
        with self._manager.read_prefetched_results(keys) as objects:
            for target, one in zip(self._targets, objects, strict=True):
                target.copy_(one.tensor.view(-1))
        self._manager.finish_read_prefetched(keys)

    # ------------------------------------------------------------ L2

    def _write(self, number: int, *, is_durable: bool, is_kept: bool) -> float:
        kind = "kept-" if is_kept else "gone-"
        started = time.perf_counter()
        self._store(number, kind)
        deadline = started + _TIMEOUT_S
        while self._whole_files() < self._task.num_blocks:
            if time.perf_counter() > deadline:
                raise TimeoutError("not every block became a file")
            time.sleep(_LOOK_EVERY_S)
        if is_durable:
            sync_files(self._l2_folder)
        taken_s = time.perf_counter() - started
        if not is_kept:
            self._forget(self._keys(number, kind))
            drop_cache(self._l2_folder)  # or whoever comes next pays for it
            self._remove_files()
        return taken_s

    def _cold_read(self, number: int) -> float:
        keys = self._keys(number, "kept-")
        self._forget(keys)
        drop_cache(self._l2_folder)
        order = [keys[i] for i in shuffled(len(keys), number)]
        started = time.perf_counter()
        self._prefetch(order)
        taken_s = time.perf_counter() - started
        self._copy_out(keys)
        check(self._there, self._here)
        self._forget(keys)
        self._remove_files()
        return taken_s

    def _forget(self, keys: list[ObjectKey]) -> None:
        """Drop the copies in L1; the adapter may hold them a moment longer than it takes to finish the files."""
        deadline = time.perf_counter() + _TIMEOUT_S
        while self._manager.delete_l1_keys(keys)[1]:
            if time.perf_counter() > deadline:
                raise TimeoutError("the blocks do not leave L1")
            time.sleep(0.01)

    def _whole_files(self) -> int:
        count = 0
        for path in files_below(self._l2_folder):
            with contextlib.suppress(FileNotFoundError):
                count += path.endswith(".data") and os.path.getsize(path) >= self._task.block_bytes
        return count

    def _remove_files(self) -> None:
        for path in list(files_below(self._l2_folder)):
            os.unlink(path)


def make(task: Task) -> StorageCore:
    if len(sys.argv) < 2:
        return StorageCore(task, None)
    return StorageCore(task, {"type": sys.argv[1], "use_odirect": sys.argv[2:] == ["direct"]})


if __name__ == "__main__":
    serve(make)
