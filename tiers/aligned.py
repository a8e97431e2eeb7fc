"""Page-aligned memory for direct I/O, lent out again and again."""

import contextlib
import mmap
import threading
from collections.abc import Iterator
from typing import Final

import numpy as np

PAGE_BYTES: Final = 4096
_MAX_IDLE_BUFFERS = 8


class AlignedBuffers:
    """A pool of page-aligned buffers; it keeps a few idle ones, so that their pages need no first touch again.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []

    @contextlib.contextmanager
    def borrow(self, num_bytes: int) -> Iterator[memoryview]:
        """Lend a writable buffer of `num_bytes` bytes of any content; no view of it may be used afterwards."""
        with self._lock:
            fitting = [buffer for buffer in self._idle if len(buffer) >= num_bytes]
            chosen = min(fitting, key=len, default=None)
            if chosen is not None:
                self._idle.remove(chosen)
        if chosen is None:
            # Private, unlike the default, which the kernel would back by a shared-memory file.
            chosen = mmap.mmap(-1, max(num_bytes, PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            yield memoryview(chosen)[:num_bytes]
        finally:
            with self._lock:
                self._idle.append(chosen)
                if len(self._idle) > _MAX_IDLE_BUFFERS:
                    # The smallest goes; its memory is freed with the last reference to it.
                    self._idle.remove(min(self._idle, key=len))


def is_aligned(view: memoryview) -> bool:
    """Return whether the bytes begin on a page and are a whole number of pages."""
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address % PAGE_BYTES == 0 and len(view) % PAGE_BYTES == 0
