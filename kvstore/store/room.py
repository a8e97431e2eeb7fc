"""Makes room in RAM and on SSD: asks the tier's eviction policy for victims and frees them.

    RAM   a block may go if no engine uses it and another tier has it, or no other tier can take it now
    SSD   a block may go if nobody reads it; what S3 lacks is dropped with it

Freeing RAM is immediate. Freeing SSD space is a delete in the worker's queue, ahead of the writes that need it.
"""

import logging
from collections.abc import Callable, Iterable

from kvstore.core.outcome import Outcome, TierKind
from kvstore.store import ops
from kvstore.store.catalog import Catalog, tier_bit
from kvstore.store.link import WorkerLink
from policies.base import EvictionPolicy
from policies.eviction.lru import Lru
from tiers.ram import RamTier, SlotRef

_log = logging.getLogger(__name__)
_SLOWER = tier_bit(TierKind.SSD) | tier_bit(TierKind.S3)


class _View:
    """policies.base.EvictableView of one tier."""

    def __init__(self, catalog: Catalog, tier: TierKind, must_stay: Callable[[int], bool]) -> None:
        self._catalog = catalog
        self._tier = tier
        self._must_stay = must_stay
        self.parent = catalog.parent
        self.size_bytes = catalog.size_bytes

    def pinned(self, block: int) -> bool:
        return self._catalog.pinned(block) or self._must_stay(block)

    def children(self, block: int) -> int:
        return self._catalog.children_in(block, self._tier)


class Room:
    """Owned by the control thread. Knows the order of blocks in RAM and on SSD; counts what it evicts."""

    def __init__(self, catalog: Catalog, ram: RamTier, links: dict[TierKind, WorkerLink]) -> None:
        self._catalog = catalog
        self._ram = ram
        self._links = links
        self.policies: dict[TierKind, EvictionPolicy] = {TierKind.RAM: Lru(), TierKind.SSD: Lru()}
        self.evicted = dict.fromkeys((TierKind.RAM, TierKind.SSD, TierKind.S3), 0)
        self.deleting: dict[TierKind, set[int]] = {TierKind.SSD: set(), TierKind.S3: set()}
        self._ram_view = _View(catalog, TierKind.RAM, self._only_copy)
        self._ssd_view = _View(catalog, TierKind.SSD, lambda block: block in self.deleting[TierKind.SSD])

    # ------------------------------------------------------------ RAM

    def reserve(self, block: int) -> SlotRef | None:
        """Return a slot for the block, evicting as much as it takes; None where everything in RAM has to stay."""
        meta = self._catalog.meta(block)
        slot = self._ram.reserve(meta)
        needed_bytes = meta.payload_bytes
        while slot is None:
            victims = self.policies[TierKind.RAM].victims(needed_bytes, self._ram_view)
            if not victims:
                return None
            for victim in victims:
                self.free_ram(victim, "evicted")
            slot = self._ram.reserve(meta)
            # Freed slots of another size help only once a whole slab of them is free.
            needed_bytes *= 2
        return slot

    def keep_below(self, high: float, low: float) -> None:
        """Where RAM is fuller than `high`, evict what may go until it is at `low`, so that bursts find free slots."""
        usage = self._ram.usage()
        capacity = usage.capacity_bytes or 0
        if usage.used_bytes <= high * capacity:
            return
        for victim in self._as_much_as_possible(int(usage.used_bytes - low * capacity)):
            self.free_ram(victim, "evicted")

    def free_ram(self, block: int, reason: str) -> None:
        """The slot's generation is bumped before anybody else can get it."""
        self._ram.delete([self._catalog.key(block)])
        self.policies[TierKind.RAM].on_remove(block)
        self.evicted[TierKind.RAM] += 1
        self._catalog.set_absent(block, TierKind.RAM, reason)

    # ------------------------------------------------------------ SSD and S3

    def free_ssd(self, bytes_needed: int) -> bool:
        """Begin to delete the coldest blocks; False where so much cannot be freed."""
        victims = self.policies[TierKind.SSD].victims(bytes_needed, self._ssd_view)
        self.delete(TierKind.SSD, victims, "evicted")
        return bool(victims)

    def delete(
        self, tier: TierKind, blocks: Iterable[int], reason: str, done: Callable[[TierKind, bool], None] | None = None
    ) -> None:
        """Delete these blocks' copies in a slow tier. At once the catalog knows them no more; `done` is told per block
        whether the tier forgot it too. One that fails to be deleted answers EXISTS when it is stored again."""
        link = self._links[tier]
        for block in blocks:
            key = self._catalog.key(block)
            self._catalog.pin(block)
            self._catalog.set_absent(block, tier, reason)
            if tier in self.policies:
                self.policies[tier].on_remove(block)
            self.deleting[tier].add(block)
            self.evicted[tier] += 1

            def finished(result: ops.Result, block: int = block) -> None:
                self.deleting[tier].discard(block)
                if done is not None:
                    done(tier, result.outcome in (Outcome.OK, Outcome.MISS))
                self._catalog.unpin(block)

            link.store(ops.Delete(link.next_op(), key), finished)

    def lost(self, block: int, tier: TierKind, outcome: Outcome) -> None:
        """The tier turned out not to hold the block (any more)."""
        if tier in self.policies:
            self.policies[tier].on_remove(block)
        self._catalog.set_absent(block, tier, "corrupt" if outcome == Outcome.CORRUPT else "lost")

    # ------------------------------------------------------------ private

    def _only_copy(self, block: int) -> bool:
        if self._catalog.residency(block) & _SLOWER:
            return False
        ssd = self._links.get(TierKind.SSD)
        # While the disk takes blocks, wait for it rather than lose one; without it RAM is all there is.
        return ssd is not None and ssd.ready

    def _as_much_as_possible(self, wanted_bytes: int) -> list[int]:
        while wanted_bytes > 0:
            victims = self.policies[TierKind.RAM].victims(wanted_bytes, self._ram_view)
            if victims:
                return victims
            wanted_bytes //= 2
            if wanted_bytes < 4096:
                break
        return []
