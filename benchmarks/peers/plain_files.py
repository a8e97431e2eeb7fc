"""The peer that needs nothing: one file per block, in shared memory and on the disk.

A store writes to a temporary name and renames it, so that no reader finds half a block. Durable is fdatasync on each
file and fsync on the folder once per store. A lookup hashes the prompt as a chain and asks for each file until one is
missing.
"""

import hashlib
import os
import sys
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from worker import Buffers, Task, check, drop_cache, opened, prompt, serve, shuffled


class PlainFiles:
    """Implements worker.Contender."""

    def __init__(self, task: Task) -> None:
        self.about = f"one file per block, Python {sys.version.split()[0]}"
        self._task = task
        self._here = Buffers(task.num_blocks, task.block_bytes, filled=True)
        self._there = Buffers(task.num_blocks, task.block_bytes, filled=False)
        self._threads = ThreadPoolExecutor(task.threads)
        self._lookup_folder = os.path.join(task.shm_dir, "lookup")
        self._tokens = array("I", prompt(task.lookup_tokens))
        os.mkdir(self._lookup_folder)
        for name in chain(self._tokens, task.block_tokens):
            with opened(os.path.join(self._lookup_folder, name), os.O_CREAT | os.O_WRONLY):
                pass
        self.ops = {
            "daemon_store": lambda number: self._store(task.shm_dir, number, is_durable=False),
            "daemon_fetch": self._fetch,
            "write": lambda number: self._store(task.folder, number, is_durable=False, is_kept=False),
            "durable_write": lambda number: self._store(task.folder, number, is_durable=True),
            "cold_read": self._cold_read,
            "lookup": self._lookup,
        }

    def close(self) -> None:
        self._threads.shutdown()

    def _store(self, folder: str, number: int, *, is_durable: bool, is_kept: bool = True) -> float:
        started = time.perf_counter()
        for index, view in enumerate(self._here.views):
            name = self._name(folder, number, index)
            with opened(name + ".new", os.O_CREAT | os.O_WRONLY) as descriptor:
                written = os.write(descriptor, view)
                if is_durable:
                    os.fdatasync(descriptor)
            if written != len(view):
                raise OSError("the disk took only a part")
            os.rename(name + ".new", name)
        if is_durable:
            with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
                os.fsync(descriptor)
        taken_s = time.perf_counter() - started
        if not is_kept:
            drop_cache(folder)  # or whoever comes next pays for it
            self._clear(folder, number)
        return taken_s

    def _fetch(self, number: int) -> float:
        started = time.perf_counter()
        for index in range(self._task.num_blocks):
            self._read(self._task.shm_dir, number, index)
        taken_s = time.perf_counter() - started
        self._clear(self._task.shm_dir, number)
        check(self._there, self._here)
        return taken_s

    def _cold_read(self, number: int) -> float:
        folder = self._task.folder
        drop_cache(folder)
        started = time.perf_counter()
        for _ in self._threads.map(lambda i: self._read(folder, number, i), shuffled(self._task.num_blocks, number)):
            pass
        taken_s = time.perf_counter() - started
        self._clear(folder, number)
        check(self._there, self._here)
        return taken_s

    def _lookup(self, _: int) -> float:
        started = time.perf_counter()
        found = 0
        for name in chain(self._tokens, self._task.block_tokens):
            if not os.path.exists(f"{self._lookup_folder}/{name}"):
                break
            found += 1
        taken_s = time.perf_counter() - started
        if found != self._task.lookup_tokens // self._task.block_tokens:
            raise ValueError(f"only {found} blocks were found")
        return taken_s

    def _read(self, folder: str, number: int, index: int) -> None:
        with opened(self._name(folder, number, index), os.O_RDONLY) as descriptor:
            if os.preadv(descriptor, [self._there.views[index]], 0) != self._task.block_bytes:
                raise OSError("the file is too short")

    def _clear(self, folder: str, number: int) -> None:
        for index in range(self._task.num_blocks):
            os.unlink(self._name(folder, number, index))

    def _name(self, folder: str, number: int, index: int) -> str:
        return f"{folder}/{number}-{index}"


def chain(tokens: Sequence[int], block_tokens: int) -> list[str]:
    """Return the name of each block: SHA-256 over the name before it and the token ids."""
    view = memoryview(tokens).cast("B")  # type: ignore[arg-type]
    names, key = [], b""
    for start in range(0, len(view), 4 * block_tokens):
        key = hashlib.sha256(key + view[start : start + 4 * block_tokens]).digest()
        names.append(key.hex())
    return names


if __name__ == "__main__":
    serve(PlainFiles)
