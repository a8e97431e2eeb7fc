"""Cuts the records of a batch into pieces of 4 or 8 MiB at most, which threads move between memory and disk together.

    records of up to 4 MiB    neighbours on the disk share a piece
    longer ones               | header, payload … | payload … | payload … |   each part is a piece

By default the bytes take the way through a buffer of huge pages (`tiers/aligned.py` says why): one copy more, and no
demand on the caller's memory. With `is_straight` aligned memory is read and written by the disk itself.
Covers: bytes of records. Does not cover: where they lie (`tiers/segments.py`), and whether they are right.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from kvstore.core.block import HEADER_BYTES, Checksum, checksum
from tiers.aligned import AlignedBuffers, address_of, copy_bytes, is_aligned
from tiers.crew import Job, Rest
from tiers.direct import RecordFile
from tiers.pages import PAGE_BYTES

# Enough for the disk to work on several requests at once, little enough that a batch keeps several threads busy.
PIECE_BYTES: Final = 4 << 20
# What needs no buffer comes in longer parts: the disk gets all of a part at once, and waits less often for the next.
_STRAIGHT_BYTES: Final = (8 << 20) + HEADER_BYTES
# Well below the kernel's 1024 stretches of memory in one call.
_MAX_RUN_RECORDS: Final = 256

Seal = Callable[[memoryview | None], tuple[bytes, memoryview]]
Accept = Callable[[memoryview | None, memoryview, int], None]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A record to be written.

    `seal(place)` returns its header page and what is to be stored behind it, which it may put into `place` (room for
    the whole body); it is called once, on any thread. `is_payload_stored`: what is stored is the payload as it is.
    """

    slot: int
    payload: memoryview
    seal: Seal
    is_payload_stored: bool = True


@dataclass(frozen=True, slots=True)
class Incoming:
    """A record to be read into `into`.

    `accept(header, stored, checksum)` is called once, on any thread, with the header page (None where the disk failed
    or the file ends before the record does), the stored bytes (`into` itself, or memory that is gone afterwards) and
    the checksum that they have, whatever the header says.
    """

    slot: int
    into: memoryview
    accept: Accept


class PieceMover:
    """Makes the jobs for a Crew. Thread-safe."""

    def __init__(self, buffers: AlignedBuffers, *, is_straight: bool = False) -> None:
        self._buffers = buffers
        self._is_straight = is_straight

    def write_jobs(self, file: RecordFile, records: Sequence[Outgoing]) -> Iterator[Job]:
        """Yield jobs that write the records; durable after `RecordFile.sync`. They raise OSError."""
        for run in _runs(sorted(records, key=lambda record: record.slot), file.record_bytes):
            if file.record_bytes <= PIECE_BYTES:
                yield partial(self._write_run, file, run)
            elif run[0].is_payload_stored:
                yield from (
                    partial(self._write_part, file, run[0], part) for part in _parts(file.record_bytes, PIECE_BYTES)
                )
            else:
                yield partial(self._write_run, file, run)

    def read_jobs(self, file: RecordFile, records: Iterable[Incoming]) -> Iterator[Job]:
        """Yield jobs that read the records, which come in the order of their slots and are drawn as late as possible,
        and tell each one's `accept`; a fault of the disk is told there. What does not need the buffer any more, the
        checksum and telling, they leave for later."""
        for run in _runs(records, file.record_bytes):
            if file.record_bytes <= PIECE_BYTES:
                yield partial(self._read_run, file, run)
            else:
                whole = _Whole(run[0], file.record_bytes)
                longest = _STRAIGHT_BYTES if self._goes_straight(file, run[0].into) else PIECE_BYTES
                yield from (partial(self._read_part, file, whole, part) for part in _parts(file.record_bytes, longest))

    # ------------------------------------------------------------ writing

    def _write_run(self, file: RecordFile, run: Sequence[Outgoing]) -> None:
        body_bytes = file.record_bytes - HEADER_BYTES
        straight = [record.is_payload_stored and self._goes_straight(file, record.payload) for record in run]
        with self._buffers.borrow(len(run) * file.record_bytes - sum(straight) * body_bytes) as rest:
            vector = []
            for record, is_straight in zip(run, straight, strict=True):
                place, rest = _cut(rest, HEADER_BYTES if is_straight else file.record_bytes)
                header, stored = record.seal(None if is_straight else place[HEADER_BYTES:])
                place[:HEADER_BYTES] = header
                vector.append(place)
                if is_straight:
                    vector.append(stored)
                else:
                    _put(place[HEADER_BYTES:], stored)
            file.write(vector, run[0].slot * file.record_bytes)

    def _write_part(self, file: RecordFile, record: Outgoing, part: range) -> None:
        """Write these bytes of the record; the first part waits for the checksum of all of them."""
        in_front = HEADER_BYTES if part.start == 0 else 0
        payload = _of_payload(record.payload, part)
        is_straight = self._goes_straight(file, payload)
        with self._buffers.borrow(in_front if is_straight else len(part)) as buffer:
            if in_front:
                buffer[:in_front] = record.seal(None)[0]
            if is_straight:
                vector = [buffer, payload] if in_front else [payload]
            else:
                _put(buffer[in_front:], payload)
                vector = [buffer]
            file.write(vector, record.slot * file.record_bytes + part.start)

    # ------------------------------------------------------------ reading

    def _read_run(self, file: RecordFile, run: Sequence[Incoming]) -> Rest | None:
        body_bytes = file.record_bytes - HEADER_BYTES
        straight = [self._goes_straight(file, record.into) for record in run]
        with self._buffers.borrow(len(run) * file.record_bytes - sum(straight) * body_bytes) as rest:
            places, vector = [], []
            for record, is_straight in zip(run, straight, strict=True):
                place, rest = _cut(rest, HEADER_BYTES if is_straight else file.record_bytes)
                places.append(place)
                vector += [place, record.into] if is_straight else [place]
            try:
                moved = file.read(vector, run[0].slot * file.record_bytes)
            except OSError:
                moved = -1
            if moved < 0 and len(run) > 1:
                # Alone each, so that one bad sector costs one record.
                for record in run:
                    if (tell := self._read_run(file, [record])) is not None:
                        tell()
                return None
            num_whole = max(0, moved) // file.record_bytes
            for record in run[num_whole:]:
                record.accept(None, record.into, 0)
            arrived = [
                (record, place[:HEADER_BYTES], record.into if is_straight else place[HEADER_BYTES:][: len(record.into)])
                for record, place, is_straight in zip(run[:num_whole], places, straight, strict=False)
            ]
            if all(straight):
                # The buffer is gone by then.
                return partial(_tell, [(record, memoryview(bytes(header)), into) for record, header, into in arrived])
            _tell(arrived)
            return None

    def _read_part(self, file: RecordFile, whole: "_Whole", part: range) -> Rest:
        in_front = HEADER_BYTES if part.start == 0 else 0
        payload = _of_payload(whole.record.into, part)
        is_straight = self._goes_straight(file, payload)
        header = None
        with self._buffers.borrow(in_front if is_straight else len(part)) as buffer:
            vector = [buffer] if not is_straight else [buffer, payload] if in_front else [payload]
            try:
                moved = file.read(vector, whole.record.slot * file.record_bytes + part.start)
            except OSError:
                moved = -1
            if moved == len(part):
                if in_front:
                    header = bytes(buffer[:in_front])
                if not is_straight:
                    copy_bytes(payload, buffer[in_front:][: len(payload)])
        return partial(whole.part_ended, part, payload if moved == len(part) else None, header)

    def _goes_straight(self, file: RecordFile, view: memoryview) -> bool:
        # Through the page cache it is the kernel that copies, whatever the memory, but not the pad behind the bytes.
        return (self._is_straight or not file.is_direct) and is_aligned(view)


