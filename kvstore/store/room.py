"""Makes room in RAM and on SSD: asks the tier's eviction policy for victims and frees them.

    RAM   a block may go if no engine uses it and another tier has it, or no other tier will take it soon
    SSD   a block may go if nobody reads it; what S3 lacks is dropped with it

Freeing RAM is immediate. Freeing SSD space is a delete in the worker's queue, ahead of the writes that need it.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvstore.core.key import KEY_BYTES
from kvstore.core.outcome import Outcome, TierKind
from kvstore.store.catalog import Catalog
from kvstore.store.clearing import Clearing
from kvstore.store.columns import tier_bit
from kvstore.store.hints import Hints
from kvstore.store.link import WorkerLink
from kvstore.worker import ops
from policies.base import EvictionPolicy, Hint, Ids
from policies.eviction import choice
from tiers.ram import RamTier, SlotRef
from tiers.slots import slot_size

_SLOWER = tier_bit(TierKind.SSD) | tier_bit(TierKind.S3)
# A delete that the tier could not carry out is tried again after these.
_DELETE_AGAIN_AFTER_S = (1.0, 2.0, 4.0, 8.0, 16.0)
# No more than this share of the SSD is given up at once.
_SSD_SHARE_AT_ONCE = 16

# So many blocks go in one turn of the control loop: about 5 ms.
_LOWERED_AT_ONCE = 256

# So many slots' worth of victims are asked for at once, and no more blocks than that are remembered.
_NEXT_BLOCKS = 16
_MAX_NEXT_BLOCKS = 64
_NO_BATCH_S = 0.5

# By so many of the coldest blocks, in no more than this share of RAM, it is told where most of them lie.
_COLDEST_BLOCKS = 256
_COLDEST_SHARE = 16

Deleted = Callable[[TierKind, bool], None]


class _View:
    """policies.base.EvictableView of one tier."""

    def __init__(self, catalog: Catalog, tier: TierKind, must_stay: Callable[[int], bool]) -> None:
        self._catalog = catalog
        self._tier = tier
        self._must_stay = must_stay
        self.parent = catalog.parent
        self.parents_of = catalog.parents_of
        self.names_of = catalog.names_of
        self.size_bytes = catalog.size_bytes

    def pinned(self, block: int) -> bool:
        return self._catalog.pinned(block) or self._must_stay(block)

    def name(self, block: int) -> int:
        return int.from_bytes(self._catalog.key(block)[:8], "little")

    def children(self, block: int) -> int:
        return self._catalog.children_in(block, self._tier)

    def children_of(self, blocks: Ids) -> Ids:
        return self._catalog.children_of(blocks, self._tier)


class Room:
    """Owned by the control thread. Knows the order of blocks in RAM and on SSD; counts what it evicts."""

    def __init__(
        self,
        catalog: Catalog,
        ram: RamTier,
        links: dict[TierKind, WorkerLink],
        is_awaited: Callable[[int], bool],
        clock: Callable[[], float],
        ram_policy: str = "lru",
        ssd_policy: str = "lru",
        is_pinned: Callable[[int, TierKind], bool] = lambda block, tier: False,
        give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_awaited` says whether a slower tier is about to copy the block from RAM, or may be; `is_pinned` whether a
        user wants it kept in that tier. `give_up` ends the "may be" and returns whether that changes anything."""
        self._catalog = catalog
        self._ram = ram
        self._links = links
        self._is_awaited = is_awaited
        self._give_up = give_up
        self._clock = clock
        in_ram = _View(catalog, TierKind.RAM, lambda block: self._is_only_copy(block) or is_pinned(block, TierKind.RAM))
        on_ssd = _View(catalog, TierKind.SSD, lambda block: is_pinned(block, TierKind.SSD))
        self._in_ram = in_ram
        self._clearing = Clearing(
            ram, catalog.find, in_ram.pinned, lambda victim: self.free_ram(victim, "evicted"), clock
        )
        self.policies: dict[TierKind, EvictionPolicy] = {
            TierKind.RAM: choice.make(ram_policy, in_ram, clock),
            TierKind.SSD: choice.make(ssd_policy, on_ssd, clock),
        }
        self.hints = Hints()
        self.on_left_ram: Callable[[int], None] = lambda block: None
        self.on_evicted: Callable[[TierKind, Sequence[int]], None] = lambda tier, blocks: None
        self.evicted = dict.fromkeys((TierKind.RAM, TierKind.SSD, TierKind.S3), 0)
        self.deleting: dict[TierKind, set[int]] = {TierKind.SSD: set(), TierKind.S3: set()}
        self._ssd_bytes_deleting = 0
        self.is_lowering = False
        # What goes next from RAM, as the policy said when it was asked last.
        self._next: dict[int, None] = {}
        self._no_batch_before = 0.0
        self._again: list[tuple[float, TierKind, Callable[[], None]]] = []

    # ------------------------------------------------------------ what the policies are told

    def entered(self, tier: TierKind, blocks: Sequence[int] | Ids) -> None:
        """These blocks are in the tier now, in prefix order."""
        policy = self.policies.get(tier)
        if policy is not None:
            policy.on_insert(blocks)
            self.hints.tell(policy, blocks)

    def used(self, tier: TierKind, blocks: Sequence[int] | Ids) -> None:
        """These blocks were used again, in prefix order; those that are not in the tier are passed over."""
        if tier == TierKind.RAM and self._next and not self._next.keys().isdisjoint(blocks):
            self._next.clear()
        self.policies[tier].on_access(blocks)
        self.hints.used(blocks)

    def asked(self, keys: bytes, tiers: bytes) -> None:
        """An engine asks for the blocks of a prompt, in prefix order; the first ones are in these tiers, by number."""
        names = np.frombuffer(keys, dtype="<u8")[:: KEY_BYTES // 8]
        fastest = np.frombuffer(tiers, dtype=np.uint8)
        for tier, policy in self.policies.items():
            is_slower = fastest > tier
            policy.on_request(names, int(is_slower.argmax()) if is_slower.any() else len(fastest))

    def hint(self, blocks: Ids, hint: Hint, *, ends_at_s: float | None = None) -> None:
        """Somebody says what will become of these blocks of one prefix, in order."""
        self._next.clear()
        self.hints.say(blocks, hint, ends_at_s=ends_at_s)
        for policy in self.policies.values():
            policy.on_hint(blocks, hint)

    # ------------------------------------------------------------ RAM

    def reserve(self, block: int) -> SlotRef | None:
        """Return a slot for the block, evicting as much as it takes; None where everything in RAM has to stay."""
        meta = self._catalog.meta(block)
        slot = self._ram.reserve(meta)
        num_bytes = meta.payload_bytes
        if slot is None and (self._make_room(num_bytes) or self._make_room_after_all(num_bytes)):
            slot = self._ram.reserve(meta)
        return slot

    def keep_below(self, high: float, low: float) -> None:
        """Where RAM is fuller than `high`, evict what may go until it is at `low`, so that bursts find free slots.

        Some blocks at a time, so that nobody waits for the control thread; `is_lowering`: there is more to go.
        """
        usage = self._ram.usage()
        capacity = usage.capacity_bytes or 0
        self.is_lowering = usage.used_bytes > (low if self.is_lowering else high) * capacity
        if not self.is_lowering or not usage.blocks:
            return
        some_bytes = _LOWERED_AT_ONCE * (usage.used_bytes // usage.blocks)
        victims = self._as_much_as_possible(TierKind.RAM, min(int(usage.used_bytes - low * capacity), some_bytes))
        for victim in victims:
            self.free_ram(victim, "evicted")
        self.is_lowering = bool(victims)

    def free_ram(self, block: int, reason: str) -> None:
        """The slot's generation is bumped before anybody else can get it."""
        self._ram.delete([self._catalog.key(block)])
        self.policies[TierKind.RAM].on_remove(block)
        self.on_left_ram(block)
        self.evicted[TierKind.RAM] += 1
        self._catalog.set_absent(block, TierKind.RAM, reason)

    # ------------------------------------------------------------ SSD and S3

    def free_ssd(self, bytes_needed: int) -> bool:
        """Begin to delete the coldest blocks, beside what is being deleted already.

        False where nothing can be, or where the last ones could not be deleted: giving up more would free nothing.
        """
        if any(tier == TierKind.SSD for _, tier, _ in self._again):
            return False
        capacity = self._links[TierKind.SSD].level.capacity_bytes or 0
        bytes_needed = min(bytes_needed, capacity // _SSD_SHARE_AT_ONCE) - self._ssd_bytes_deleting
        if bytes_needed > 0 or not self._ssd_bytes_deleting:
            victims = self._as_much_as_possible(TierKind.SSD, max(1, bytes_needed))
            self.on_evicted(TierKind.SSD, victims)
            self.delete(TierKind.SSD, victims, "evicted")
        return self._ssd_bytes_deleting > 0

    def delete(self, tier: TierKind, blocks: Iterable[int], reason: str, done: Deleted | None = None) -> None:
        """Delete these blocks' copies in a slow tier. At once the catalog knows them no more; `done` is told once per
        block whether the tier forgot it too. Where it did not, that is tried again some times; after that the copy
        answers EXISTS when the block is stored again."""
        for block in blocks:
            self._catalog.pin(block)
            if tier in self.policies:
                self.policies[tier].on_remove(block)
            self._catalog.set_absent(block, tier, reason)
            self.deleting[tier].add(block)
            self.evicted[tier] += 1
            self._delete(tier, block, done, 0)

    def lost(self, block: int, tier: TierKind, outcome: Outcome) -> None:
        """The tier turned out not to hold the block (any more)."""
        if tier in self.policies:
            self.policies[tier].on_remove(block)
        self._catalog.set_absent(block, tier, "corrupt" if outcome == Outcome.CORRUPT else "lost")

    def pump(self, now: float) -> None:
        """Try again what could not be deleted."""
        due = [action for at, _, action in self._again if at <= now]
        self._again = [waiting for waiting in self._again if waiting[0] > now]
        for action in due:
            action()

    # ------------------------------------------------------------ private

    def _make_room(self, num_bytes: int) -> bool:
        """Evict what is in the way of one slot: the coldest block of its size if that is among those that would go
        next, else a run of neighbours."""
        if self._evict_next(num_bytes):
            return True
        policy = self.policies[TierKind.RAM]
        coldest = policy.victims(num_bytes)
        for victim in coldest:
            if slot_size(self._catalog.size_bytes(victim)) == slot_size(num_bytes):
                self.free_ram(victim, "evicted")
                return True
        if coldest:
            # More of them, so that it shows where they lie, but not so many that it is everywhere.
            more_bytes = _COLDEST_BLOCKS * self._catalog.size_bytes(coldest[0])
            enough_bytes = max(2 * num_bytes, (self._ram.usage().capacity_bytes or 0) // _COLDEST_SHARE)
            coldest = max(coldest, policy.victims(min(more_bytes, enough_bytes)), key=len)
        elif not self._ram.has_other_sizes(num_bytes):
            return False  # a run of its own size would be a slot
        return self._clearing.clear(num_bytes, [self._catalog.key(victim) for victim in coldest])

    def _make_room_after_all(self, num_bytes: int) -> bool:
        if not self._give_up():
            return False
        self._clearing.look_again()
        return self._make_room(num_bytes)

    def _evict_next(self, num_bytes: int) -> bool:
        """Evict the next victim if it leaves a slot of that size. Some are asked for at once: looking for one costs a
        policy about as much as for sixteen."""
        now = self._clock()
        if not self._next and now >= self._no_batch_before and len(self.policies[TierKind.RAM]) >= _MAX_NEXT_BLOCKS:
            some = self.policies[TierKind.RAM].victims(_NEXT_BLOCKS * slot_size(num_bytes))
            self._next = dict.fromkeys(some if len(some) <= _MAX_NEXT_BLOCKS else [])
            if not self._next:
                # Little can go, or it is of other sizes: the next few times it is looked for one by one.
                self._no_batch_before = now + _NO_BATCH_S
        while self._next:
            victim = next(iter(self._next))
            del self._next[victim]
            may_go = self._catalog.resident(victim, TierKind.RAM) and not self._in_ram.pinned(victim)
            if not may_go or self._in_ram.children(victim):
                self._next.clear()
            elif slot_size(self._catalog.size_bytes(victim)) == slot_size(num_bytes):
                self.free_ram(victim, "evicted")
                return True
            else:
                self._next.clear()
        return False

    def _delete(self, tier: TierKind, block: int, done: Deleted | None, tries: int) -> None:
        link = self._links[tier]
        ssd_bytes = self._catalog.size_bytes(block) if tier == TierKind.SSD else 0
        self._ssd_bytes_deleting += ssd_bytes

        def finished(result: ops.Result) -> None:
            self._ssd_bytes_deleting -= ssd_bytes
            is_gone = result.outcome in (Outcome.OK, Outcome.MISS)
            if done is not None:
                done(tier, is_gone)
            if not is_gone and tries < len(_DELETE_AGAIN_AFTER_S):
                at = self._clock() + _DELETE_AGAIN_AFTER_S[tries]
                self._again.append((at, tier, lambda: self._delete(tier, block, None, tries + 1)))
                return
            self.deleting[tier].discard(block)
            self._catalog.unpin(block)

        link.store(ops.Delete(link.next_op(), self._catalog.key(block)), finished)

    def _is_only_copy(self, block: int) -> bool:
        return not self._catalog.residency(block) & _SLOWER and self._is_awaited(block)

    def _as_much_as_possible(self, tier: TierKind, wanted_bytes: int) -> list[int]:
        while wanted_bytes > 0:
            victims = self.policies[tier].victims(wanted_bytes)
            if victims:
                return victims
            wanted_bytes //= 2
        return []
