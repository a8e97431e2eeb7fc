"""Marks the slots that an index names as taken, a column of places at a time.

Covers: which places cannot be, and why. Does not cover: what becomes of the blocks there (`tiers/reconcile.py`).
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.core.block import HEADER_BYTES
from tiers.columns import Columns
from tiers.pages import PAGE_BYTES
from tiers.segments import Segments

REASONS: Final = ("", "segment_missing", "segment_foreign", "segment_truncated", "slot_conflict")
"""Why a place cannot be: no file, one of another record size, one that is too short, a slot that is taken already."""
_MISSING, _FOREIGN, _TRUNCATED, _CONFLICT = range(1, 5)


class Occupancy:
    """All slots of all segments in one array, from the segment with the lowest number on. Not thread-safe."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        layout = segments.layout()
        # One more segment, of no slots, so that there is something to look at where there is none.
        self._numbers = np.array([number for number, _, _ in layout] + [2**63 - 1], dtype=np.int64)
        self._record_bytes = np.array([size for _, size, _ in layout] + [0], dtype=np.uint64)
        self._num_slots = np.array([slots for _, _, slots in layout] + [0], dtype=np.int64)
        self._first = np.concatenate([[0], np.cumsum(self._num_slots)])
        self._taken = np.zeros(int(self._first[-1]), dtype=np.uint8)

    def take(self, columns: Columns) -> npt.NDArray[np.uint8]:
        """Take the place of each entry; return for each 0, or the number in REASONS of why that could not be."""
        entries = columns.entries
        segment, slot = entries["segment"].astype(np.int64), entries["slot"].astype(np.int64)
        at = np.searchsorted(self._numbers, segment)
        reasons = np.zeros(len(columns), dtype=np.uint8)
        reasons[slot >= self._num_slots[at]] = _TRUNCATED
        payload_pages = (entries["payload_bytes"] + np.uint64(PAGE_BYTES - 1)) // np.uint64(PAGE_BYTES)
        record_bytes = payload_pages * np.uint64(PAGE_BYTES) + np.uint64(HEADER_BYTES)
        reasons[record_bytes != self._record_bytes[at]] = _FOREIGN
        reasons[self._numbers[at] != segment] = _MISSING
        fine = np.flatnonzero(reasons == 0)
        flat = self._first[at[fine]] + slot[fine]
        _, firsts = np.unique(flat, return_index=True)
        is_twice = np.ones(len(flat), dtype=np.bool_)
        is_twice[firsts] = False
        is_twice |= self._taken[flat] != 0
        reasons[fine[is_twice]] = _CONFLICT
        self._taken[flat[~is_twice]] = 1
        return reasons

    def finish(self) -> None:
        """Tell the segments which of their slots are taken."""
        for index, number in enumerate(self._numbers[:-1].tolist()):
            self._segments.occupy(number, self._taken[self._first[index] : self._first[index + 1]].tobytes())
