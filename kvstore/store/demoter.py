"""Copies blocks down: every stored block from RAM to SSD, and those of sessions on to S3, in the background.

The order is that of arrival, so a parent goes before its children; towards the bucket that is enforced
(`chain_order.py`). What waits is a list of ids and takes no memory to speak of; how much is under way is bounded by the
links' windows. A block whose RAM copy is gone by the time it is due for S3 is loaded from SSD first.
"""

from collections import OrderedDict
from collections.abc import Callable

from kvstore.core.outcome import Outcome, TierKind
from kvstore.store.catalog import Catalog
from kvstore.store.chain_order import ChainOrder
from kvstore.store.columns import tier_bit
from kvstore.store.link import WorkerLink
from kvstore.store.loader import Loader
from kvstore.store.room import Room
from kvstore.worker import ops
from tiers.ram import RamTier

_RETRY_AFTER_S = 1.0
# What is to make room is deleted no sooner.
_ROOM_AFTER_S = 0.01
_MAX_TRIES = 5
# Blocks that are being loaded in order to be written take slots from those that somebody waits for.
_MAX_LOADING = 8
# One turn of the control loop looks at no more blocks that cannot be copied now.
_MAX_PASSED = 64


class Demoter:
    """Owned by the control thread; the queue of one tier."""

    def __init__(
        self,
        tier: TierKind,
        catalog: Catalog,
        ram: RamTier,
        link: WorkerLink,
        room: Room,
        loader: Loader,
        on_fault: Callable[[str], None],
        clock: Callable[[], float],
        on_existing: Callable[[int], None] = lambda _: None,
        on_stored: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_existing` is told of each block that the tier turned out to have, `on_stored` of each that it has now."""
        self._tier = tier
        self._catalog = catalog
        self._ram = ram
        self._link = link
        self._room = room
        self._loader = loader
        self._on_fault = on_fault
        self._clock = clock
        self._on_existing = on_existing
        self._on_stored = on_stored
        self._queue: OrderedDict[int, None] = OrderedDict()
        self._failed: dict[int, None] = {}
        self._under_way: set[int] = set()
        self._staged: set[int] = set()
        self._order: ChainOrder | None = None
        if tier == TierKind.S3:
            self._order = ChainOrder(catalog, tier, self._under_way.__contains__, self.wants)
        self._loading = 0
        self._tries: dict[int, int] = {}
        self._is_refused = False
        self._not_before = 0.0
        self._room_by = 0.0
        self.may_exist: set[int] = set()

    def __len__(self) -> int:
        """How many blocks are still to be copied."""
        early = 0 if self._order is None else len(self._order)
        return len(self._queue) + len(self._failed) + len(self._under_way) + early

    def wants(self, block: int) -> bool:
        is_early = self._order is not None and block in self._order
        return block in self._queue or block in self._under_way or block in self._failed or is_early

    def holds(self, block: int) -> bool:
        """Whether the block's copy in RAM should wait for us: not while the tier takes nothing, since that may last."""
        return self._link.ready and not self._is_refused and self.wants(block)

    def add(self, block: int) -> None:
        """Copy the block down soon. Nothing is pinned while it waits: if the block goes first, it is not copied."""
        if not self.wants(block) and not self._catalog.resident(block, self._tier):
            self._queue[block] = None

    def forget(self, block: int) -> None:
        """The block is to be deleted, or its id ends: what has not begun is not copied any more."""
        self._queue.pop(block, None)
        self._failed.pop(block, None)
        if block not in self._under_way:
            self._tries.pop(block, None)
            self.may_exist.discard(block)
            if self._order is not None:
                self._order.drop(block)

    def pump(self, now: float) -> None:
        if now < self._not_before or (now < self._room_by and self._room.deleting[self._tier]):
            return
        for block in reversed(self._failed):  # in the order they had
            self._put_back(block)
        self._failed.clear()
        passed = 0
        while passed < min(_MAX_PASSED, len(self._queue)) and self._loading < _MAX_LOADING and self._link.store_room():
            block, _ = self._queue.popitem(last=False)
            if block in self._room.deleting[self._tier]:
                self._queue[block] = None  # once the old copy is gone
                passed += 1
            elif not self._catalog.resident(block, self._tier):
                if not self._follows(block):
                    passed += 1
                elif self._order is None or self._order.is_within_span(block):
                    passed += not self._begin(block)
                else:
                    self._put_back(block)
                    return

    # ------------------------------------------------------------ private

    def _put_back(self, block: int) -> None:
        self._queue[block] = None
        self._queue.move_to_end(block, last=False)

    def _follows(self, block: int) -> bool:
        """Whether the block's turn has come. Else it waits behind its parent, or, where that is not copied at all, is
        left out: whoever wants it adds the parent first."""
        if self._order is None or self._order.follows(block):
            return True
        if self.wants(self._catalog.parent(block)):
            self._queue[block] = None
        return False

    def _begin(self, block: int) -> bool:
        self._under_way.add(block)
        if self._catalog.resident(block, TierKind.RAM):
            self._write(block)
            return True
        self._loading += 1
        outcome = self._loader.load(block, self._loaded)
        if outcome != Outcome.OK:
            self._loaded(block, outcome, self._tier)
        return outcome == Outcome.OK

    def _loaded(self, block: int, outcome: Outcome, _: TierKind) -> None:
        self._loading -= 1
        if outcome == Outcome.OK:
            self._staged.add(block)
            self._write(block)
        else:
            self._leave_out(block)

    def _write(self, block: int) -> None:
        slot = self._ram.slot(self._catalog.key(block))
        assert slot is not None, "the catalog says RAM, the RAM tier has no slot"
        self._catalog.pin(block)
        meta = ops.PackedMeta.pack(self._catalog.meta(block))
        op = ops.Write(self._link.next_op(), meta, slot.offset, may_exist=block in self.may_exist)
        self._link.store(op, lambda result: self._written(block, Outcome(result.outcome)))

    def _written(self, block: int, outcome: Outcome) -> None:
        if outcome in (Outcome.OK, Outcome.EXISTS):
            self._is_refused = False
            self._give_up(block)
            if outcome == Outcome.EXISTS:
                self._on_existing(block)
            for stored in [block] if self._order is None else self._order.ended(block):
                self._enter(stored)
        else:
            self._try_again(block, outcome)
        self._put_away(block)
        self._catalog.unpin(block)

    def _enter(self, block: int) -> None:
        if not self._catalog.resident(block, self._tier):
            self._catalog.set_resident(block, self._tier)
            self._room.entered(self._tier, [block])
        self._on_stored(block)

    def _put_away(self, block: int) -> None:
        """Free the slot of a block that was brought into RAM only to be copied: nobody asked for it there."""
        if block in self._staged:
            self._staged.discard(block)
            others = self._catalog.residency(block) & ~tier_bit(TierKind.RAM)
            if self._catalog.resident(block, TierKind.RAM) and self._catalog.pins(block) == 1 and others:
                self._room.free_ram(block, "evicted")

    def _try_again(self, block: int, outcome: Outcome) -> None:
        # As much room as all that is under way may need: the others are about to be refused too.
        wanted_bytes = len(self._under_way) * self._catalog.size_bytes(block)
        if outcome == Outcome.FULL and self._tier == TierKind.SSD and self._room.free_ssd(wanted_bytes):
            self._under_way.discard(block)
            self._failed[block] = None
            # No fault: that is how a full tier takes the next block. Sooner it would only be refused again.
            self._not_before = self._clock() + _ROOM_AFTER_S
            self._room_by = self._clock() + _RETRY_AFTER_S
            return
        self._on_fault(f"{self._tier.label}_write_{outcome.label}")
        self._is_refused = True
        self._not_before = self._clock() + _RETRY_AFTER_S
        tries = self._tries.get(block, 0) + 1
        if tries < _MAX_TRIES:
            self._give_up(block)
            self._tries[block] = tries
            self._failed[block] = None
        else:
            self._leave_out(block)

    def _leave_out(self, block: int) -> None:
        self._give_up(block)
        if self._order is not None:
            self._order.drop(block)

    def _give_up(self, block: int) -> None:
        self._under_way.discard(block)
        self._tries.pop(block, None)
        self.may_exist.discard(block)