def _tell(arrived: Sequence[tuple[Incoming, memoryview, memoryview]]) -> None:
    for record, header, stored in arrived:
        record.accept(header, stored, checksum(stored))


class _Whole:
    """A record whose parts are read by several jobs. Its checksum is made of one part after the other, as soon as they
    are there, while others are still on their way; so at the end little is left to do."""

    def __init__(self, record: Incoming, record_bytes: int) -> None:
        self.record = record
        self._record_bytes = record_bytes
        self._lock = threading.Lock()
        # Parts that have ended, by where they start, with None for what could not be read; without those summed.
        self._ended: dict[int, tuple[range, memoryview | None]] = {}
        self._next = 0
        self._checksum = Checksum()
        self._header: bytes | None = None
        self._is_broken = False

    def part_ended(self, part: range, payload: memoryview | None, header: bytes | None) -> None:
        """Take what a part holds of the payload, None where it could not be read; the first one has the header."""
        with self._lock:
            self._ended[part.start] = part, payload
            self._header = self._header or header
        is_last = False
        while not is_last:
            with self._lock:
                if self._next not in self._ended:
                    # It is not there yet, or another thread is at it, which will come to this one.
                    return
                part, payload = self._ended.pop(self._next)
            if payload is None:
                self._is_broken = True
            else:
                self._checksum.update(payload)
            is_last = part.stop == self._record_bytes
            self._next = part.stop
        header = None if self._is_broken else self._header
        self.record.accept(None if header is None else memoryview(header), self.record.into, self._checksum.intdigest())


_RecordT = TypeVar("_RecordT", Outgoing, Incoming)


def _runs(records: Iterable[_RecordT], record_bytes: int) -> Iterator[list[_RecordT]]:
    """Split records that are sorted by slot into runs of adjacent slots that make one piece."""
    longest = max(1, min(_MAX_RUN_RECORDS, PIECE_BYTES // record_bytes))
    run: list[_RecordT] = []
    for record in records:
        if run and (record.slot != run[-1].slot + 1 or len(run) == longest):
            yield run
            run = []
        run.append(record)
    if run:
        yield run


def _parts(record_bytes: int, max_bytes: int) -> Iterator[range]:
    """Yield which bytes of a record make which part: whole pages, alike but for the last."""
    num_pages = -(-record_bytes // PAGE_BYTES)
    num_parts = -(-record_bytes // max_bytes)
    part_bytes = -(-num_pages // num_parts) * PAGE_BYTES
    for start in range(0, record_bytes, part_bytes):
        yield range(start, min(start + part_bytes, record_bytes))


def _of_payload(payload: memoryview, part: range) -> memoryview:
    return payload[max(0, part.start - HEADER_BYTES) : part.stop - HEADER_BYTES]


def _cut(buffer: memoryview, num_bytes: int) -> tuple[memoryview, memoryview]:
    return buffer[:num_bytes], buffer[num_bytes:]


def _put(place: memoryview, stored: memoryview) -> None:
    """Put the bytes at the beginning of a place that ends with zeros, unless they are there already."""
    if address_of(stored) != address_of(place):
        copy_bytes(place[: len(stored)], stored)
    place[len(stored) :] = bytes(len(place) - len(stored))
