"""Reads and writes records in a segment file, past the page cache where the file system allows it.

A record is a header page and a payload padded to whole pages (`kvstore.core.block`); records lie in equal slots:

    slot   0                        1                        2
           | header | payload  pad | header | payload  pad | ...
           ^ 0                      ^ record_bytes           ^ 2 * record_bytes

Direct I/O wants memory, lengths and offsets in whole pages. Slots of the shared region are like that, so their bytes
go to and from the disk without a copy; anything else goes through a page-aligned bounce buffer.
Covers: bytes of records. Does not cover: which slot is whose (`tiers/segments.py`), what is right (`tiers/ssd.py`).
"""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvstore.core.block import HEADER_BYTES
from tiers.aligned import PAGE_BYTES, AlignedBuffers, is_aligned

# One system call moves up to this much: enough for the disk to work on several requests at once (measured with
# 720 KiB records), little enough that a bounce buffer stays small. Well below the kernel's 1024 pieces.
_MAX_RUN_BYTES = 16 << 20
_MAX_RUN_RECORDS = 256


def record_size(payload_bytes: int) -> int:
    """Return what a record with such a payload takes up on disk."""
    return HEADER_BYTES + -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A record to be written: a header of HEADER_BYTES bytes and a payload of any length that fits."""

    slot: int
    header: bytes
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Incoming:
    """A record to be read: its payload goes to `into`."""

    slot: int
    into: memoryview


class RecordFile:
    """An open segment file of slots of `record_bytes`. Thread-safe; the caller keeps slots from being used twice."""

    def __init__(self, path: Path, record_bytes: int, buffers: AlignedBuffers, *, create: bool = False) -> None:
        """Open or, with `create`, make the file (mode 0600). Raises OSError; a symbolic link is refused."""
        self._record_bytes = record_bytes
        self._buffers = buffers
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0)
        try:
            self.descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # The file system knows no direct I/O. With O_CREAT the file may be there all the same.
            self.descriptor = os.open(path, flags & ~os.O_EXCL, 0o600)

    def allocate(self, num_bytes: int) -> None:
        """Take the room for a file of that length, durable after `sync`. Raises OSError."""
        try:
            os.posix_fallocate(self.descriptor, 0, num_bytes)
        except OSError as error:
            # Where the file system cannot allocate, the C library writes single bytes, which direct I/O refuses.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            with self._buffers.borrow(min(num_bytes, _MAX_RUN_BYTES)) as buffer:
                buffer[:] = bytes(len(buffer))
                for start in range(0, num_bytes, len(buffer)):
                    piece = buffer[: num_bytes - start]
                    if self._move(os.pwritev, [piece], start) < len(piece):
                        raise OSError(errno.EIO, "the disk took only a part") from None

    def write(self, records: Sequence[Outgoing]) -> None:
        """Write the records; durable after `sync`. Adjacent ones share a system call. Raises OSError."""
        for run in _runs(sorted(records, key=lambda record: record.slot), self._record_bytes):
            self._write_run(run)

    def sync(self) -> None:
        """Make all writes that have returned durable. Raises OSError."""
        os.fdatasync(self.descriptor)

    def read(self, records: Sequence[Incoming]) -> list[bytes | None]:
        """Read each payload into its place and return the headers, in the order of `records`; None where the disk
        failed or the file ends before the record does. Adjacent records share a system call."""
        order = sorted(range(len(records)), key=lambda index: records[index].slot)
        headers: list[bytes | None] = []
        for run in _runs([records[index] for index in order], self._record_bytes):
            try:
                headers += self._read_run(run)
            except OSError:
                # Alone each, so that one bad sector costs one record.
                headers += [self._read_alone(record) for record in run]
        answer: list[bytes | None] = [None] * len(records)
        for index, header in zip(order, headers, strict=True):
            answer[index] = header
        return answer

    def close(self) -> None:
        """Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    # ------------------------------------------------------------ helpers

    def _write_run(self, run: list[Outgoing]) -> None:
        body_bytes = self._record_bytes - HEADER_BYTES
        bounced = [not is_aligned(record.payload) for record in run]
        with self._buffers.borrow(len(run) * HEADER_BYTES + sum(bounced) * body_bytes) as buffer:
            pieces = _Pieces(buffer)
            vector = []
            for record, is_bounced in zip(run, bounced, strict=True):
                header = pieces.take(HEADER_BYTES)
                header[:] = record.header
                body = record.payload
                if is_bounced:
                    body = pieces.take(body_bytes)
                    body[: len(record.payload)] = record.payload
                    body[len(record.payload) :] = bytes(body_bytes - len(record.payload))
                vector += [header, body]
            moved = self._move(os.pwritev, vector, run[0].slot * self._record_bytes)
            if moved < len(run) * self._record_bytes:
                raise OSError(errno.EIO, "the disk took only a part")

    def _read_run(self, run: list[Incoming]) -> list[bytes | None]:
        body_bytes = self._record_bytes - HEADER_BYTES
        bounced = [not is_aligned(record.into) for record in run]
        with self._buffers.borrow(len(run) * HEADER_BYTES + sum(bounced) * body_bytes) as buffer:
            pieces = _Pieces(buffer)
            headers, bodies = [], []
            for record, is_bounced in zip(run, bounced, strict=True):
                headers.append(pieces.take(HEADER_BYTES))
                bodies.append(pieces.take(body_bytes) if is_bounced else record.into)
            vector = [piece for pair in zip(headers, bodies, strict=True) for piece in pair]
            moved = self._move(os.preadv, vector, run[0].slot * self._record_bytes)
            complete = moved // self._record_bytes
            for record, body, is_bounced in zip(run[:complete], bodies, bounced, strict=False):
                if is_bounced:
                    record.into[:] = body[: len(record.into)]
            return [bytes(header) if index < complete else None for index, header in enumerate(headers)]

    def _read_alone(self, record: Incoming) -> bytes | None:
        try:
            return self._read_run([record])[0]
        except OSError:
            return None

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
        return True


class _Pieces:
    """Cuts a buffer into consecutive pieces."""

    def __init__(self, buffer: memoryview) -> None:
        self._rest = buffer

    def take(self, num_bytes: int) -> memoryview:
        piece, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        return piece


_RecordT = TypeVar("_RecordT", Outgoing, Incoming)


def _runs(records: list[_RecordT], record_bytes: int) -> Iterator[list[_RecordT]]:
    """Split records that are sorted by slot into runs of adjacent slots that one system call can move."""
    longest = max(1, min(_MAX_RUN_RECORDS, _MAX_RUN_BYTES // record_bytes))
    run: list[_RecordT] = []
    for record in records:
        if run and (record.slot != run[-1].slot + 1 or len(run) == longest):
            yield run
            run = []
        run.append(record)
    if run:
        yield run


def _rest(vector: list[memoryview], moved: int) -> list[memoryview]:
    """Return what is left of the pieces after the first `moved` bytes."""
    for index, piece in enumerate(vector):
        if moved < len(piece):
            return [piece[moved:], *vector[index + 1 :]]
        moved -= len(piece)
    return []
