"""The shared-memory region: one file, mapped by the daemon, its workers and every engine, that holds the RAM slots.

    0        4096                          data_start (aligned to a huge page, in a small region to a page)
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

import fcntl
import os
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from kvstore.core.errors import ConfigError, TierUnavailable
from tiers import pages
from tiers.backing import DEFAULT_BACKING, Backing, allocate
from tiers.mapping import Mapping
from tiers.pages import HUGE_PAGE_BYTES, PAGE_BYTES

_MAGIC = b"KVREGION"
_VERSION = 2
# magic, version, reserved, epoch, data_bytes, data_start
_HEADER = struct.Struct("<8sIIQQQ")
# From this size on the data area begins at a huge page, so that all of it can lie in huge pages.
_ALIGNED_FROM_BYTES = 16 * HUGE_PAGE_BYTES
_NEW_FILE_S = 10.0


class Region:
    """One mapping of the region file. Thread-safe; views stay valid after `close` until they are dropped."""

    def __init__(
        self, path: Path, mapping: Mapping, start: int, data_bytes: int, epoch: int, lock: int | None = None
    ) -> None:
        """Use `create` or `attach`. `start`: of the data area; `lock`: the descriptor that holds the owner's lock."""
        self.path = path
        self.data_bytes = data_bytes
        self.epoch = epoch
        self._lock = lock
        self._is_closed = False
        self._mapping = mapping
        whole = mapping.view
        self._generations = whole[PAGE_BYTES : PAGE_BYTES + 8 * (data_bytes // PAGE_BYTES)].cast("Q")
        self._data = whole[start : start + data_bytes]
        self._start = start
        self._address = mapping.address + start

    @classmethod
    def create(
        cls,
        path: Path,
        data_bytes: int,
        epoch: int,
        *,
        prefault: Callable[[int, int], None] | None = None,
        backing: Backing = DEFAULT_BACKING,
    ) -> Self:
        """Make the region file and map it; for the daemon, once per boot. `data_bytes` is rounded down to pages.

        All room is allocated here, so that no later access can end in SIGBUS on a full file system. With `prefault`
        the pages are also entered into this process' page table (see tiers/pages.py), and `prefault(done_bytes,
        total_bytes)` is called as it goes on. Raises ConfigError, naming need and have, where the file system is too
        small, where `path` exists, or where the backing asked for cannot be had.

        The owner holds an exclusive flock on the file as long as it lives, so that a file whose owner was killed can be
        told from one in use (`is_abandoned`).
        """
        data_bytes -= data_bytes % backing.page_bytes
        if data_bytes <= 0:
            raise ConfigError(f"the region {path} needs at least {backing.page_bytes} bytes")
        start = _data_start(data_bytes, backing.page_bytes)
        total_bytes = start + data_bytes
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot create the region file {path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            mapping = allocate(descriptor, path, total_bytes, backing, prefault)
            # Last, so that nobody can attach to a region that is not complete.
            mapping.view[: _HEADER.size] = _HEADER.pack(_MAGIC, _VERSION, 0, epoch, data_bytes, start)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return cls(path, mapping, start, data_bytes, epoch, descriptor)

    @classmethod
    def attach(cls, path: Path, epoch: int) -> Self:
        """Map the region of the daemon's boot `epoch`. Raises TierUnavailable where the file is not (or not yet,
        or no longer) that region."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise TierUnavailable(f"cannot open the region {path}: {error.strerror}") from error
        try:
            start, data_bytes = _read_header(descriptor, path, epoch)
            mapping = Mapping(descriptor, start + data_bytes)
        except OSError as error:
            raise TierUnavailable(f"cannot map the region {path}: {error.strerror}") from error
        finally:
            os.close(descriptor)
        # A fork would make pinned pages copy-on-write, and the device would go on writing to the other copy.
        mapping.keep_from_children()
        return cls(path, mapping, start, data_bytes, epoch)

    @property
    def address(self) -> int:
        """The address of the data area in this process, for cudaHostRegister."""
        return self._address

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return a writable view of `num_bytes` bytes of the data area. Raises ValueError where they lie outside."""
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.data_bytes:
            raise ValueError(f"[{offset}, {offset + num_bytes}) lies outside of the region's {self.data_bytes} bytes")
        return self._data[offset : offset + num_bytes]

    def populate(self, threads: int = 1) -> bool:
        """Enter all pages into this process' page table, as `pages.populate`; for an attached mapping, whose first
        copies would else take several times as long. Blocks, without the interpreter lock; idempotent.

        False where it cannot be done: the kernel is too old, or the region was closed.
        """
        try:
            # Keeps the mapping, should the region be closed meanwhile.
            with self._data[:]:
                return pages.populate(self._address - self._start, self._start + self.data_bytes, threads)
        except (OSError, ValueError):
            return False

    def huge_bytes(self) -> int:
        """Return how much of the region huge pages hold in this process; without prefault that is not known (0)."""
        return min(self.data_bytes, pages.huge_bytes(self._address - self._start))

    def is_huge(self) -> bool:
        """Return whether the data area, but for its very end, lies on huge pages; its mapping need not be populated."""
        for offset in range(0, self.data_bytes, HUGE_PAGE_BYTES):
            # One touch enters the whole of a huge page.
            self._data[offset]
        return self.huge_bytes() > max(0, self.data_bytes - HUGE_PAGE_BYTES)

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


def _data_start(data_bytes: int, page_bytes: int) -> int:
    if data_bytes >= _ALIGNED_FROM_BYTES:
        page_bytes = max(page_bytes, HUGE_PAGE_BYTES)
    return -(-(PAGE_BYTES + 8 * (data_bytes // PAGE_BYTES)) // page_bytes) * page_bytes


def _read_header(descriptor: int, path: Path, epoch: int) -> tuple[int, int]:
    """Return data_start and data_bytes. Raises TierUnavailable unless the file is the complete region of `epoch`."""
    status = os.fstat(descriptor)
    raw = os.pread(descriptor, _HEADER.size, 0) if stat.S_ISREG(status.st_mode) else b""
    if len(raw) < _HEADER.size:
        raise TierUnavailable(f"{path} is not a region")
    magic, version, _, found_epoch, data_bytes, data_start = _HEADER.unpack(raw)
    if magic != _MAGIC or version != _VERSION:
        raise TierUnavailable(f"{path} is not a region of this version")
    if found_epoch != epoch:
        raise TierUnavailable(f"{path} belongs to another start of the daemon")
    is_whole = status.st_size == data_start + data_bytes and not (data_start | data_bytes) % PAGE_BYTES
    if not is_whole or data_start < _data_start(data_bytes, PAGE_BYTES):
        raise TierUnavailable(f"{path} is damaged: its size is not what its header says")
    return int(data_start), int(data_bytes)
