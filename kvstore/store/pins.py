"""Pins: blocks that a user wants kept. Each has an owner and a deadline, and all together have a budget per tier.

A pinned block is not evicted from a tier in which it is. No more than a share of each tier can be pinned, so that pins
never keep others out: what does not fit is refused, or, where a pinned session has grown, its tail goes unpinned. A
lease (lease.py) is something else and lasts for one fetch.

A tenant that pins alone may use a tier's whole budget, and no tenant may pin more than half of it beside others. Who
has more when another needs the room gives it up, tails first. A tenant here is a namespace: the tenant's salt is part
of it, and engines cannot name another's.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kvstore.core.errors import ProtocolError
from kvstore.core.index import Ids
from kvstore.core.outcome import TierKind
from kvstore.core.units import approximate_size
from kvstore.store.catalog import Catalog
from kvstore.wire import ErrorCode

# As many as can be counted in the rows below, and their blocks, each as often as it is pinned: 64 MiB of ids.
_MAX_OWNERS = 65_535
_MAX_BLOCKS = 1 << 24
_MIN_ROWS = 1024


@dataclass(frozen=True, slots=True)
class _Pin:
    """`num_held` leading ones of `blocks` are held in each tier."""

    blocks: Ids
    deadline: float
    num_held: Mapping[TierKind, int]


class Pins:
    """Owned by the control thread. An owner has one pin at a time; its blocks keep their catalog entries."""

    def __init__(self, catalog: Catalog, budgets: Mapping[TierKind, Callable[[], int]]) -> None:
        """`budgets` gives the bytes that may be pinned, for each tier that evicts, the fastest first."""
        self._catalog = catalog
        self._budgets = budgets
        self._pins: dict[Hashable, _Pin] = {}
        # How many pins hold each block, by id.
        self._held: dict[TierKind, npt.NDArray[np.uint16]] = {
            tier: np.zeros(_MIN_ROWS, dtype=np.uint16) for tier in budgets
        }
        # What is held, by namespace; only of those that have something.
        self._bytes: dict[TierKind, dict[int, int]] = {tier: {} for tier in budgets}
        self._num_blocks = 0
        self._refused = 0

    def __len__(self) -> int:
        return len(self._pins)

    def holds(self, block: int, tier: TierKind) -> bool:
        held = self._held[tier]
        return block < len(held) and bool(held[block])

    def snapshot(self) -> dict[str, int]:
        """Return the section `pins` of the statistics."""
        pinned = {f"{tier.label}_bytes": sum(self._bytes[tier].values()) for tier in self._budgets}
        return {"owners": len(self._pins), "refused": self._refused, **pinned}

    def blocks(self) -> list[int]:
        """All blocks of all pins, as often as they are pinned; for tests."""
        return [block for pin in self._pins.values() for block in pin.blocks.tolist()]

    def hold(self, owner: Hashable, blocks: Ids, deadline: float, *, whole: bool) -> None:
        """Pin these blocks of one prefix, in place of what the owner has pinned.

        As many of the first as each tier's budget allows. `whole`: the slowest of the tiers must have room for all;
        else ProtocolError (busy), and the owner's pin is as before.
        """
        before = self._pins.pop(owner, None)
        # First, since what is known only through the pin that ends must not end with it.
        self._catalog.add_session_refs(blocks, 1)
        if before is not None:
            self._count(before, -1)
        pin = _Pin(blocks, deadline, {tier: self._room_for(tier, blocks) for tier in self._budgets})
        last = list(self._budgets)[-1]
        are_too_many = len(self._pins) >= _MAX_OWNERS or self._num_blocks + len(blocks) > _MAX_BLOCKS
        if are_too_many or (whole and pin.num_held[last] < len(blocks)):
            if before is not None:
                self._count(before, 1)
                self._pins[owner] = before
            self._catalog.add_session_refs(blocks, -1)
            if whole:
                self._refuse(last, self._namespace(blocks), are_too_many=are_too_many)
            return
        self._make_room(pin)
        self._count(pin, 1)
        self._pins[owner] = pin
        if before is not None:
            self._catalog.add_session_refs(before.blocks, -1)

    def check(self, owner: Hashable, blocks: Ids, namespace: int) -> None:
        """Raise ProtocolError (busy) where the owner, None: a new one, cannot pin all of these blocks of the namespace;
        -1: one that is not known yet."""
        tier = list(self._budgets)[-1]
        pin = self._pins.get(owner)
        mine = np.zeros(0, dtype=np.int32) if pin is None else pin.blocks[: pin.num_held[tier]]
        self._grow(tier, blocks)
        is_new = (blocks < 0) | (self._held[tier][np.maximum(blocks, 0)] == 0)
        freed = mine[self._held[tier][mine] == 1]
        freed = freed[~np.isin(freed, blocks)]
        added = int(is_new.sum()) * self._catalog.namespaces[namespace].payload_bytes
        if added - self._sizes(freed) > self._left(tier, namespace):
            self._refuse(tier, namespace)

    def release_of(self, first: object) -> None:
        """Release all pins whose owner is a tuple that begins with this."""
        for owner in [owner for owner in self._pins if isinstance(owner, tuple) and owner[0] == first]:
            self.release(owner)

    def release(self, owner: Hashable) -> None:
        """An owner without a pin is passed over."""
        pin = self._pins.pop(owner, None)
        if pin is None:
            return
        self._count(pin, -1)
        self._catalog.add_session_refs(pin.blocks, -1)

    def expire(self, now: float) -> None:
        for owner in [owner for owner, pin in self._pins.items() if pin.deadline <= now]:
            self.release(owner)

    # ------------------------------------------------------------ private

    def _refuse(self, tier: TierKind, namespace: int, *, are_too_many: bool = False) -> NoReturn:
        self._refused += 1
        if are_too_many:
            raise ProtocolError(ErrorCode.BUSY, f"not pinned: {len(self._pins)} others are; unpin something")
        budget, mine = self._budgets[tier](), self._bytes[tier].get(namespace, 0)
        others = sum(self._bytes[tier].values()) - mine
        shared = f", {approximate_size(others)} of it by other tenants, beside whom one has half" if others else ""
        raise ProtocolError(
            ErrorCode.BUSY,
            f"not pinned: of {tier.label} {approximate_size(budget)} may be pinned and "
            f"{approximate_size(mine + others)} are{shared}; unpin something, or raise {tier.label}.pin_share",
        )

    def _left(self, tier: TierKind, namespace: int) -> int:
        """Return how many more bytes the namespace may pin in the tier."""
        budget, mine = self._budgets[tier](), self._bytes[tier].get(namespace, 0)
        others = sum(self._bytes[tier].values()) - mine
        if not others:
            return max(0, budget - mine)
        over = self._over_half(tier)
        if over is not None and over != namespace:
            others -= self._bytes[tier][over] - budget // 2
        return max(0, min(budget - others, budget // 2) - mine)

    def _over_half(self, tier: TierKind) -> int | None:
        """Return the namespace that has more than half of the budget; there is one at most."""
        half = self._budgets[tier]() // 2
        return next((namespace for namespace, held in self._bytes[tier].items() if held > half), None)

    def _make_room(self, pin: _Pin) -> None:
        """Where the pin, which is not counted yet, needs it, unpin what another namespace has beyond half."""
        for tier, count in pin.num_held.items():
            blocks = pin.blocks[:count]
            added = self._sizes(blocks[self._held[tier][blocks] == 0])
            over = self._over_half(tier)
            if over is None or over == self._namespace(pin.blocks):
                continue
            budget = self._budgets[tier]()
            for owner in sorted(self._owners_in(over), key=lambda owner: self._pins[owner].deadline):
                excess = sum(self._bytes[tier].values()) + added - budget
                if excess > 0:
                    self._shorten(owner, tier, min(excess, self._bytes[tier][over] - budget // 2))

    def _owners_in(self, namespace: int) -> list[Hashable]:
        return [owner for owner, pin in self._pins.items() if self._namespace(pin.blocks) == namespace]

    def _shorten(self, owner: Hashable, tier: TierKind, num_bytes: int) -> None:
        """Unpin the tail of a pin in a tier: enough to free so many bytes there, or all that it alone holds."""
        pin = self._pins[owner]
        blocks = pin.blocks[: pin.num_held[tier]]
        if not len(blocks) or num_bytes <= 0:
            return
        frees = (self._held[tier][blocks] == 1) * self._catalog.size_bytes(int(blocks[0]))
        freed_from_here_on = np.cumsum(frees[::-1])[::-1]
        enough = np.flatnonzero(freed_from_here_on >= num_bytes)
        kept = int(enough[-1]) if len(enough) else 0
        shorter = replace(pin, num_held={**pin.num_held, tier: kept})
        self._count(pin, -1)
        self._count(shorter, 1)
        self._pins[owner] = shorter

    def _namespace(self, blocks: Ids) -> int:
        """Return that of all the blocks; -1: there are none."""
        return self._catalog.namespace_of(int(blocks[0])) if len(blocks) else -1

    def _count(self, pin: _Pin, change: int) -> None:
        """Enter (1) or leave (-1) the pin in what is known of each tier."""
        self._num_blocks += change * len(pin.blocks)
        for tier, count in pin.num_held.items():
            blocks = pin.blocks[:count]
            self._grow(tier, blocks)
            held = self._held[tier]
            if change > 0:
                num_bytes = self._sizes(blocks[held[blocks] == 0])
                held[blocks] += 1
            else:
                held[blocks] -= 1
                num_bytes = -self._sizes(blocks[held[blocks] == 0])
            namespace, by_namespace = self._namespace(blocks), self._bytes[tier]
            by_namespace[namespace] = by_namespace.get(namespace, 0) + num_bytes
            if not by_namespace[namespace]:
                del by_namespace[namespace]

    def _room_for(self, tier: TierKind, blocks: Ids) -> int:
        """Return how many of the first blocks may be pinned in the tier beside those that are."""
        if not len(blocks):
            return 0
        self._grow(tier, blocks)
        # They are of one namespace and so of one size.
        is_new = self._held[tier][blocks] == 0
        added = np.cumsum(is_new) * self._catalog.size_bytes(int(blocks[0]))
        return int(np.searchsorted(added, self._left(tier, self._namespace(blocks)), side="right"))

    def _sizes(self, blocks: Ids) -> int:
        return len(blocks) * self._catalog.size_bytes(int(blocks[0])) if len(blocks) else 0

    def _grow(self, tier: TierKind, blocks: Ids) -> None:
        held = self._held[tier]
        rows = int(blocks.max()) + 1 if len(blocks) else 0
        if rows > len(held):
            larger = np.zeros(max(rows, 2 * len(held)), dtype=np.uint16)
            larger[: len(held)] = held
            self._held[tier] = larger
