"""One segment file of the SSD tier and which of its slots are taken."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tiers.direct import RecordFile
from tiers.footing import is_at
from tiers.index import Place


@dataclass(slots=True, eq=False)
class Segment:
    """One file. `taken` has a byte per slot, 0 where it is free. One that `is_emptying` gives no slots away."""

    number: int
    record_bytes: int
    path: Path
    file: RecordFile
    size_bytes: int
    taken: bytearray
    num_taken: int = 0
    cursor: int = 0
    is_emptying: bool = False

    @property
    def num_free(self) -> int:
        """How many slots can be taken."""
        return 0 if self.is_emptying else len(self.taken) - self.num_taken

    @property
    def is_in_place(self) -> bool:
        """Whether the open file is still the one in the folder."""
        return is_at(os.fstat(self.file.descriptor), self.path)

    def take(self, count: int) -> list[Place]:
        """Take up to `count` free slots, in ascending runs: next fit keeps batches adjacent."""
        places: list[Place] = []
        while len(places) < count and self.num_free:
            slot = self.taken.find(0, self.cursor)
            if slot < 0:
                self.cursor = 0
                continue
            self.taken[slot] = 1
            self.num_taken += 1
            self.cursor = slot + 1
            places.append(Place(self.number, slot))
        return places


class SlotMap:
    """Some slots of some segments, a byte each."""

    def __init__(self, taken: dict[int, bytearray]) -> None:
        self._taken = taken

    def clear(self, place: Place) -> None:
        """Take a slot out; one that is not there already is none."""
        slots = self._taken.get(place.segment)
        if slots is not None and place.slot < len(slots):
            slots[place.slot] = 0

    def places(self) -> set[Place]:
        return {
            Place(segment, slot) for segment, slots in self._taken.items() for slot, is_in in enumerate(slots) if is_in
        }


def sparsest_movable(segments: Iterable[Segment], unlike_bytes: int) -> Segment | None:
    """Return the segment with the fewest blocks whose blocks all have room in others of their size, leaving out slots
    of `unlike_bytes`; None where there is none."""
    free: dict[int, int] = {}
    candidates = [segment for segment in segments if segment.record_bytes != unlike_bytes]
    for segment in candidates:
        free[segment.record_bytes] = free.get(segment.record_bytes, 0) + segment.num_free
    movable = [
        segment
        for segment in candidates
        if segment.num_free and free[segment.record_bytes] - segment.num_free >= segment.num_taken
    ]
    # By bytes that have to be moved for a byte that is won.
    return min(movable, key=lambda segment: segment.num_taken / len(segment.taken), default=None)
