"""How the kernel backs a mapping: which memory, how large its pages, and whether they are there yet.

Measured on 2 cores with /dev/shm: a first touch costs as much as eight warm copies; populating a new file runs at 1.6
GB/s on one thread and 3.4 on two, after a `posix_fallocate` of the same bytes at less than half of that; a second
mapping of memory that is there at 4.5 GB/s; with huge pages at 30 and more than 1,000 GB/s.

A tmpfs that was mounted without huge pages, as /dev/shm is nearly everywhere, gives them all the same to who asks for
each (MADV_COLLAPSE, Linux 6.1 and newer, https://docs.kernel.org/admin-guide/mm/transhuge.html). Where one small page
of each is there, nothing but that has to be copied: 10 GB/s on one thread, against 0.3 where all of them are.
"""

import ctypes
import errno
import os
import platform
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

PAGE_BYTES: Final = 4096
HUGE_PAGE_BYTES: Final = 2 << 20
STEP_BYTES: Final = 64 << 20
# Neither is in the mmap module of Python 3.11; Linux 5.14 and 6.1, and newer.
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25
_COLLAPSE_TRIES: Final = 8
_MLOCK_ONFAULT: Final = 1
_MPOL_BIND: Final = 2
_MAX_NODES: Final = 1024
_MBIND: Final = {"x86_64": 237, "aarch64": 235}
_MAX_THREADS: Final = 16
_HUGE_FIELDS: Final = ("ShmemPmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:")

# Through ctypes, since mmap.madvise keeps the interpreter lock for as long as it takes.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def default_threads() -> int:
    """Return on how many threads it pays to populate memory: one per core that this process may use."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def populate(
    address: int,
    num_bytes: int,
    threads: int,
    progress: Callable[[int, int], None] | None = None,
    *,
    huge: bool = False,
) -> bool:
    """Enter the pages of a shared mapping into this process' page table, writable, allocating those that are not there;
    no byte changes. `progress(done_bytes, num_bytes)` is called in the caller's thread. `huge`: nothing is there yet,
    and what can be allocated as huge pages shall be.

    Returns False where the kernel is older than 5.14; then nothing was done. Raises OSError (ENOSPC) where the file
    system has no room. Blocks; the mapping must stay until it returns.
    """
    starts = range(0, num_bytes, STEP_BYTES)
    collapse = _Collapse() if huge else None

    def step(part: tuple[int, int]) -> int:
        if collapse is not None:
            collapse.allocate(address + part[0], part[1])
        return _madvise(address + part[0], part[1], _MADV_POPULATE_WRITE)

    with ThreadPoolExecutor(threads, thread_name_prefix="populate") as pool:
        steps = [(start, min(STEP_BYTES, num_bytes - start)) for start in starts]
        done_bytes = 0
        for (_, step_bytes), error in zip(steps, pool.map(step, steps), strict=True):
            if error:
                pool.shutdown(cancel_futures=True)
                if error == errno.EINVAL:
                    return False
                # EFAULT: what a touch would have been killed for.
                error = errno.ENOSPC if error == errno.EFAULT else error
                raise OSError(error, os.strerror(error))
            done_bytes += step_bytes
            if progress is not None:
                progress(done_bytes, num_bytes)
    return True


def lock_on_fault(address: int, num_bytes: int) -> None:
    """Keep the pages of the mapping from being swapped out, from when each is first touched. Raises OSError."""
    if _libc.mlock2(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _MLOCK_ONFAULT):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def lock_limit_bytes() -> int | None:
    """Return how much memory this process may lock, None where that has no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def bind(address: int, num_bytes: int, node: int) -> None:
    """Let the memory behind a shared mapping come from one NUMA node, whoever touches it first; what is there already
    stays where it is. Raises OSError; ENOSYS where the kernel knows nothing of NUMA."""
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < _MAX_NODES:
        raise OSError(errno.ENOSYS, f"no way is known to bind memory on {platform.machine()}")
    mask = (ctypes.c_uint64 * (_MAX_NODES // 64))()
    mask[node // 64] = 1 << (node % 64)
    arguments = (address, num_bytes, _MPOL_BIND, ctypes.addressof(mask), _MAX_NODES + 1, 0)
    if _libc.syscall(ctypes.c_long(number), *(ctypes.c_ulong(argument) for argument in arguments)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def huge_bytes(address: int, smaps: Path = Path("/proc/self/smaps")) -> int:
    """Return how many bytes of the mapping that begins at `address` huge pages hold in this process' page table."""
    with smaps.open() as lines:
        return 1024 * sum(_huge_kib(lines, address))


class _Collapse:
    """Allocates huge pages until the kernel has none left or refuses; then it is all done in small ones, since to look
    for huge ones in fragmented memory takes long."""

    def __init__(self) -> None:
        self._goes_on = True

    def allocate(self, address: int, num_bytes: int) -> None:
        """Of this part of a mapping, of which nothing is there yet, what lies on whole huge pages."""
        first = address + -address % HUGE_PAGE_BYTES
        end = (address + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        for one in range(first, end, HUGE_PAGE_BYTES):
            # By madvise and not by a touch, which on a full file system would be the end of the process.
            if not self._goes_on or _madvise(one, PAGE_BYTES, _MADV_POPULATE_WRITE):
                return
        error = errno.EAGAIN if first < end else 0
        # EAGAIN: some page was in use this moment; then those behind it were not tried, and those before it are done.
        for _ in range(_COLLAPSE_TRIES):
            if error == errno.EAGAIN:
                error = _madvise(first, end - first, _MADV_COLLAPSE)
        if error not in (0, errno.EAGAIN):
            self._goes_on = False


def _madvise(address: int, num_bytes: int, advice: int) -> int:
    """Return the error's number, 0 where there was none."""
    if _libc.madvise(address, num_bytes, advice):
        return ctypes.get_errno()
    return 0


def _huge_kib(lines: Iterator[str], address: int) -> Iterator[int]:
    is_ours = False
    for line in lines:
        first, *rest = line.split()
        if not first.endswith(":"):
            # The head of one mapping: "7f0000000000-7f0040000000 rw-s …"
            is_ours = int(first.partition("-")[0], 16) == address
        elif is_ours and first in _HUGE_FIELDS:
            yield int(rest[0])
