"""Reads blocks of the SSD tier: what comes back is the block that was asked for, or it is not OK.

Covers: the bytes of one batch and whether they are right. Does not cover: what becomes of a copy that is not
(`tiers/ssd.py`).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.core.block import BlockMeta
from kvstore.core.errors import CorruptBlock, WrongKey
from kvstore.core.outcome import Outcome
from tiers.codec import Codec
from tiers.crew import Crew, Job
from tiers.direct import RecordFile
from tiers.environment import DamagedEnvironment
from tiers.faults import FaultCounter
from tiers.index import BlockIndex, IndexEntry
from tiers.pieces import Incoming, PieceMover
from tiers.segments import Segments


@dataclass(slots=True)
class Findings:
    """`outcomes[i]` answers `blocks[i]`. `broken` copies hold wrong bytes, `unreadable` ones the disk did not give
    back, and `locked` ones no key here opens."""

    outcomes: list[Outcome]
    broken: list[IndexEntry] = field(default_factory=list)
    unreadable: list[IndexEntry] = field(default_factory=list)
    locked: list[IndexEntry] = field(default_factory=list)


class BlockReader:
    """Thread-safe."""

    def __init__(self, segments: Segments, mover: PieceMover, crew: Crew, codec: Codec, faults: FaultCounter) -> None:
        self._segments = segments
        self._mover = mover
        self._crew = crew
        self._codec = codec
        self._faults = faults

    def read(self, index: BlockIndex, blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> Findings:
        """Copy the payload of `blocks[i]` into `into[i]`. Raises TierUnavailable where the index fails."""
        findings = Findings([Outcome.MISS] * len(blocks))
        # Until the bytes were copied, nothing else is written to these slots.
        with self._segments.reading():
            by_segment: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
            entries = index.get([meta.key for meta in blocks])
            for number, entry in enumerate(entries):
                if entry is None:
                    continue
                if entry.meta != blocks[number]:
                    findings.outcomes[number] = self._corrupt(entry, "the index names another block")
                    findings.broken.append(entry)
                else:
                    by_segment[entry.place.segment].append((entry.place.slot, number))
            self._crew.run(self._jobs(findings, by_segment, entries, into))
        return findings

    def _file(self, number: int) -> RecordFile:
        try:
            return self._segments.file(number)
        except KeyError:
            # Every segment that the index named at the start was there, and none with a block in it goes.
            raise DamagedEnvironment(f"the SSD index names segment {number}, which there is not") from None

    def _jobs(
        self,
        findings: Findings,
        by_segment: Mapping[int, list[tuple[int, int]]],
        entries: Sequence[IndexEntry | None],
        into: Sequence[memoryview],
    ) -> Iterator[Job]:
        for segment, places in by_segment.items():
            records = (
                self._incoming(findings, number, entry, into[number])
                for _, number in sorted(places)
                if (entry := entries[number]) is not None
            )
            yield from self._mover.read_jobs(self._file(segment), records)

    def _incoming(self, findings: Findings, number: int, entry: IndexEntry, into: memoryview) -> Incoming:
        def accept(header: memoryview | None, stored: memoryview, checksum: int) -> None:
            outcome = self._verified(entry, header, stored, checksum, into)
            findings.outcomes[number] = outcome
            if outcome is Outcome.MISS:
                findings.locked.append(entry)
            elif outcome is Outcome.CORRUPT:
                (findings.unreadable if header is None else findings.broken).append(entry)

        return Incoming(entry.place.slot, into, accept)

    def _verified(
        self, entry: IndexEntry, header: memoryview | None, stored: memoryview, checksum: int, into: memoryview
    ) -> Outcome:
        if header is None:
            return self._corrupt(entry, "the disk did not give it back")
        try:
            if self._codec.open(entry.meta, header, stored, into, checksum).checksum != entry.checksum:
                raise CorruptBlock("the slot holds an older copy of the block")
        except CorruptBlock as error:
            return self._corrupt(entry, error)
        except WrongKey as error:
            # It stays: a start with the wrong key must not empty the disk.
            self._faults.count("wrong_key", detail=f"block {entry.meta.key.hex()[:12]}: {error}")
            return Outcome.MISS
        return Outcome.OK

    def _corrupt(self, entry: IndexEntry, why: object) -> Outcome:
        self._faults.count("corrupt", detail=f"block {entry.meta.key.hex()[:12]}: {why}")
        return Outcome.CORRUPT
