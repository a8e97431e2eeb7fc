"""Page-aligned memory whose pages are there already, and the plainest way to copy between two such places."""

import contextlib
import ctypes
import mmap
from typing import Final

import numpy as np

PAGE_BYTES: Final = 4096


class Buffers:
    """`count` buffers of `num_bytes` each in one private mapping, filled with noise, so that every page was touched.

    `views[i]` begins on a page. On huge pages where the system has them, or the ceiling would be a matter of luck:
    direct writes went at 3.1 GB/s from small pages that lay scattered over the memory, at 8.5 from huge ones.
    """

    def __init__(self, count: int, num_bytes: int, seed: int = 0) -> None:
        stride = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        self._mapping = mmap.mmap(-1, count * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = memoryview(self._mapping)
        self.views = [whole[index * stride : index * stride + num_bytes] for index in range(count)]
        for index, view in enumerate(self.views):
            fill(view, seed * 1_000_003 + index)


def fill(view: memoryview, seed: int) -> None:
    """Write noise that no disk compresses and no two buffers share."""
    generator = np.random.Generator(np.random.SFC64(seed))
    whole = len(view) // 8 * 8
    np.frombuffer(view[:whole], dtype=np.uint64)[:] = generator.integers(0, 1 << 64, whole // 8, dtype=np.uint64)
    view[whole:] = bytes(len(view) - whole)


def address(view: memoryview) -> int:
    """Return where the bytes lie."""
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


def memcpy(target: memoryview, source: memoryview) -> None:
    """The C library's own copy: what nothing on one thread is expected to beat."""
    ctypes.memmove(address(target), address(source), len(source))


def copy(target: memoryview, source: memoryview) -> None:
    """The copy of the engine's movers on the CPU (`tiers/hbm.py`): numpy's, without the interpreter lock."""
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
