"""Brings the SSD tier's index and its segment files into agreement before the tier serves anybody.

The index decides what exists; what it names but no file holds is dropped, what a file holds but it does not name is a
free slot, and a file with no block in it goes. A folder that is over its cap, because the cap was lowered, loses whole
segments, the emptiest first. No payload is read: a slot with foreign bytes is found when it is read.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvstore.core.key import BlockKey, split_keys
from tiers.direct import record_size
from tiers.environment import DamagedEnvironment, remove_environment
from tiers.faults import FaultCounter
from tiers.index import BlockIndex, compact_index, remove_leftovers
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


def match(index: BlockIndex, segments: Segments, faults: FaultCounter) -> tuple[int, int]:
    """Occupy the slots the index names, drop the entries that have none, and remove files with no block.

    Returns the number of blocks and what their records take up.
    """
    num_blocks, used_bytes = 0, 0
    lost: list[BlockKey] = []
    occupancy = Occupancy(segments)
    for columns in index.columns():
        reasons = occupancy.take(columns)
        payload_bytes = columns.entries["payload_bytes"][reasons == 0]
        sizes, counts = np.unique(payload_bytes, return_counts=True)
        num_blocks += len(payload_bytes)
        used_bytes += sum(
            record_size(size) * count for size, count in zip(sizes.tolist(), counts.tolist(), strict=True)
        )
        for number, count in enumerate(np.bincount(reasons, minlength=len(REASONS)).tolist()):
            if number:
                faults.count(REASONS[number], count)
        lost += split_keys(columns.keys_at(reasons != 0))
    occupancy.finish()
    _remove(index, lost)
    segments.unlink_empty()
    return num_blocks, used_bytes


def shrink(index: BlockIndex, segments: Segments, space: DiskSpace, faults: FaultCounter) -> tuple[int, int]:
    """Remove segments until everything fits below the cap; return how many blocks and bytes of records went."""
    num_gone, bytes_gone = 0, 0
    while (excess := space.total_bytes(segments.size_bytes, segments.num_slots) - space.max_bytes) > 0:
        doomed = set(segments.sparsest(excess))
        if not doomed:
            break
        entries = [entry for entry in index.places() if entry[1].segment in doomed]
        _remove(index, [key for key, _, _ in entries])
        segments.retire([place for _, place, _ in entries])
        segments.unlink_empty()
        faults.count("dropped_over_cap", len(entries))
        num_gone += len(entries)
        bytes_gone += sum(record_size(payload_bytes) for _, _, payload_bytes in entries)
    return num_gone, bytes_gone


def compacted(index: BlockIndex, path: Path, space: DiskSpace, segments: Segments) -> BlockIndex:
    """Return the index with a map no larger than the segments call for; its file is rewritten if it is larger."""
    map_bytes = space.index_bytes(segments.num_slots)
    if index.map_bytes <= map_bytes:
        return index
    index.close()
    if path.stat().st_size > map_bytes:
        compact_index(path)
    return BlockIndex(path, map_bytes)


def _remove(index: BlockIndex, keys: Sequence[BlockKey]) -> None:
    for start in range(0, len(keys), _REMOVE_AT_ONCE):
        index.remove(keys[start : start + _REMOVE_AT_ONCE])
