"""The RAM tier: blocks in slots of the shared region, where engines copy them to and from by themselves.

    (absent) --reserve--> WRITING --publish--> READY --delete--> (absent)
                             |--abandon--> (absent)

Covers: which slot holds which block, and the generation that guards it. Does not cover: who may write or read a slot
(grants and leases belong to the store), checksums (bytes in RAM have not left our memory), which block to evict.
The generation of a slot is bumped when it is reserved and again before it is given back, so whoever still copies from
or to the old slot finds out afterwards.

What is known of a block stands in columns by a dense row number: 90 to 140 bytes a block with its key and its place in
the allocator (measured at 1 M and 0.3 M blocks), where objects for each took 550 to 750.
"""

import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore.core.block import BlockMeta
from kvstore.core.index import KeyIndex
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome, TierKind
from tiers.base import RecoveredBatch, Usage
from tiers.batch import check_lengths
from tiers.copying import Copier
from tiers.region import Region
from tiers.slots import Cells, SlotAllocator

_FREE, _WRITING, _READY = range(3)


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A place in the region: `num_bytes` payload bytes at `offset`, valid while the slot shows `generation`."""

    offset: int
    generation: int
    num_bytes: int


class RamTier:
    """Implements `tiers.base.Tier` over a region that it does not own. Thread-safe; copies run outside its lock and the
    interpreter's."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._lock = threading.Lock()
        self._slots = SlotAllocator(region.data_bytes)
        self._index = KeyIndex()
        # By row of the index; the slot's tag is the row.
        self._states = bytearray()
        self._offsets = array("Q")
        self._payload_bytes = array("Q")
        self._identities = array("q")
        self._copier = Copier()
        self._faults: dict[str, int] = {}

    @property
    def kind(self) -> TierKind:
        return TierKind.RAM

    @property
    def region(self) -> Region:
        return self._region

    @property
    def max_slot_bytes(self) -> int:
        """The largest block worth taking: with fewer than four slots nothing could be loaded beside what is in use."""
        return self._region.data_bytes // 4

    # ------------------------------------------------------------ slots, for the store

    def reserve(self, meta: BlockMeta) -> SlotRef | None:
        """Take a slot for a block that is about to be written; `contains` and `read` do not see it until `publish`.

        Returns None where there is no room. Raises ValueError where the key is reserved or published already.
        """
        with self._lock:
            if self._index.find(meta.key) >= 0:
                raise ValueError(f"block {meta.key.hex()[:12]} has a slot already")
            row = self._reserve(meta)
            return None if row < 0 else self._ref(row)

    def publish(self, key: BlockKey) -> None:
        """Make a reserved block visible; its bytes must be complete. Raises KeyError where it is not reserved."""
        with self._lock:
            self._states[self._reserved(key)] = _READY

    def abandon(self, key: BlockKey) -> None:
        """Give a reserved slot back unwritten; nobody may write to it any more. Raises KeyError where it is not
        reserved."""
        with self._lock:
            self._free(self._reserved(key))

    def slot(self, key: BlockKey) -> SlotRef | None:
        """Return where the published block lies, or None."""
        with self._lock:
            row = self._ready(key)
            return None if row < 0 else self._ref(row)

    # ------------------------------------------------------------ room for a block of another size, for the store

    def slab_start(self, key: BlockKey) -> int:
        """Return which slab holds the block, published or reserved; -1 where none does."""
        with self._lock:
            row = self._index.find(key)
            return -1 if row < 0 else self._slots.slab_start(self._offsets[row])

    def has_other_sizes(self, num_bytes: int) -> bool:
        """Whether there are slots of another size than a block of `num_bytes` gets."""
        with self._lock:
            return self._slots.has_other_sizes(num_bytes)

    def cells(self, slab_start: int | None, num_bytes: int) -> Cells:
        """As `SlotAllocator.cells`; empty where no slab begins there (any more)."""
        with self._lock:
            return self._slots.cells(slab_start, num_bytes)

    def block_at(self, offset: int) -> BlockKey | None:
        """Return the published block whose slot begins at `offset`; None for a reserved or free one."""
        with self._lock:
            try:
                row = self._slots.tag_of(offset)
            except KeyError:
                return None
            return self._index.key(row) if self._states[row] == _READY else None

    def carve(self, start: int, end: int) -> bool:
        """As `SlotAllocator.carve`: make one run of what was cleared between two borders of cells."""
        with self._lock:
            return self._slots.carve(start, end)

    # ------------------------------------------------------------ Tier

    def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        with self._lock:
            return [Outcome.MISS if self._ready(key) < 0 else Outcome.OK for key in keys]

    def read(self, blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> list[Outcome]:
        check_lengths(blocks, into)
        slots: list[SlotRef | Outcome] = []

        def pairs() -> Iterator[tuple[memoryview, memoryview]]:
            for meta, view in zip(blocks, into, strict=True):
                with self._lock:
                    slot = self._slot_to_read(meta)
                slots.append(slot)
                if isinstance(slot, SlotRef):
                    yield view, self._region.view(slot.offset, slot.num_bytes)

        self._copier.copy_all(pairs(), sum(map(len, into)))
        # Deleted while it was copied: the bytes may be another block's by now.
        return [self._is_still_there(slot) if isinstance(slot, SlotRef) else slot for slot in slots]

    def write(self, blocks: Sequence[BlockMeta], payloads: Sequence[memoryview]) -> list[Outcome]:
        check_lengths(blocks, payloads)
        outcomes: list[Outcome] = []
        rows: list[int] = []

        def pairs() -> Iterator[tuple[memoryview, memoryview]]:
            for meta, payload in zip(blocks, payloads, strict=True):
                with self._lock:
                    is_there = self._index.find(meta.key) >= 0
                    row = -1 if is_there else self._reserve(meta)
                outcomes.append(Outcome.EXISTS if is_there else Outcome.FULL if row < 0 else Outcome.OK)
                if row >= 0:
                    rows.append(row)
                    yield self._region.view(self._offsets[row], meta.payload_bytes), payload

        try:
            self._copier.copy_all(pairs(), sum(map(len, payloads)))
        except Exception:
            # After an interrupt, which is none, other threads may still be copying to them.
            with self._lock:
                for row in rows:
                    self._free(row)
            raise
        with self._lock:
            for row in rows:
                self._states[row] = _READY
        return outcomes

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """As `Tier.delete`; a block that is only reserved answers MISS and keeps its slot."""
        outcomes = []
        with self._lock:
            for key in keys:
                row = self._ready(key)
                if row >= 0:
                    self._free(row)
                outcomes.append(Outcome.MISS if row < 0 else Outcome.OK)
        return outcomes

    def usage(self) -> Usage:
        """Counts reserved slots as used."""
        with self._lock:
            return Usage(len(self._index), self._slots.used_bytes, self._slots.total_bytes)

    def recover_batches(self) -> Iterator[RecoveredBatch]:
        """Yields nothing: each boot has a new region."""
        return iter(())

    def faults(self) -> dict[str, int]:
        """Return how often which fault was met since the start."""
        with self._lock:
            return dict(self._faults)

    def close(self) -> None:
        """End the threads that copy; the region belongs to whoever made it. Idempotent; no call may be running."""
        self._copier.close()

    def check_integrity(self) -> None:
        """Assert that every slot belongs to exactly one block, which knows it, and that none is lost."""
        with self._lock:
            self._slots.check_integrity()
            rows = [row for row, state in enumerate(self._states) if state != _FREE]
            assert len(rows) == len(self._index), "a row is lost"
            assert self._slots.num_used == len(rows), "a slot belongs to nobody"
            for row in rows:
                assert self._index.find(self._index.key(row)) == row
                assert self._slots.tag_of(self._offsets[row]) == row, "two blocks share a slot"

    # ------------------------------------------------------------ helpers

    def _slot_to_read(self, meta: BlockMeta) -> SlotRef | Outcome:
        row = self._ready(meta.key)
        if row < 0:
            return Outcome.MISS
        if self._payload_bytes[row] != meta.payload_bytes or self._identities[row] != _identity(meta):
            self._free(row)
            self._faults["corrupt"] = self._faults.get("corrupt", 0) + 1
            return Outcome.CORRUPT
        return self._ref(row)

    def _is_still_there(self, slot: SlotRef) -> Outcome:
        return Outcome.OK if self._region.generation(slot.offset) == slot.generation else Outcome.MISS

    def _reserve(self, meta: BlockMeta) -> int:
        """Return the row that has a slot now, -1 where there is no room."""
        offset = self._slots.allocate(meta.payload_bytes)
        if offset is None:
            return -1
        row = self._index.add(meta.key)
        if row == len(self._states):
            self._states.append(_FREE)
            for column in (self._offsets, self._payload_bytes, self._identities):
                column.append(0)
        self._slots.tag(offset, row)
        self._states[row] = _WRITING
        self._offsets[row] = offset
        self._payload_bytes[row] = meta.payload_bytes
        self._identities[row] = _identity(meta)
        self._region.bump(offset)
        return row

    def _ref(self, row: int) -> SlotRef:
        offset = self._offsets[row]
        # Nobody else bumps it, so while the row holds the slot it is the slot's.
        return SlotRef(offset, self._region.generation(offset), self._payload_bytes[row])

    def _ready(self, key: BlockKey) -> int:
        row = self._index.find(key)
        return row if row >= 0 and self._states[row] == _READY else -1

    def _reserved(self, key: BlockKey) -> int:
        row = self._index.find(key)
        if row < 0 or self._states[row] != _WRITING:
            raise KeyError(f"block {key.hex()[:12]} is not reserved")
        return row

    def _free(self, row: int) -> None:
        # Before the slot can be reused: see the module's text.
        offset = self._offsets[row]
        self._region.bump(offset)
        self._states[row] = _FREE
        self._index.remove(row)
        self._slots.free(offset)


def _identity(meta: BlockMeta) -> int:
    """64 bits of what must agree beside the key, which names the bytes already: this finds mistakes, not forgers."""
    return hash((meta.parent, meta.namespace, meta.depth))
