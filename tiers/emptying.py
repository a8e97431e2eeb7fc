"""Moves the blocks of a sparse segment to free slots in others, so that its room can go to records of another size.

Without it a disk that holds blocks of several sizes falls apart: at 90% full every segment has free slots and none is
empty, and a size that has no free slot left gets none, however much is evicted of the others.

Read and check, write, sync, then one index transaction: a block lies in its old slot until it lies, durably, in its new
one. What is deleted or stored meanwhile is left alone, and so is what turns out to be damaged: whoever reads it next is
told.
"""

from collections import defaultdict
from functools import partial

from kvstore.core.block import HEADER_BYTES, decode_header
from kvstore.core.errors import CorruptBlock
from kvstore.core.key import split_keys
from tiers.aligned import AlignedBuffers, address_of, copy_bytes
from tiers.crew import Crew
from tiers.index import BlockIndex, IndexEntry, Place
from tiers.pieces import Incoming, Outgoing, PieceMover
from tiers.segments import Segments

# Read and written before anything else is.
_STEP_BYTES = 16 << 20


class Emptier:
    """For the thread that grows the tier: one segment at a time."""

    def __init__(self, segments: Segments, mover: PieceMover, crew: Crew, buffers: AlignedBuffers) -> None:
        self._segments = segments
        self._mover = mover
        self._crew = crew
        self._buffers = buffers

    def empty(self, index: BlockIndex, number: int) -> int:
        """Move the blocks of a segment that gives no slots away; return how many. Raises OSError, TierUnavailable and
        IndexFull; the blocks are whole then, wherever they lie."""
        keys = b"".join(columns.keys_at(columns.entries["segment"] == number) for columns in index.columns())
        record_bytes = self._segments.file(number).record_bytes
        left = split_keys(keys)
        at_once = max(1, _STEP_BYTES // record_bytes)
        num_moved = 0
        while left:
            step, left = left[:at_once], left[at_once:]
            # While they are read, nothing else is written to these slots, and the file stays.
            with self._segments.reading():
                entries = [entry for entry in index.get(step) if entry is not None and entry.place.segment == number]
                if entries:
                    num_moved += self._move(index, entries, record_bytes)
        return num_moved

    def _move(self, index: BlockIndex, entries: list[IndexEntry], record_bytes: int) -> int:
        segments = self._segments
        body_bytes = record_bytes - HEADER_BYTES
        with self._buffers.borrow(len(entries) * body_bytes) as buffer:
            bodies = {entry: buffer[i * body_bytes :][:body_bytes] for i, entry in enumerate(entries)}
            headers: dict[IndexEntry, bytes] = {}
            incoming = [
                Incoming(entry.place.slot, body[: entry.meta.payload_bytes], partial(_accept, headers, entry, body))
                for entry, body in sorted(bodies.items(), key=lambda item: item[0].place.slot)
            ]
            self._crew.run(self._mover.read_jobs(segments.file(entries[0].place.segment), incoming))
            whole = [entry for entry in entries if entry in headers]
            places = segments.take_free(record_bytes, len(whole))
            # Fewer where others took them meanwhile; the rest stays.
            whole = whole[: len(places)]
            try:
                self._write(whole, places, headers, bodies)
                moved = index.move(whole, places)
            except BaseException:
                segments.give_back(places)
                raise
        segments.settle([place for place, is_moved in zip(places, moved, strict=True) if is_moved])
        segments.give_back([place for place, is_moved in zip(places, moved, strict=True) if not is_moved])
        segments.retire([entry.place for entry, is_moved in zip(whole, moved, strict=True) if is_moved])
        return sum(moved)

    def _write(
        self,
        entries: list[IndexEntry],
        places: list[Place],
        headers: dict[IndexEntry, bytes],
        bodies: dict[IndexEntry, memoryview],
    ) -> None:
        by_segment: defaultdict[int, list[Outgoing]] = defaultdict(list)
        for entry, place in zip(entries, places, strict=True):
            stored = bodies[entry][: entry.meta.payload_bytes]
            seal = partial(_sealed, headers[entry], stored)
            by_segment[place.segment].append(Outgoing(place.slot, stored, seal))
        files = {number: self._segments.file(number) for number in by_segment}
        for number, outgoing in by_segment.items():
            self._crew.run(self._mover.write_jobs(files[number], outgoing))
        self._crew.run([file.sync for file in files.values()])


def _sealed(header: bytes, stored: memoryview, _: memoryview | None) -> tuple[bytes, memoryview]:
    return header, stored


def _accept(
    headers: dict[IndexEntry, bytes],
    entry: IndexEntry,
    body: memoryview,
    header: memoryview | None,
    stored: memoryview,
    checksum: int,
) -> None:
    """Keep header and stored bytes where they are what the index says."""
    if header is None:
        return
    try:
        found = decode_header(header)
    except CorruptBlock:
        return
    if found.meta == entry.meta and found.checksum == entry.checksum == checksum:
        if address_of(stored) != address_of(body):
            copy_bytes(body[: len(stored)], stored)
        headers[entry] = bytes(header)
