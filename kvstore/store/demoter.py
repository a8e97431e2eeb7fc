"""Copies blocks down: every stored block from RAM to SSD, and those of sessions on to S3, in the background.

The order is that of arrival, so a parent goes before its children. What waits is a list of ids and takes no memory to
speak of; how much is under way is bounded by the links' windows. A block whose RAM copy is gone by the time it is
due for S3 is loaded from SSD first.
"""

from collections import deque
from collections.abc import Callable

from kvstore.core.outcome import Outcome, TierKind
from kvstore.store import ops
from kvstore.store.catalog import Catalog
from kvstore.store.link import WorkerLink
from kvstore.store.loader import Loader
from kvstore.store.room import Room
from tiers.ram import RamTier

_RETRY_AFTER_S = 1.0
_MAX_TRIES = 5
# One refusal for want of space frees room for this many blocks.
_FREE_BLOCKS_AT_ONCE = 16


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
    ) -> None:
        self._tier = tier
        self._catalog = catalog
        self._ram = ram
        self._link = link
        self._room = room
        self._loader = loader
        self._on_fault = on_fault
        self._queue: deque[int] = deque()
        self._queued: set[int] = set()
        self._under_way: set[int] = set()
        self._tries: dict[int, int] = {}
        self._not_before = 0.0
        self.may_exist: set[int] = set()

    def __len__(self) -> int:
        """How many blocks are still to be copied."""
        return len(self._queued) + len(self._under_way)

    def wants(self, block: int) -> bool:
        return block in self._queued or block in self._under_way

    def add(self, block: int) -> None:
        """Copy the block down soon. Nothing is pinned while it waits: if the block goes first, it is not copied."""
        if not self.wants(block) and not self._catalog.resident(block, self._tier):
            self._queue.append(block)
            self._queued.add(block)

    def forget(self, block: int) -> None:
        """The block is to be deleted: what has not begun is not copied any more."""
        self._queued.discard(block)

    def pump(self, now: float) -> None:
        if now < self._not_before:
            return
        while self._queue and self._link.store_room():
            block = self._queue.popleft()
            if block not in self._queued:
                continue
            if block in self._room.deleting[self._tier]:
                self._queue.append(block)
                return
            self._queued.discard(block)
            if not self._catalog.resident(block, self._tier):
                self._begin(block, now)

    # ------------------------------------------------------------ private

    def _begin(self, block: int, now: float) -> None:
        self._under_way.add(block)
        if self._catalog.resident(block, TierKind.RAM):
            self._write(block, now)
            return
        outcome = self._loader.load(block, lambda block, outcome, _: self._loaded(block, outcome, now))
        if outcome != Outcome.OK:
            self._under_way.discard(block)
            self._tries.pop(block, None)

    def _loaded(self, block: int, outcome: Outcome, now: float) -> None:
        if outcome == Outcome.OK:
            self._write(block, now)
        else:
            self._under_way.discard(block)
            self._tries.pop(block, None)

    def _write(self, block: int, now: float) -> None:
        slot = self._ram.slot(self._catalog.key(block))
        assert slot is not None, "the catalog says RAM, the RAM tier has no slot"
        self._catalog.pin(block)
        meta = ops.PackedMeta.pack(self._catalog.meta(block))
        op = ops.Write(self._link.next_op(), meta, slot.offset, may_exist=block in self.may_exist)
        self._link.store(op, lambda result: self._written(block, Outcome(result.outcome), now))

    def _written(self, block: int, outcome: Outcome, now: float) -> None:
        self._under_way.discard(block)
        self.may_exist.discard(block)
        if outcome in (Outcome.OK, Outcome.EXISTS):
            self._tries.pop(block, None)
            self._catalog.set_resident(block, self._tier)
            if self._tier in self._room.policies:
                self._room.policies[self._tier].on_insert([block])
        else:
            self._failed(block, outcome, now)
        self._catalog.unpin(block)

    def _failed(self, block: int, outcome: Outcome, now: float) -> None:
        self._on_fault(f"{self._tier.label}_write_{outcome.label}")
        tries = self._tries.get(block, 0) + 1
        full = outcome == Outcome.FULL
        if full and self._tier == TierKind.SSD:
            full = not self._room.free_ssd(_FREE_BLOCKS_AT_ONCE * self._catalog.size_bytes(block))
        if tries >= _MAX_TRIES:
            self._tries.pop(block, None)
            return
        self._tries[block] = tries
        if outcome != Outcome.FULL or full:
            self._not_before = now + _RETRY_AFTER_S
        self._queue.appendleft(block)
        self._queued.add(block)
