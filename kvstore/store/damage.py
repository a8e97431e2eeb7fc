"""Drops the copies of blocks that an engine found damaged, by a checksum of its own, so that they can be stored again.

What the daemon verifies itself (records on SSD and in S3) never gets that far; this is for bytes that changed in shared
memory, or before they were first written anywhere.
"""

from collections.abc import Mapping

from kvstore.core.outcome import TierKind
from kvstore.store.catalog import Catalog
from kvstore.store.link import WorkerLink
from kvstore.store.room import Room

_SLOW = (TierKind.SSD, TierKind.S3)


def drop_damaged(
    catalog: Catalog, room: Room, links: Mapping[TierKind, WorkerLink], keys: bytes, namespace: int, source: TierKind
) -> int:
    """Return how many blocks there were to drop, from RAM and every tier down to `source`: a copy further away may be
    whole, and if it is not, that shows when it is loaded. Blocks in use stay: their readers will find the same."""
    num_dropped = 0
    for block in catalog.find_joined(keys, namespace).tolist():
        if block < 0 or catalog.pinned(block):
            continue
        num_dropped += 1
        # Pinned across the loop: a block whose last copy goes keeps its id until all tiers are through.
        catalog.pin(block)
        for tier in _SLOW[: int(source) - int(TierKind.RAM)]:
            is_there = tier in links and links[tier].ready and catalog.resident(block, tier)
            if is_there and block not in room.deleting[tier]:
                room.delete(tier, [block], "corrupt")
        if catalog.resident(block, TierKind.RAM):
            room.free_ram(block, "corrupt")
        catalog.unpin(block)
    return num_dropped
