"""The shared-memory region: one file, mapped by the daemon, its workers and every engine, that holds the RAM slots.

    0        4096                          data_start (page-aligned)
    | header | generations: u64 per page   | data area: data_bytes                    |
                                           ^ offsets of slots count from here

A slot is named by its offset in the data area, a whole number of pages; its generation is the entry of its first
page. The daemon bumps the generation before the bytes can become another block's, so a reader that compares it
before and after its copy never takes one block for another, and needs no lock.

Covers: the file, the mapping, generations. Does not cover: which slot holds what (`tiers/slots.py`, `tiers/ram.py`).
A plain mmap of a file instead of multiprocessing.shared_memory, whose resource tracker unlinks the file under the
daemon when the first engine exits. The file is never truncated or reused: truncating a file that an engine still
maps kills that engine with SIGBUS.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from kvstore.core.errors import ConfigError, TierUnavailable

PAGE_BYTES: Final = 4096
_MAGIC = b"KVREGION"
_VERSION = 1
# magic, version, reserved, epoch, data_bytes, data_start
_HEADER = struct.Struct("<8sIIQQQ")
# Allocation and prefaulting go in steps of this size, so that progress can be shown.
_STEP_BYTES = 64 << 20
# Not in the mmap module of Python 3.11; Linux 5.14 and newer.
_MADV_POPULATE_WRITE = 23
_NEW_FILE_S = 10.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Region:
    """One mapping of the region file. Thread-safe; views stay valid after `close` until they are dropped."""

    def __init__(self, path: Path, mapping: mmap.mmap, data_bytes: int, epoch: int, lock: int | None = None) -> None:
        """Use `create` or `attach`. `lock`: the descriptor that holds the owner's lock."""
        self.path = path
        self.data_bytes = data_bytes
        self.epoch = epoch
        self._lock = lock
        self._is_closed = False
        start = _data_start(data_bytes)
        self._mapping = mapping
        whole = memoryview(mapping)
        self._generations = whole[PAGE_BYTES : PAGE_BYTES + 8 * (data_bytes // PAGE_BYTES)].cast("Q")
        self._data = whole[start : start + data_bytes]
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + start

    @classmethod
    def create(
        cls, path: Path, data_bytes: int, epoch: int, *, prefault: Callable[[int, int], None] | None = None
    ) -> Self:
        """Make the region file and map it; for the daemon, once per boot. `data_bytes` is rounded down to pages.

        All room is allocated here, so that no later access can end in SIGBUS on a full file system. With `prefault`
        the pages are also entered into this process' page table (a first touch costs 4 to 10 times a warm copy),
        and `prefault(done_bytes, total_bytes)` is called as it goes on. Raises ConfigError, naming need and have,
        where the file system is too small, or where `path` exists.

        The owner holds an exclusive flock on the file as long as it lives, so that a file whose owner was killed can be
        told from one in use (`is_abandoned`).
        """
        data_bytes -= data_bytes % PAGE_BYTES
        if data_bytes <= 0:
            raise ConfigError(f"the region {path} needs at least {PAGE_BYTES} bytes")
        total_bytes = _data_start(data_bytes) + data_bytes
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot create the region file {path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            _allocate(descriptor, path, total_bytes)
            mapping = mmap.mmap(descriptor, total_bytes)
            if prefault is not None:
                _populate(mapping, total_bytes, prefault)
            # Last, so that nobody can attach to a region that is not complete.
            mapping[: _HEADER.size] = _HEADER.pack(_MAGIC, _VERSION, 0, epoch, data_bytes, _data_start(data_bytes))
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return cls(path, mapping, data_bytes, epoch, descriptor)

    @classmethod
    def attach(cls, path: Path, epoch: int) -> Self:
        """Map the region of the daemon's boot `epoch`. Raises TierUnavailable where the file is not (or not yet,
        or no longer) that region."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise TierUnavailable(f"cannot open the region {path}: {error.strerror}") from error
        try:
            data_bytes = _read_header(descriptor, path, epoch)
            mapping = mmap.mmap(descriptor, _data_start(data_bytes) + data_bytes)
        except OSError as error:
            raise TierUnavailable(f"cannot map the region {path}: {error.strerror}") from error
        finally:
            os.close(descriptor)
        # A fork would make pinned pages copy-on-write, and the device would go on writing to the other copy.
        mapping.madvise(mmap.MADV_DONTFORK)
        return cls(path, mapping, data_bytes, epoch)

    @property
    def address(self) -> int:
        """The address of the data area in this process, for cudaHostRegister."""
        return self._address

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return a writable view of `num_bytes` bytes of the data area. Raises ValueError where they lie outside."""
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.data_bytes:
            raise ValueError(f"[{offset}, {offset + num_bytes}) lies outside of the region's {self.data_bytes} bytes")
        return self._data[offset : offset + num_bytes]

    def generation(self, offset: int) -> int:
        """Return the present generation of the slot at `offset`."""
        return self._generations[self._page(offset)]

    def bump(self, offset: int) -> int:
        """Make whatever was known of the slot at `offset` stale and return its new generation; only the daemon may.

        The store is one aligned 8-byte write; every party learns of the slot's next use by a message through
        the kernel, which orders it before that use on every architecture.
        """
        assert self._lock is not None, "only the daemon changes generations"
        page = self._page(offset)
        generation = self._generations[page] + 1
        self._generations[page] = generation
        return generation

    def close(self) -> None:
        """Unmap, or, where views are still held, leave that to the last of them. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._lock is not None:
            os.close(self._lock)
        self._generations.release()
        self._data.release()
        with contextlib.suppress(BufferError):
            self._mapping.close()

    def unlink(self) -> None:
        """Remove the file's name; mappings stay whole. Only the daemon does this, at shutdown. Idempotent."""
        self.path.unlink(missing_ok=True)

    def _page(self, offset: int) -> int:
        if offset % PAGE_BYTES or not 0 <= offset < self.data_bytes:
            raise ValueError(f"{offset} is not the offset of a slot")
        return offset // PAGE_BYTES


def is_abandoned(path: Path) -> bool:
    """Whether `path` is a region file whose owner is gone. One that was made this moment counts as in use: its owner
    may not have come to lock it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if time.time() - os.fstat(descriptor).st_mtime < _NEW_FILE_S:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _data_start(data_bytes: int) -> int:
    generation_bytes = 8 * (data_bytes // PAGE_BYTES)
    return PAGE_BYTES + -(-generation_bytes // PAGE_BYTES) * PAGE_BYTES


def _allocate(descriptor: int, path: Path, total_bytes: int) -> None:
    room = os.fstatvfs(descriptor)
    free_bytes = room.f_bavail * room.f_frsize
    if total_bytes > free_bytes:
        raise _too_small(path, total_bytes, free_bytes)
    try:
        for start in range(0, total_bytes, _STEP_BYTES):
            os.posix_fallocate(descriptor, start, min(_STEP_BYTES, total_bytes - start))
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise _too_small(path, total_bytes, free_bytes) from error
        raise ConfigError(f"cannot allocate the region file {path}: {error.strerror}") from error


def _too_small(path: Path, need_bytes: int, have_bytes: int) -> ConfigError:
    return ConfigError(
        f"the region needs {need_bytes} bytes, but {path.parent} has {have_bytes} free; "
        "choose a smaller RAM tier or give that file system more room"
    )


def _populate(mapping: mmap.mmap, total_bytes: int, progress: Callable[[int, int], None]) -> None:
    for start in range(0, total_bytes, _STEP_BYTES):
        step = min(_STEP_BYTES, total_bytes - start)
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start, step)
        except OSError:
            # An older kernel: touch every page instead. The file is new, so it holds zeros.
            for page in range(start, start + step, PAGE_BYTES):
                mapping[page] = 0
        progress(start + step, total_bytes)


def _read_header(descriptor: int, path: Path, epoch: int) -> int:
    """Return data_bytes. Raises TierUnavailable unless the file is the complete region of `epoch`."""
    status = os.fstat(descriptor)
    raw = os.pread(descriptor, _HEADER.size, 0) if stat.S_ISREG(status.st_mode) else b""
    if len(raw) < _HEADER.size:
        raise TierUnavailable(f"{path} is not a region")
    magic, version, _, found_epoch, data_bytes, data_start = _HEADER.unpack(raw)
    if magic != _MAGIC or version != _VERSION:
        raise TierUnavailable(f"{path} is not a region of this version")
    if found_epoch != epoch:
        raise TierUnavailable(f"{path} belongs to another start of the daemon")
    if data_bytes % PAGE_BYTES or data_start != _data_start(data_bytes) or status.st_size != data_start + data_bytes:
        raise TierUnavailable(f"{path} is damaged: its size is not what its header says")
    return int(data_bytes)
