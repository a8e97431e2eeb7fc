"""Empties whole tiers on order (`kvstore evict`), fastest first.

A block whose every other copy would go too is kept, unless the order says to drop it; so is one in use.
"""

from collections.abc import Collection, Mapping

from kvstore.core.errors import ProtocolError
from kvstore.core.outcome import TierKind
from kvstore.store.catalog import Catalog
from kvstore.store.columns import STORED_TIERS, tier_bit
from kvstore.store.fetch import Reply
from kvstore.store.link import WorkerLink
from kvstore.store.room import Room
from kvstore.wire import ErrorCode, Evict, Evicted


class Eviction:
    """One order; answered once the slow tiers have carried it out."""

    def __init__(
        self,
        catalog: Catalog,
        room: Room,
        order: Evict,
        in_use: Collection[int],
        reply: Reply,
        only: Collection[int] | None = None,
    ) -> None:
        """`only`: these blocks, as far as the order says."""
        self._reply = reply
        self._tiers = [tier for tier in STORED_TIERS if tier.label in order.tiers]
        self._freed = {tier.label: 0 for tier in self._tiers}
        self._kept = {tier.label: 0 for tier in self._tiers}
        self._waiting = 0
        emptied = sum(tier_bit(tier) for tier in self._tiers)
        victims: dict[TierKind, list[int]] = {}
        for tier in self._tiers:
            residents = [block for block in catalog.blocks_resident(tier) if only is None or block in only]
            may_go = [block for block in residents if not catalog.pinned(block) and block not in in_use]
            if not order.drop:
                may_go = [block for block in may_go if catalog.residency(block) & ~emptied]
            victims[tier] = may_go
            self._kept[tier.label] = len(residents) - len(may_go)
        self._carry_out(catalog, room, victims)

    def _carry_out(self, catalog: Catalog, room: Room, victims: dict[TierKind, list[int]]) -> None:
        self._waiting = sum(len(blocks) for tier, blocks in victims.items() if tier != TierKind.RAM)
        # Pinned across the loop: a block whose last copy goes must keep its id until all tiers are through.
        pinned = {block for blocks in victims.values() for block in blocks}
        for block in pinned:
            catalog.pin(block)
        for tier, blocks in victims.items():
            if tier == TierKind.RAM:
                for block in blocks:
                    room.free_ram(block, "evicted")
                self._freed[tier.label] = len(blocks)
            else:
                room.delete(tier, blocks, "evicted", self._deleted)
        for block in pinned:
            catalog.unpin(block)
        if not any(blocks for tier, blocks in victims.items() if tier != TierKind.RAM):
            self._reply(Evicted(self._freed, self._kept))

    def _deleted(self, tier: TierKind, is_gone: bool) -> None:
        (self._freed if is_gone else self._kept)[tier.label] += 1
        self._waiting -= 1
        if self._waiting == 0:
            self._reply(Evicted(self._freed, self._kept))


def check_order(order: Evict, links: Mapping[TierKind, WorkerLink]) -> None:
    """Raise ProtocolError: bad_request where the order names a tier that there is not, busy where one is down."""
    known = {tier.label: tier for tier in STORED_TIERS}
    for name in order.tiers:
        if name not in known:
            raise ProtocolError(ErrorCode.BAD_REQUEST, f"no tier is called {name!r}; tiers are {', '.join(known)}")
        if known[name] == TierKind.RAM:
            continue
        if known[name] not in links:
            raise ProtocolError(ErrorCode.BAD_REQUEST, f"the tier {name} is not configured")
        if not links[known[name]].ready:
            raise ProtocolError(ErrorCode.BUSY, f"the tier {name} does not answer now; try again later")
    if not order.tiers:
        raise ProtocolError(ErrorCode.BAD_REQUEST, "name at least one tier")
