"""The RAM tier: blocks in slots of the shared region, where engines copy them to and from by themselves.

    (absent) --reserve--> WRITING --publish--> READY --delete--> (absent)
                             |--abandon--> (absent)

Covers: which slot holds which block, and the generation that guards it. Does not cover: who may write or read a slot
(grants and leases belong to the store), checksums (bytes in RAM have not left our memory).
The generation of a slot is bumped when it is reserved and again before it is given back, so whoever still copies from
or to the old slot finds out afterwards.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore.core.block import BlockMeta
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome, TierKind
from tiers.base import RecoveredBatch, Usage
from tiers.batch import check_lengths
from tiers.region import Region
from tiers.slots import SlotAllocator


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A place in the region: `num_bytes` payload bytes at `offset`, valid while the slot shows `generation`."""

    offset: int
    generation: int
    num_bytes: int


@dataclass(slots=True)
class _Entry:
    meta: BlockMeta
    slot: SlotRef
    is_ready: bool


class RamTier:
    """Implements `tiers.base.Tier` over a region that it does not own. Thread-safe; copies run outside the lock."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._lock = threading.Lock()
        self._slots = SlotAllocator(region.data_bytes)
        self._entries: dict[BlockKey, _Entry] = {}
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
            if meta.key in self._entries:
                raise ValueError(f"block {meta.key.hex()[:12]} has a slot already")
            return self._reserve(meta)

    def publish(self, key: BlockKey) -> None:
        """Make a reserved block visible; its bytes must be complete. Raises KeyError where it is not reserved."""
        with self._lock:
            self._reserved(key).is_ready = True

    def abandon(self, key: BlockKey) -> None:
        """Give a reserved slot back unwritten; nobody may write to it any more. Raises KeyError where it is not
        reserved."""
        with self._lock:
            self._free(self._reserved(key))

    def slot(self, key: BlockKey) -> SlotRef | None:
        """Return where the published block lies, or None."""
        with self._lock:
            entry = self._entries.get(key)
            return entry.slot if entry is not None and entry.is_ready else None

    # ------------------------------------------------------------ Tier

    def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        with self._lock:
            return [Outcome.MISS if (e := self._entries.get(k)) is None or not e.is_ready else Outcome.OK for k in keys]

    def read(self, blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> list[Outcome]:
        check_lengths(blocks, into)
        return [self._read_one(meta, view) for meta, view in zip(blocks, into, strict=True)]

    def write(self, blocks: Sequence[BlockMeta], payloads: Sequence[memoryview]) -> list[Outcome]:
        check_lengths(blocks, payloads)
        return [self._write_one(meta, payload) for meta, payload in zip(blocks, payloads, strict=True)]

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """As `Tier.delete`; a block that is only reserved answers MISS and keeps its slot."""
        outcomes = []
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is None or not entry.is_ready:
                    outcomes.append(Outcome.MISS)
                    continue
                self._free(entry)
                outcomes.append(Outcome.OK)
        return outcomes

    def usage(self) -> Usage:
        """Counts reserved slots as used."""
        with self._lock:
            return Usage(len(self._entries), self._slots.used_bytes, self._slots.total_bytes)

    def recover_batches(self) -> Iterator[RecoveredBatch]:
        """Yields nothing: each boot has a new region."""
        return iter(())

    def faults(self) -> dict[str, int]:
        """Return how often which fault was met since the start."""
        with self._lock:
            return dict(self._faults)

    def close(self) -> None:
        """Does nothing: the region belongs to whoever made it."""

    def check_integrity(self) -> None:
        """Assert that every slot belongs to exactly one block and shows the generation it was given."""
        with self._lock:
            self._slots.check_integrity()
            offsets = {entry.slot.offset for entry in self._entries.values()}
            assert len(offsets) == len(self._entries), "two blocks share a slot"
            for entry in self._entries.values():
                assert self._region.generation(entry.slot.offset) == entry.slot.generation

    # ------------------------------------------------------------ helpers

    def _read_one(self, meta: BlockMeta, view: memoryview) -> Outcome:
        with self._lock:
            entry = self._entries.get(meta.key)
            if entry is None or not entry.is_ready:
                return Outcome.MISS
            if entry.meta != meta:
                self._free(entry)
                self._faults["corrupt"] = self._faults.get("corrupt", 0) + 1
                return Outcome.CORRUPT
            slot = entry.slot
        view[:] = self._region.view(slot.offset, slot.num_bytes)
        # Deleted while it was copied: the bytes may be another block's by now.
        return Outcome.OK if self._region.generation(slot.offset) == slot.generation else Outcome.MISS

    def _write_one(self, meta: BlockMeta, payload: memoryview) -> Outcome:
        with self._lock:
            if meta.key in self._entries:
                return Outcome.EXISTS
            slot = self._reserve(meta)
        if slot is None:
            return Outcome.FULL
        self._region.view(slot.offset, slot.num_bytes)[:] = payload
        self.publish(meta.key)
        return Outcome.OK

    def _reserve(self, meta: BlockMeta) -> SlotRef | None:
        offset = self._slots.allocate(meta.payload_bytes)
        if offset is None:
            return None
        slot = SlotRef(offset, self._region.bump(offset), meta.payload_bytes)
        self._entries[meta.key] = _Entry(meta, slot, is_ready=False)
        return slot

    def _reserved(self, key: BlockKey) -> _Entry:
        entry = self._entries.get(key)
        if entry is None or entry.is_ready:
            raise KeyError(f"block {key.hex()[:12]} is not reserved")
        return entry

    def _free(self, entry: _Entry) -> None:
        # Before the slot can be reused: see the module's text.
        self._region.bump(entry.slot.offset)
        del self._entries[entry.meta.key]
        self._slots.free(entry.slot.offset)
