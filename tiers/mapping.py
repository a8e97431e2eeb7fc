"""A file in memory, shared and writable, laid so that the kernel can enter it in huge pages.

It can where a huge page of the file lies on a huge page of addresses. File systems that have such pages by themselves
see to that; on any other we do.
"""

import contextlib
import ctypes
import mmap
import os
from typing import Final

from tiers.aligned import address_of
from tiers.pages import HUGE_PAGE_BYTES, PAGE_BYTES

# In the mmap module of Python 3.13, which still has no mmap at a given address.
_MAP_NORESERVE: Final = 0x4000
_MAP_FIXED: Final = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_FAILED: Final = ctypes.c_void_p(-1).value


class Mapping:
    """`view` is the whole file, in memory from `address` on."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """The descriptor is not needed any longer. Raises OSError; ENOMEM also where a hugetlbfs has too few pages."""
        if os.fstat(descriptor).st_blksize > PAGE_BYTES:
            self._owner = mmap.mmap(descriptor, num_bytes)
            self.view = memoryview(self._owner)
        else:
            self._owner, begin = _map_aligned(descriptor, num_bytes)
            self.view = memoryview(self._owner)[begin : begin + num_bytes]
        self.address = address_of(self.view)
        # Refused where the kernel has no huge pages, and on a hugetlbfs, which needs no asking.
        with contextlib.suppress(OSError):
            self._owner.madvise(mmap.MADV_HUGEPAGE)

    def keep_from_children(self) -> None:
        """A process that is forked off has no part in it."""
        self._owner.madvise(mmap.MADV_DONTFORK)

    def close(self) -> None:
        """Unmap, or, where others hold views, leave that to the last of them. Idempotent."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self._owner.close()


def _map_aligned(descriptor: int, num_bytes: int) -> tuple[mmap.mmap, int]:
    """Return a mapping with room to spare, and where in it the file begins: it covers the rest, and goes with it.
    Where there is no such room the file begins anywhere."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        owner = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=flags)
    except OSError:
        # Where every mapping has to be backed (vm.overcommit_memory 2) there may be no room for one of nothing.
        return mmap.mmap(descriptor, num_bytes), 0
    address = address_of(memoryview(owner))
    begin = -address % HUGE_PAGE_BYTES
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(address + begin, num_bytes, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) == _FAILED:
        error = ctypes.get_errno()
        owner.close()
        raise OSError(error, os.strerror(error))
    return owner, begin
