"""Walks over the SSD tier while it serves: every block that the index names, every slot it does not, every record.

Covers: what is there and whether it is right. What the index names and no file holds was dropped, and counted, when the
tier was opened (`tiers/reconcile.py`). What is removed is removed as a reader would: from the index first, and only
while it still lies where it was found.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

from kvstore.core.block import HEADER_BYTES
from kvstore.core.errors import CorruptBlock
from kvstore.core.key import BlockKey
from tiers.aligned import AlignedBuffers
from tiers.codec import Codec
from tiers.direct import record_size
from tiers.index import BlockIndex, IndexEntry, Place
from tiers.scrub import Finding, InspectedRecords, Orders, Step, Verdict, fault_of, scrub_records, verdict_of
from tiers.segments import Segments

_STEP_BYTES = 8 << 20
_STEP_BLOCKS = 64
_ENTRIES_PER_STEP = 4096
_OURS = frozenset({"lock", "index.mdb", "index.mdb-lock", "records.mdb", "records.mdb-lock", "segments", "lost+found"})

Drop = Callable[[Sequence[IndexEntry], bool], set[BlockKey]]
"""Deletes the entries that still lie where they did and returns which; the second argument says whether their slots may
be used again."""


class SsdScrub:
    """One walk; `steps` may be iterated once, by one thread."""

    def __init__(
        self,
        folder: Path,
        index: BlockIndex,
        segments: Segments,
        codec: Codec,
        records: InspectedRecords,
        drop: Drop,
        orders: Orders,
    ) -> None:
        self._folder = folder
        self._index = index
        self._segments = segments
        self._codec = codec
        self._records = records
        self._drop = drop
        self._orders = orders
        self._buffers = AlignedBuffers()

    def steps(self, total: int) -> Iterator[Step]:
        """`total`: how many blocks there are, for the progress."""
        yield Step("blocks", total=total)
        batch: list[BlockKey] = []
        batch_bytes = 0
        for key, _, payload_bytes in self._index.places():
            batch.append(key)
            batch_bytes += payload_bytes
            if batch_bytes >= _STEP_BYTES or len(batch) == _STEP_BLOCKS:
                yield self._blocks(batch)
                batch, batch_bytes = [], 0
        yield self._blocks(batch)
        yield from self._slots()
        yield Step("files", findings=tuple(self._files()))
        yield from scrub_records(self._records, self._records.names(""), self._orders)

    def _blocks(self, keys: list[BlockKey]) -> Step:
        num_bytes = 0
        found: list[tuple[IndexEntry, Verdict, str]] = []
        # Until a block was looked at, and dropped, nothing else is written to its slot.
        with self._segments.reading():
            for entry in self._index.get(keys):
                if entry is not None:
                    found.append((entry, *self._look(entry)))
                    num_bytes += record_size(entry.meta.payload_bytes)
            # Where the disk may be bad nothing is written before the next start.
            doomed = [(entry, verdict) for entry, verdict, _ in found if self._orders.remove(verdict)]
            lost = self._drop([entry for entry, verdict in doomed if verdict is Verdict.MISSING], False)
            lost |= self._drop([entry for entry, verdict in doomed if verdict is not Verdict.MISSING], True)
        findings = tuple(
            Finding(verdict, "blocks", entry.meta.key.hex(), why, entry.meta.key in lost)
            for entry, verdict, why in found
            if verdict is not Verdict.OK
        )
        return Step("blocks", len(found) - len(findings), findings, num_bytes, tuple(lost))

    def _look(self, entry: IndexEntry) -> tuple[Verdict, str]:
        record_bytes = record_size(entry.meta.payload_bytes)
        with self._buffers.borrow(record_bytes) as buffer:
            try:
                file = self._segments.file(entry.place.segment)
                num_bytes = file.read([buffer], entry.place.slot * record_bytes)
            except (KeyError, OSError) as error:
                return Verdict.MISSING, f"the disk does not give it back ({type(error).__name__})"
            if num_bytes < record_bytes:
                return Verdict.MISSING, "the file ends before it does"
            header = buffer[:HEADER_BYTES]
            stored = buffer[HEADER_BYTES : HEADER_BYTES + entry.meta.payload_bytes]
            fault = fault_of(lambda: self._check(entry, header, stored))
        return verdict_of(fault), str(fault or "")

    def _check(self, entry: IndexEntry, header: memoryview, stored: memoryview) -> None:
        if self._codec.open(entry.meta, header, stored, stored).checksum != entry.checksum:
            raise CorruptBlock("the slot holds an older copy of the block")

    def _slots(self) -> Iterator[Step]:
        """Look for slots that are taken and that no entry names: twice, since a block that was deleted in the middle of
        one look leaves such a slot."""
        suspects = yield from self._unnamed()
        if suspects:
            suspects &= yield from self._unnamed()
        for place in sorted(suspects):
            if self._orders.repair:
                self._segments.give_back([place])
            name = f"segment {place.segment} slot {place.slot}"
            finding = Finding(Verdict.ORPHANED, "slots", name, "taken, but no block lies there", self._orders.repair)
            yield Step("slots", findings=(finding,))

    def _unnamed(self) -> Generator[Step, None, set[Place]]:
        slots = self._segments.settled_slots()
        for number, (_, place, _) in enumerate(self._index.places()):
            slots.clear(place)
            if number % _ENTRIES_PER_STEP == 0:
                yield Step("slots")
        return slots.places()

    def _files(self) -> Iterator[Finding]:
        for path in sorted(self._folder.iterdir()):
            if path.name not in _OURS:
                why = "damaged records that were set aside" if path.name == "records.mdb.damaged" else ""
                yield Finding(Verdict.FOREIGN, "files", path.name, why)
        known = self._segments.file_names()
        for path in sorted((self._folder / "segments").iterdir()):
            if path.name not in known:
                yield Finding(Verdict.FOREIGN, "files", f"segments/{path.name}")
