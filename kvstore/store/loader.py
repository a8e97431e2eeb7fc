"""Brings blocks from SSD and S3 into slots: one read in flight per block, however many ask for it.

A load tries the fastest tier that holds the block and goes on to the next slower one where that copy turns out to
be missing, corrupt or out of reach. A load that finds no free slot waits until one is freed or its askers give up.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.core.outcome import Outcome, TierKind
from kvstore.store.catalog import Catalog
from kvstore.store.link import WorkerLink
from kvstore.worker import ops
from tiers.ram import RamTier, SlotRef

Asker = Callable[[int, Outcome, TierKind], None]
"""Told once about (block, outcome, tier that served it); the block is in RAM then if OK, and not pinned yet."""


class Room(Protocol):
    """Whoever frees slots; see demoter.py."""

    def reserve(self, block: int) -> SlotRef | None: ...


@dataclass(slots=True)
class _Load:
    block: int
    tier: TierKind
    askers: list[Asker] = field(default_factory=list)
    op: int = 0
    tried: set[TierKind] = field(default_factory=set)


class Loader:
    """Owned by the control thread; askers are called on it, never from inside `load`."""

    def __init__(
        self,
        catalog: Catalog,
        ram: RamTier,
        links: dict[TierKind, WorkerLink],
        room: Room,
        on_loaded: Callable[[int], None],
        on_lost: Callable[[int, TierKind, Outcome], None],
    ) -> None:
        self._catalog = catalog
        self._ram = ram
        self._links = links
        self._room = room
        self._on_loaded = on_loaded
        self._on_lost = on_lost
        self._loads: dict[int, _Load] = {}
        self._starved: deque[_Load] = deque()

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def is_starved(self) -> bool:
        """Whether loads wait for slots that cannot be had."""
        return bool(self._starved)

    def load(self, block: int, asker: Asker) -> Outcome:
        """OK: the asker will be told. Otherwise what stands in the way, and the asker is not kept."""
        running = self._loads.get(block)
        if running is not None:
            running.askers.append(asker)
            return Outcome.OK
        tier = self._source(block, set())
        if tier is None:
            return Outcome.UNAVAILABLE if self._catalog.residency(block) else Outcome.MISS
        if self._catalog.writing(block):
            return Outcome.PENDING
        if self._catalog.size_bytes(block) > self._ram.max_slot_bytes:
            return Outcome.FULL  # stored when RAM was larger; waiting for a slot would never end
        started = _Load(block, tier, [asker])
        self._loads[block] = started
        # From here on the entry stays: WRITING keeps it, and keeps its other copies from being evicted.
        self._catalog.begin_write(block)
        self._starved.append(started)
        return Outcome.OK

    def forget(self, block: int, asker: Asker) -> None:
        """The asker is interested no more. A load nobody waits for is taken back if it has not begun."""
        load = self._loads.get(block)
        if load is None or asker not in load.askers:
            return
        load.askers.remove(asker)
        if load.askers:
            return
        if load.op == 0:
            self._starved.remove(load)
            del self._loads[block]
            self._catalog.abort_write(block)

    def drop_unwanted(self) -> None:
        """Take back the reads that wait in the links and that nobody asks for any more."""
        unwanted = {load.op for load in self._loads.values() if load.op and not load.askers}
        if unwanted:
            for link in self._links.values():
                link.cancel_loads(lambda op: op not in unwanted)

    def pump(self) -> None:
        """Give slots to the loads that wait for one, in order."""
        while self._starved:
            load = self._starved[0]
            slot = self._room.reserve(load.block)
            if slot is None:
                return
            self._starved.popleft()
            self._submit(load, slot)

    def _submit(self, load: _Load, slot: SlotRef) -> None:
        link = self._links[load.tier]
        op = link.next_op()
        meta = ops.PackedMeta.pack(self._catalog.meta(load.block))
        load.op = op
        if not link.load(ops.Read(op, meta, slot.offset), lambda result: self._done(load, result)):
            self._done(load, ops.Result(op, Outcome.BUSY if link.ready else Outcome.UNAVAILABLE))

    def _done(self, load: _Load, result: ops.Result) -> None:
        outcome = Outcome(result.outcome)
        block = load.block
        key = self._catalog.key(block)
        load.op = 0
        if outcome == Outcome.OK:
            self._ram.publish(key)
            del self._loads[block]
            self._catalog.pin(block)  # until the askers have pinned it themselves
            self._catalog.finish_write(block)
            self._on_loaded(block)
            self._tell(load, outcome)
            self._catalog.unpin(block)
            return
        self._ram.abandon(key)
        if outcome in (Outcome.MISS, Outcome.CORRUPT):
            self._on_lost(block, load.tier, outcome)
        load.tried.add(load.tier)
        slower = self._source(block, load.tried) if load.askers else None
        if slower is not None and outcome != Outcome.CANCELLED:
            load.tier = slower
            self._starved.append(load)
            return
        del self._loads[block]
        self._tell(load, outcome)
        self._catalog.abort_write(block)

    def _tell(self, load: _Load, outcome: Outcome) -> None:
        askers, load.askers = load.askers, []
        for asker in askers:
            asker(load.block, outcome, load.tier)

    def _source(self, block: int, tried: set[TierKind]) -> TierKind | None:
        for tier in (TierKind.SSD, TierKind.S3):
            link = self._links.get(tier)
            if link is not None and link.ready and tier not in tried and self._catalog.resident(block, tier):
                return tier
        return None
