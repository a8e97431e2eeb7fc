"""The memory a region is made of: allocated at once, in the largest pages that can be had, on the node asked for."""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.core.errors import ConfigError
from tiers import pages
from tiers.mapping import Mapping
from tiers.pages import PAGE_BYTES

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Backing:
    """What memory a new region is made of. `page_bytes` is the page size of its file system: larger than PAGE_BYTES on
    a hugetlbfs. `numa_node` None: wherever the kernel likes. `is_locked`: never swapped out."""

    page_bytes: int = PAGE_BYTES
    numa_node: int | None = None
    is_locked: bool = False


DEFAULT_BACKING: Final = Backing()


def allocate(
    descriptor: int,
    path: Path,
    total_bytes: int,
    backing: Backing,
    prefault: Callable[[int, int], None] | None,
) -> Mapping:
    """Return a mapping of the new file `path`, all of whose pages exist then; with `prefault` they are in this process'
    page table too, as huge ones where those can be had, and it is told (done_bytes, total_bytes). Raises ConfigError,
    naming what cannot be had."""
    if backing.page_bytes == PAGE_BYTES:
        # At once: else all memory of the machine would be taken before the file system says no.
        _check_room(descriptor, path, total_bytes)
    try:
        os.ftruncate(descriptor, total_bytes)
        mapping = Mapping(descriptor, total_bytes)
    except OSError as error:
        # A hugetlbfs reserves its pages when they are mapped.
        if error.errno in (*_NO_ROOM, errno.ENOMEM):
            raise _too_small(path, total_bytes) from error
        raise ConfigError(f"cannot map the region file {path}: {error.strerror}") from error
    # All before the first touch: what is there already would stay as it is.
    if backing.numa_node is not None:
        _bind(mapping, total_bytes, backing.numa_node)
    if backing.is_locked:
        _lock(mapping, total_bytes)
    try:
        # Not with posix_fallocate, which makes no huge pages and has to be followed by the populating anyway.
        if prefault is None or not pages.populate(
            mapping.address, total_bytes, pages.default_threads(), prefault, huge=backing.page_bytes == PAGE_BYTES
        ):
            _fill(descriptor, mapping, total_bytes, prefault)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise _too_small(path, total_bytes) from error
        raise ConfigError(f"cannot allocate the region file {path}: {error.strerror}") from error
    return mapping


def _fill(descriptor: int, mapping: Mapping, total_bytes: int, prefault: Callable[[int, int], None] | None) -> None:
    for start in range(0, total_bytes, pages.STEP_BYTES):
        step_bytes = min(pages.STEP_BYTES, total_bytes - start)
        os.posix_fallocate(descriptor, start, step_bytes)
        if prefault is not None:
            # The file is new, so it holds zeros.
            for page in range(start, start + step_bytes, PAGE_BYTES):
                mapping.view[page] = 0
            prefault(start + step_bytes, total_bytes)


def _bind(mapping: Mapping, total_bytes: int, node: int) -> None:
    try:
        pages.bind(mapping.address, total_bytes, node)
    except OSError as error:
        # Without NUMA all memory is node 0.
        if error.errno == errno.ENOSYS and node == 0:
            return
        raise ConfigError(f"cannot take the region's memory from NUMA node {node}: {error.strerror}") from error


def _lock(mapping: Mapping, total_bytes: int) -> None:
    try:
        pages.lock_on_fault(mapping.address, total_bytes)
    except OSError as error:
        limit_bytes = pages.lock_limit_bytes()
        limit = "no limit" if limit_bytes is None else f"a limit of {limit_bytes} bytes"
        raise ConfigError(
            f"cannot lock the region's {total_bytes} bytes in memory: {error.strerror}; the process has {limit} on "
            "locked memory (RLIMIT_MEMLOCK); raise it (ulimit -l; docker: --ulimit memlock=-1; Kubernetes: the "
            "capability IPC_LOCK) or set ram.mlock to false"
        ) from error


def _check_room(descriptor: int, path: Path, need_bytes: int) -> None:
    room = os.fstatvfs(descriptor)
    if need_bytes > room.f_bavail * room.f_frsize:
        raise _too_small(path, need_bytes)


def _too_small(path: Path, need_bytes: int) -> ConfigError:
    room = os.statvfs(path.parent)
    return ConfigError(
        f"the region needs {need_bytes} bytes, but {path.parent} has {room.f_bavail * room.f_frsize} free; "
        "choose a smaller RAM tier or give that file system more room"
    )
