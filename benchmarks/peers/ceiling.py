"""What the machine itself can do: memcpy, one preallocated file with durable batches, cold `pread` of the same file.

The same as in `kvstore bench tiers`, whose code this uses: of two ways to write and to read a file the faster one
counts, so both stand here as contenders of their own.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from worker import Buffers, Task, check, serve, shuffled

from kvstore.bench.files import PlainFile, drop_cache
from kvstore.bench.memory import memcpy
from kvstore.bench.settings import Sizes
from kvstore.bench.ssd import batches


class Ceiling:
    """Implements worker.Contender; `direct`: the file goes past the page cache."""

    def __init__(self, task: Task, *, direct: bool) -> None:
        self.about = "one thread's memcpy; one preallocated file, " + ("O_DIRECT" if direct else "buffered")
        self._task = task
        self._here = Buffers(task.num_blocks, task.block_bytes, filled=True)
        self._there = Buffers(task.num_blocks, task.block_bytes, filled=False)
        self._threads = ThreadPoolExecutor(task.threads)
        self._file = PlainFile(Path(task.folder) / "plain", task.num_blocks, task.block_bytes, direct=direct)
        self.ops: dict[str, Callable[[int], float]] = {"durable_write": self._write, "cold_read": self._read}
        if not direct:
            copies = ("core_store", "core_fetch", "daemon_store", "daemon_fetch", "paged_store", "paged_fetch")
            self.ops |= dict.fromkeys(copies, self._memcpy)

    def close(self) -> None:
        self._threads.shutdown()
        self._file.close()

    def _memcpy(self, _: int) -> float:
        started = time.perf_counter()
        for target, source in zip(self._there.views, self._here.views, strict=True):
            memcpy(target, source)
        return time.perf_counter() - started

    def _write(self, _: int) -> float:
        sizes = Sizes(self._task.block_bytes, self._task.num_blocks)
        return self._file.write([[(i, self._here.views[i]) for i in batch] for batch in batches(sizes)])

    def _read(self, number: int) -> float:
        drop_cache(self._file.path)
        taken_s = self._file.read(shuffled(self._task.num_blocks, number), self._there.views, self._threads)
        check(self._there, self._here)
        return taken_s


if __name__ == "__main__":
    serve(lambda task: Ceiling(task, direct=sys.argv[1:] == ["direct"]))
