"""Brings the SSD tier's index and its segment files into agreement before the tier serves anybody.

The index decides what exists; what it names but no file holds is dropped, what a file holds but it does not name is a
free slot, and a file with no block in it goes. A folder that is over its cap, because the cap was lowered, loses whole
segments, the emptiest first. No payload is read: a slot with foreign bytes is found when it is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvstore.core.errors import TierUnavailable
from kvstore.core.key import BlockKey, split_keys
from tiers.direct import record_size
from tiers.environment import DamagedEnvironment, remove_environment
from tiers.faults import FaultCounter
from tiers.index import BlockIndex, IndexFull, compact_index, remove_leftovers
from tiers.occupancy import REASONS, Occupancy
from tiers.segments import Segments
from tiers.space import DiskSpace

# Entries removed in one transaction.
_REMOVE_AT_ONCE = 1000


def open_index(path: Path, space: DiskSpace, num_slots: int, faults: FaultCounter) -> BlockIndex:
    """Open the index; one that is damaged is counted and replaced by an empty one. Raises TierUnavailable."""
    map_bytes = space.index_bytes(num_slots)
    remove_leftovers(path)
    try:
        return BlockIndex(path, map_bytes)
    except DamagedEnvironment as error:
        faults.count("index_lost", detail=error)
        remove_environment(path)
        return BlockIndex(path, map_bytes)


@dataclass(slots=True)
class Matched:
    """What the index names and the files hold: how many blocks, and what their records take up. `lost` keys have no
    slot: they are to be removed, once the index surely has room for that."""

    num_blocks: int = 0
    used_bytes: int = 0
    lost: list[BlockKey] = field(default_factory=list)


def match(index: BlockIndex, segments: Segments, faults: FaultCounter) -> Matched:
    """Occupy the slots the index names, and remove files with no block."""
    matched = Matched()
    occupancy = Occupancy(segments)
    for columns in index.columns():
        reasons = occupancy.take(columns)
        payload_bytes = columns.entries["payload_bytes"][reasons == 0]
        by_size = zip(*(column.tolist() for column in np.unique(payload_bytes, return_counts=True)), strict=True)
        matched.num_blocks += len(payload_bytes)
        matched.used_bytes += sum(record_size(size) * count for size, count in by_size)
        for number, count in enumerate(np.bincount(reasons, minlength=len(REASONS)).tolist()):
            if number:
                faults.count(REASONS[number], count)
        matched.lost += split_keys(columns.keys_at(reasons != 0))
    occupancy.finish()
    segments.unlink_empty()
    return matched


def shrink(index: BlockIndex, segments: Segments, space: DiskSpace, matched: Matched, faults: FaultCounter) -> None:
    """Remove segments until everything fits below the cap, and the index has its room on the disk; then what was lost.

    The files go before the entries, since on a full disk there may be no room to change the index. A crash in between
    leaves entries without files, which the next start drops.
    """
    lost = set(matched.lost)
    while True:
        excess = space.total_bytes(segments.size_bytes, segments.num_slots) - space.max_bytes
        if excess <= 0 and index.reserve():
            break
        doomed = set(segments.sparsest(max(1, excess)))
        if not doomed:
            break
        entries = [entry for entry in index.places() if entry[1].segment in doomed and entry[0] not in lost]
        segments.discard(doomed)
        gone = [key for key, _, _ in entries]
        if index.reserve():
            _remove(index, gone)
        else:
            matched.lost += gone
            lost.update(gone)
        faults.count("dropped_over_cap" if excess > 0 else "dropped_disk_full", len(entries))
        matched.num_blocks -= len(entries)
        matched.used_bytes -= sum(record_size(payload_bytes) for _, _, payload_bytes in entries)
    _remove(index, matched.lost)


def compacted(index: BlockIndex, path: Path, space: DiskSpace, segments: Segments, faults: FaultCounter) -> BlockIndex:
    """Return the index with a map no larger than the segments call for; its file is rewritten if it is larger."""
    map_bytes = space.index_bytes(segments.num_slots)
    if index.map_bytes <= map_bytes:
        return index
    index.close()
    if path.stat().st_size > map_bytes:
        try:
            compact_index(path)
        except (IndexFull, TierUnavailable) as error:
            # No room for a copy beside it. It stays as large as it is, at the cost of room for blocks.
            faults.count("index_not_compacted", detail=error)
            remove_leftovers(path)
    return BlockIndex(path, map_bytes)


def _remove(index: BlockIndex, keys: Sequence[BlockKey]) -> None:
    for start in range(0, len(keys), _REMOVE_AT_ONCE):
        index.remove(keys[start : start + _REMOVE_AT_ONCE])
