"""Grants: the right of one engine to write one block into its slot.

A grant lasts as long as its engine lives: no timer may take a slot from under a copy that is only slow. What an engine
that died had not committed was never visible, and its slots are free again. While a block is written, a parent that is
only in RAM stays: making room for the tail of a prefix must not lose its head.
"""

from kvstore.core.block import BlockMeta
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome, TierKind
from kvstore.store.catalog import Catalog
from kvstore.store.columns import tier_bit
from kvstore.store.engines import Engine, Grant
from kvstore.store.room import Room
from kvstore.wire import Slot
from tiers.ram import RamTier


class Grants:
    """Owned by the control thread."""

    def __init__(self, catalog: Catalog, ram: RamTier, room: Room) -> None:
        self._catalog = catalog
        self._ram = ram
        self._room = room

    def give(self, engine: Engine, keys: list[BlockKey], parent: BlockKey, depth: int) -> list[Slot]:
        """Answer per key of consecutive blocks: OK with a slot to write to, or why not."""
        slots: list[Slot] = []
        is_full = False
        for index, key in enumerate(keys):
            slots.append(self._give(engine, key, parent, depth + index, index, is_full))
            # They are of one size, so after the first that found no room none of the others looks for it.
            is_full = is_full or slots[-1].outcome == Outcome.BUSY
            parent = key
        return slots

    def commit(self, engine: Engine, key: BlockKey, generation: int, written: bool) -> tuple[Outcome, int]:
        """Return what became of the grant and the block; on OK it is readable from here on."""
        grant = engine.grants.get(key)
        if grant is None or grant.generation != generation:
            return Outcome.STALE, -1
        del engine.grants[key]
        if not written:
            self._abandon(key, grant)
            return Outcome.CANCELLED, -1
        self._ram.publish(key)
        self._catalog.finish_write(grant.block)
        self._let_go(grant.parent)
        return Outcome.OK, grant.block

    def abandon_all(self, engine: Engine) -> None:
        """The engine writes no more."""
        for key, grant in engine.grants.items():
            self._abandon(BlockKey(key), grant)
        engine.grants.clear()

    def _give(self, engine: Engine, key: BlockKey, parent: BlockKey, depth: int, index: int, is_full: bool) -> Slot:
        info = self._catalog.namespaces[engine.namespace]
        block = self._catalog.ensure(BlockMeta(key, parent, info.digest, depth, info.payload_bytes))
        if block < 0:
            return Slot(index, Outcome.REJECTED)
        if self._catalog.residency(block):
            return Slot(index, Outcome.EXISTS)
        if self._catalog.writing(block):
            return Slot(index, Outcome.PENDING)
        self._catalog.begin_write(block)
        held = self._hold_parent(block)
        slot = None if is_full else self._room.reserve(block)
        if slot is None:
            self._let_go(held)
            self._catalog.abort_write(block)
            return Slot(index, Outcome.BUSY)
        engine.grants[key] = Grant(block, slot.generation, held)
        return Slot(index, Outcome.OK, slot.offset, slot.generation)

    def _abandon(self, key: BlockKey, grant: Grant) -> None:
        self._ram.abandon(key)
        self._let_go(grant.parent)
        self._catalog.abort_write(grant.block)

    def _hold_parent(self, block: int) -> int:
        """Pin the parent if RAM has its only copy; return it, or -1."""
        parent = self._catalog.parent(block)
        if parent < 0 or self._catalog.residency(parent) != tier_bit(TierKind.RAM):
            return -1
        self._catalog.pin(parent)
        return parent

    def _let_go(self, parent: int) -> None:
        if parent >= 0:
            self._catalog.unpin(parent)
