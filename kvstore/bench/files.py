"""The ceiling of the SSD tier: the same bytes to and from one plain file, as fast as the file system does it.

Write: a preallocated file whose room was written before is overwritten in batches, each durable before the next, once
through the page cache with fdatasync and once past it. Read: single blocks in random order from as many threads as
the tier has, the file's pages dropped before, also once through the cache and once past it.
"""

import ctypes
import ctypes.util
import errno
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path

from kvstore.bench.memory import PAGE_BYTES

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
# A page or two may be read ahead again by whoever else looks at the file.
_COLD_SHARE = 0.01


class PlainFile:
    """A file of equal slots. `direct`: past the page cache, where the file system allows it."""

    def __init__(self, path: Path, count: int, slot_bytes: int, *, direct: bool) -> None:
        self.path = path
        self._slot_bytes = slot_bytes
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self.is_direct = direct and slot_bytes % PAGE_BYTES == 0
        try:
            self._descriptor = os.open(path, flags | (os.O_DIRECT if self.is_direct else 0), 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.is_direct:
                raise
            self.is_direct = False
            self._descriptor = os.open(path, flags, 0o600)
        os.posix_fallocate(self._descriptor, 0, count * slot_bytes)

    def write(self, batches: Sequence[Sequence[tuple[int, memoryview]]], threads: Executor) -> float:
        """Write the batches of (slot, bytes), each durable before its thread begins the next; return the seconds."""
        started = time.perf_counter()
        for _ in threads.map(self._write_batch, batches):
            pass
        return time.perf_counter() - started

    def read(self, order: Sequence[int], into: Sequence[memoryview], threads: Executor) -> float:
        """Read slot `order[i]` into `into[order[i]]`, one call per slot; return the seconds."""
        started = time.perf_counter()
        for _ in threads.map(lambda slot: self._read_one(slot, into[slot]), order):
            pass
        return time.perf_counter() - started

    def close(self) -> None:
        """Close and remove the file."""
        os.close(self._descriptor)
        self.path.unlink()

    def _write_batch(self, batch: Sequence[tuple[int, memoryview]]) -> None:
        for slot, view in batch:
            _check(os.pwrite(self._descriptor, view, slot * self._slot_bytes), len(view))
        os.fdatasync(self._descriptor)

    def _read_one(self, slot: int, view: memoryview) -> None:
        _check(os.preadv(self._descriptor, [view], slot * self._slot_bytes), len(view))


def drop_cache(folder: Path) -> float:
    """Drop all pages of the files below `folder` from the cache; return the share that stayed.

    Pages that are dirty or mapped are not dropped, so everything is synced first, and what stayed is counted: a
    benchmark that forgets this measures the page cache.
    """
    pages = cached = 0
    for path in [folder] if folder.is_file() else folder.rglob("*"):
        if not path.is_file():
            continue
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes:
                pages += -(-size_bytes // PAGE_BYTES)
                cached += _cached_pages(descriptor, size_bytes)
        finally:
            os.close(descriptor)
    return cached / pages if pages else 0.0


def is_cold(share: float) -> bool:
    return share <= _COLD_SHARE


def _cached_pages(descriptor: int, size_bytes: int) -> int:
    # Private and writable, since ctypes takes the address of writable memory only; nothing is written.
    with mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapping:
        flags = ctypes.create_string_buffer(-(-size_bytes // PAGE_BYTES))
        start = ctypes.c_char.from_buffer(mapping)
        failed = _LIBC.mincore(ctypes.addressof(start), size_bytes, flags)
        del start
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return sum(flag & 1 for flag in flags.raw)


def _check(moved: int, wanted: int) -> None:
    if moved != wanted:
        raise OSError(errno.EIO, f"only {moved} of {wanted} bytes were moved")
