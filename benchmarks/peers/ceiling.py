"""What the machine itself can do: memcpy, one plain file, 64 bytes over a unix socket and back, hashing a prompt.

The file is preallocated, written in durable batches and read cold, as in `kvstore bench tiers`, whose code this uses;
of two ways to do it the faster one counts, so both stand here as contenders of their own.
"""

import hashlib
import os
import socket
import sys
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from worker import Buffers, Task, check, end_with_parent, prompt, serve, shuffled

from kvstore.bench.files import PlainFile, drop_cache
from kvstore.bench.memory import memcpy
from kvstore.bench.settings import Sizes
from kvstore.bench.ssd import batches
from kvstore.worker.serving import SSD_WRITERS

_MESSAGE = bytes(64)


class Ceiling:
    """Implements worker.Contender; `direct`: the file goes past the page cache."""

    def __init__(self, task: Task, *, direct: bool) -> None:
        self.about = "one thread's memcpy; one preallocated file, " + ("O_DIRECT" if direct else "buffered")
        self._task = task
        self._here = Buffers(task.num_blocks, task.block_bytes, filled=True)
        self._there = Buffers(task.num_blocks, task.block_bytes, filled=False)
        self._threads = ThreadPoolExecutor(task.threads)
        self._writers = ThreadPoolExecutor(SSD_WRITERS)
        self._file = PlainFile(Path(task.folder) / "plain", task.num_blocks, task.block_bytes, direct=direct)
        self.ops: dict[str, Callable[[int], float]] = {"durable_write": self._write, "cold_read": self._read}
        if not direct:
            copies = ("core_store", "core_fetch", "daemon_store", "daemon_fetch", "paged_store", "paged_fetch")
            self.ops |= dict.fromkeys(copies, self._memcpy) | {"lookup": self._lookup, "ping": self._ping}
            self._socket = _echo()
            self._tokens = array("I", prompt(task.lookup_tokens))

    def close(self) -> None:
        self._threads.shutdown()
        self._writers.shutdown()
        self._file.close()

    def _memcpy(self, _: int) -> float:
        started = time.perf_counter()
        for target, source in zip(self._there.views, self._here.views, strict=True):
            memcpy(target, source)
        return time.perf_counter() - started

    def _ping(self, _: int) -> float:
        started = time.perf_counter()
        self._socket.send(_MESSAGE)
        self._socket.recv(len(_MESSAGE))
        return time.perf_counter() - started

    def _lookup(self, number: int) -> float:
        """The hashes of the prompt's blocks, each over the one before it, and one round trip."""
        started = time.perf_counter()
        view, stride, key = memoryview(self._tokens).cast("B"), 4 * self._task.block_tokens, b""
        for start in range(0, len(view), stride):
            key = hashlib.sha256(key + view[start : start + stride]).digest()
        self._ping(number)
        return time.perf_counter() - started

    def _write(self, _: int) -> float:
        sizes = Sizes(self._task.block_bytes, self._task.num_blocks)
        parts = [[(i, self._here.views[i]) for i in batch] for batch in batches(sizes)]
        return self._file.write(parts, self._writers)

    def _read(self, number: int) -> float:
        drop_cache(self._file.path)
        taken_s = self._file.read(shuffled(self._task.num_blocks, number), self._there.views, self._threads)
        check(self._there, self._here)
        return taken_s


def _echo() -> socket.socket:
    """Return one end of a unix socket whose other end another process sends back what it gets from."""
    here, there = socket.socketpair()
    if os.fork() == 0:
        end_with_parent()
        here.close()
        while message := there.recv(len(_MESSAGE)):
            there.send(message)
        os._exit(0)
    there.close()
    return here


if __name__ == "__main__":
    serve(lambda task: Ceiling(task, direct=sys.argv[1:] == ["direct"]))
