"""Fetches: an engine asks for blocks, they land in slots one by one, pinned until it has copied them.

Every block of a fetch is answered exactly once: OK with a slot, or the reason why not; at the deadline what is
missing answers TIMED_OUT. Blocks that land in one turn of the control loop travel in one message.

A connection that ends does not end its fetches. A client drops one after a silence of ours and goes on by another,
while it still copies what had landed; whether it lives is said by its lock (engines.py), and a dead one's pins fall at
once. To let them fall with the connection would be safe, since a reader looks at the generation after its copy, but
would turn copies under way into misses just when we are slow. So the pins of a client that lives and has lost a fetch
last until it releases them or, where it never learned the lease's number, for the deadline and the grace below.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.core.outcome import Outcome, TierKind
from kvstore.store.catalog import Catalog
from kvstore.store.lease import Lease, LeaseTable
from kvstore.store.loader import Asker, Loader
from kvstore.wire import Landed, Message, Slot
from tiers.ram import RamTier

# How long an engine may take to copy after its fetch is over.
_COPY_GRACE_S = 30.0
MAX_FETCHES = 1024

Reply = Callable[[Message], None]


@dataclass(slots=True)
class _Fetch:
    lease: Lease
    reply: Reply
    deadline: float
    waiting: dict[int, list[int]] = field(default_factory=dict)
    askers: dict[int, Asker] = field(default_factory=dict)
    landed: list[Slot] = field(default_factory=list)
    is_announced: bool = False


class Fetches:
    """Owned by the control thread."""

    def __init__(self, catalog: Catalog, ram: RamTier, loader: Loader, leases: LeaseTable) -> None:
        self._catalog = catalog
        self._ram = ram
        self._loader = loader
        self._leases = leases
        self._running: dict[int, _Fetch] = {}

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, keys: bytes, namespace: int, owner: int, now: float, deadline_s: float, reply: Reply) -> list[int]:
        """Start; return the blocks that were in RAM already, in order. The caller sees to MAX_FETCHES."""
        deadline = now + deadline_s
        lease = self._leases.open(owner, deadline + _COPY_GRACE_S)
        fetch = _Fetch(lease, reply, deadline)
        self._running[lease.number] = fetch
        touched = []
        for index, found in enumerate(self._catalog.find_joined(keys, namespace).tolist()):
            if found >= 0 and self._catalog.resident(found, TierKind.RAM):
                self._land(fetch, index, found, TierKind.RAM)
                touched.append(found)
            elif found in fetch.waiting:
                fetch.waiting[found].append(index)
            else:
                self._load(fetch, index, found)
        return touched

    def release(self, number: int, owner: int, indexes: list[int] | None) -> None:
        lease = self._leases.get(number, owner)
        if lease is None:
            return
        if indexes is None:
            self._end(lease)
        else:
            self._leases.unpin(lease, indexes)
            if number not in self._running and not lease.blocks:
                self._leases.close(lease)

    def release_all(self, owner: int) -> None:
        for lease in self._leases.of(owner):
            self._end(lease)

    def expire(self, now: float) -> None:
        for fetch in list(self._running.values()):
            if fetch.deadline <= now:
                self._give_up(fetch, Outcome.TIMED_OUT)
        for lease in self._leases.expired(now):
            self._end(lease)

    def next_deadline(self) -> float | None:
        return min((fetch.deadline for fetch in self._running.values()), default=None)

    def flush(self) -> None:
        """Send what has landed since the last turn, and at first in any case, so that the engine learns the lease."""
        for number, fetch in list(self._running.items()):
            done = not fetch.waiting
            if fetch.landed or done or not fetch.is_announced:
                fetch.reply(Landed(number, fetch.landed, done))
                fetch.landed = []
                fetch.is_announced = True
            if done:
                del self._running[number]
                if not fetch.lease.blocks:
                    self._leases.close(fetch.lease)

    # ------------------------------------------------------------ private

    def _load(self, fetch: _Fetch, index: int, block: int) -> None:
        if block < 0:
            fetch.landed.append(Slot(index, Outcome.MISS))
            return

        def asker(block: int, outcome: Outcome, tier: TierKind) -> None:
            for waiting in fetch.waiting.pop(block, []):
                if outcome == Outcome.OK:
                    self._land(fetch, waiting, block, tier)
                else:
                    fetch.landed.append(Slot(waiting, outcome))
            fetch.askers.pop(block, None)

        if self._catalog.writing(block) and not self._catalog.residency(block):
            fetch.landed.append(Slot(index, Outcome.PENDING))
            return
        outcome = self._loader.load(block, asker)
        if outcome == Outcome.OK:
            fetch.waiting[block] = [index]
            fetch.askers[block] = asker
        else:
            fetch.landed.append(Slot(index, outcome))

    def _land(self, fetch: _Fetch, index: int, block: int, source: TierKind) -> None:
        slot = self._ram.slot(self._catalog.key(block))
        assert slot is not None, "the catalog says RAM, the RAM tier has no slot"
        self._leases.pin(fetch.lease, index, block)
        fetch.landed.append(Slot(index, Outcome.OK, slot.offset, slot.generation, source))

    def _give_up(self, fetch: _Fetch, outcome: Outcome) -> None:
        waiting, fetch.waiting = fetch.waiting, {}
        for block, indexes in waiting.items():
            self._loader.forget(block, fetch.askers.pop(block))
            fetch.landed += [Slot(index, outcome) for index in indexes]
        if waiting:
            self._loader.drop_unwanted()

    def _end(self, lease: Lease) -> None:
        fetch = self._running.get(lease.number)
        if fetch is not None:
            self._give_up(fetch, Outcome.CANCELLED)
        self._leases.close(lease)
        if fetch is not None:
            # What landed after the engine gave up is pinned by nobody, so it must not be offered either.
            fetch.landed = [slot for slot in fetch.landed if slot.outcome != Outcome.OK]
