"""Leases: pins against eviction, each with an owner and a deadline, so that none outlives its use.

A lease is one fetch of one engine (an incarnation). It ends block by block as the engine has copied them, as a
whole on release, when the engine is gone, or at its deadline; an engine that still copies then finds the
slot's generation changed.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.store.catalog import Catalog

# Whoever fetches and never releases comes up against this before the table of leases grows without bound.
MAX_LEASES = 16_384
_LOOK_EVERY_S = 0.5


@dataclass(slots=True)
class Lease:
    """`blocks` maps the index in the fetch's keys to the pinned block."""

    number: int
    owner: int
    deadline: float
    blocks: dict[int, int] = field(default_factory=dict)


class LeaseTable:
    """Owned by the control thread."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._numbers = itertools.count(1)
        self._leases: dict[int, Lease] = {}
        self._next_look = 0.0

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, owner: int, deadline: float) -> Lease:
        """The caller sees to MAX_LEASES."""
        lease = Lease(next(self._numbers), owner, deadline)
        self._leases[lease.number] = lease
        return lease

    def get(self, number: int, owner: int) -> Lease | None:
        """Return the lease if it exists and is this owner's."""
        lease = self._leases.get(number)
        return lease if lease is not None and lease.owner == owner else None

    def pin(self, lease: Lease, index: int, block: int) -> None:
        assert index not in lease.blocks
        self._catalog.pin(block)
        lease.blocks[index] = block

    def unpin(self, lease: Lease, indexes: Sequence[int]) -> None:
        """Indexes that are not pinned (any more) are passed over."""
        for index in indexes:
            block = lease.blocks.pop(index, None)
            if block is not None:
                self._catalog.unpin(block)

    def close(self, lease: Lease) -> None:
        self.unpin(lease, list(lease.blocks))
        self._leases.pop(lease.number, None)

    def pinned(self) -> list[int]:
        """All pinned blocks, each as often as it is pinned."""
        return [block for lease in self._leases.values() for block in lease.blocks.values()]

    def of(self, owner: int) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.owner == owner]

    def expired(self, now: float) -> list[Lease]:
        """Return the leases whose deadline has passed, at most half a second late: there may be many to look at."""
        if now < self._next_look:
            return []
        self._next_look = now + _LOOK_EVERY_S
        return [lease for lease in self._leases.values() if lease.deadline <= now]
