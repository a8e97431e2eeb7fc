"""A segment file: bytes at offsets, past the page cache where the file system allows it.

A record is a header page and a payload padded to whole pages (`kvstore.core.block`); records lie in equal slots:

    slot   0                        1                        2
           | header | payload  pad | header | payload  pad | ...
           ^ 0                      ^ record_bytes           ^ 2 * record_bytes

Direct I/O wants memory, lengths and offsets in whole pages.
Covers: one file and its system calls. Does not cover: from which memory (`tiers/pieces.py`), which slot is whose
(`tiers/segments.py`), what is right (`tiers/reader.py`).
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from kvstore.core.block import HEADER_BYTES
from tiers.pages import PAGE_BYTES

_ZEROS_BYTES = 4 << 20


def record_size(payload_bytes: int) -> int:
    """Return what a record with such a payload takes up on disk."""
    return HEADER_BYTES + -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES


class RecordFile:
    """An open segment file of slots of `record_bytes`. Thread-safe; the caller keeps slots from being used twice."""

    def __init__(self, path: Path, record_bytes: int, *, create: bool = False) -> None:
        """Open or, with `create`, make the file (mode 0600). Raises OSError; a symbolic link is refused."""
        self.record_bytes = record_bytes
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0)
        self.is_direct = True
        """Whether the disk reads and writes the caller's memory itself, which then has to lie on pages."""
        try:
            self.descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # The file system knows no direct I/O. With O_CREAT the file may be there all the same.
            self.descriptor = os.open(path, flags & ~os.O_EXCL, 0o600)
            self.is_direct = False

    def allocate(self, num_bytes: int) -> None:
        """Take the room for a file of that length, durable after `sync`. Raises OSError."""
        try:
            os.posix_fallocate(self.descriptor, 0, num_bytes)
        except OSError as error:
            # Where the file system cannot allocate, the C library writes single bytes, which direct I/O refuses.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            zeros = memoryview(mmap.mmap(-1, min(num_bytes, _ZEROS_BYTES)))
            for start in range(0, num_bytes, len(zeros)):
                self.write([zeros[: num_bytes - start]], start)

    def write(self, vector: list[memoryview], offset: int) -> None:
        """Write the pieces one behind the other; durable after `sync`. Raises OSError."""
        if self._move(os.pwritev, vector, offset) < sum(map(len, vector)):
            raise OSError(errno.EIO, "the disk took only a part")

    def read(self, vector: list[memoryview], offset: int) -> int:
        """Fill the pieces and return how many bytes there were: fewer only at the end of the file. Raises OSError."""
        return self._move(os.preadv, vector, offset)

    def sync(self) -> None:
        """Make all writes that have returned durable. Raises OSError."""
        os.fdatasync(self.descriptor)

    def close(self) -> None:
        """Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    # ------------------------------------------------------------ helpers

    def _move(self, call: Callable[[int, list[memoryview], int], int], vector: list[memoryview], offset: int) -> int:
        """Call preadv or pwritev until everything has moved, or the end of the file; return how many bytes did."""
        total, wanted = 0, sum(map(len, vector))
        while total < wanted:
            try:
                moved = call(self.descriptor, vector, offset + total)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._leave_direct():
                    raise
                continue
            total += moved
            if moved % PAGE_BYTES or moved == 0:
                break
            vector = _rest(vector, moved)
        return total

    def _leave_direct(self) -> bool:
        """Go on through the page cache; return False where that was so already."""
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        if not flags & os.O_DIRECT:
            return False
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.is_direct = False
        return True


def _rest(vector: list[memoryview], moved: int) -> list[memoryview]:
    """Return what is left of the pieces after the first `moved` bytes."""
    for index, piece in enumerate(vector):
        if moved < len(piece):
            return [piece[moved:], *vector[index + 1 :]]
        moved -= len(piece)
    return []
