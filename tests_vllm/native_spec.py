"""What vLLM's own tiering lacks to run on its CPU build: a worker that copies with memcpy instead of CUDA streams.

All else is vLLM's: its connector, its scheduler's part, its primary tier in shared memory and its file tier. Loaded by
`spec_module_path`. Like the CUDA worker it copies beside the steps, each direction in order of submission.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):
    """Tiering for a KV cache that lies in the CPU's memory."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self.blocks_per_chunk != 1:
            raise ValueError("chunks of one block only")
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CopyingWorker(kv_caches, region)


class CopyingWorker(OffloadingWorker):
    """Copies blocks between the KV cache, [num_blocks, block_bytes] int8 per layer, and rows of the shared region."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._pairs = []
        for cache in kv_caches.tensors:
            blocks = cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes)
            self._pairs.append((blocks, region.create_next_worker_view(cache.page_size_bytes)))
        self._block_bytes = sum(cache.page_size_bytes for cache in kv_caches.tensors)
        self._stores = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._loads = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._jobs: dict[int, Future[TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        blocks, rows = _ids(src_spec), _ids(dst_spec)
        self._jobs[job_id] = self._stores.submit(self._copy, job_id, blocks, rows, to_region=True)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        rows, blocks = _ids(src_spec), _ids(dst_spec)
        self._jobs[job_id] = self._loads.submit(self._copy, job_id, blocks, rows, to_region=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        done = [job_id for job_id, future in self._jobs.items() if future.done()]
        return [self._jobs.pop(job_id).result() for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids:
            if job_id in self._jobs:
                self._jobs[job_id].result()

    def shutdown(self) -> None:
        self._stores.shutdown()
        self._loads.shutdown()
        self._pairs.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, blocks: np.ndarray, rows: np.ndarray, *, to_region: bool) -> TransferResult:
        started = time.perf_counter()
        assert len(blocks) == len(rows)
        for cache, region in self._pairs:
            for block, row in zip(blocks, rows, strict=True):
                if to_region:
                    region[row].copy_(cache[block])
                else:
                    cache[block].copy_(region[row])
        return TransferResult(job_id, True, len(blocks) * self._block_bytes, time.perf_counter() - started)


def _ids(spec: LoadStoreSpec) -> np.ndarray:
    assert isinstance(spec, BlockIDsLoadStoreSpec)
    return spec.block_ids
