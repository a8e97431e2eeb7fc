"""Writes blocks of the SSD tier to slots, durably, so that the index may speak of them.

Covers: the bytes of one batch. Does not cover: slots and index (`tiers/ssd.py`).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvstore.core.block import BlockMeta, checksum_in
from tiers.codec import Codec
from tiers.crew import Crew, Job
from tiers.direct import RecordFile
from tiers.index import IndexEntry, Place
from tiers.pieces import Outgoing, PieceMover
from tiers.segments import Segments


class BlockWriter:
    """Thread-safe."""

    def __init__(self, segments: Segments, mover: PieceMover, crew: Crew, codec: Codec) -> None:
        self._segments = segments
        self._mover = mover
        self._crew = crew
        self._codec = codec

    def write(
        self, blocks: Sequence[BlockMeta], payloads: Sequence[memoryview], places: Mapping[int, Place]
    ) -> tuple[dict[int, IndexEntry], dict[int, OSError]]:
        """Write `payloads[i]` to `places[i]`, for the i that have one; one sync per segment touched.

        Returns by i the entries whose header and payload are durable now, and what kept the others from it: where a
        segment's disk fails, all that should have gone there.
        """
        by_segment: defaultdict[int, list[int]] = defaultdict(list)
        for number, place in places.items():
            by_segment[place.segment].append(number)
        checksums: dict[int, int] = {}
        faults: dict[int, OSError] = {}
        jobs: list[Job] = []
        syncs: dict[int, Callable[[], None]] = {}
        for segment, numbers in by_segment.items():
            file: RecordFile = self._segments.file(segment)
            outgoing = [
                self._outgoing(
                    places[number].slot, blocks[number], payloads[number], partial(checksums.setdefault, number)
                )
                for number in numbers
            ]
            jobs += [partial(_unless_faulty, faults, segment, job) for job in self._mover.write_jobs(file, outgoing)]
            syncs[segment] = file.sync
        self._crew.run(jobs)
        self._crew.run([partial(_unless_faulty, faults, segment, sync) for segment, sync in syncs.items()])
        entries, failed = {}, {}
        for number, place in places.items():
            if place.segment in faults:
                failed[number] = faults[place.segment]
            else:
                entries[number] = IndexEntry(blocks[number], place, checksums[number])
        return entries, failed

    def _outgoing(
        self, slot: int, meta: BlockMeta, payload: memoryview, tell_checksum: Callable[[int], int]
    ) -> Outgoing:
        def seal(place: memoryview | None) -> tuple[bytes, memoryview]:
            header, stored = self._codec.seal(meta, payload, place)
            tell_checksum(checksum_in(header))
            return header, stored

        return Outgoing(slot, payload, seal, is_payload_stored=self._codec.keys is None)


def _unless_faulty(faults: dict[int, OSError], segment: int, job: Job) -> None:
    """Carry out a job on a segment whose disk has not failed yet."""
    if segment in faults:
        return
    try:
        job()
    except OSError as error:
        faults.setdefault(segment, error)
