"""A slab: a contiguous run of whole slots of one size."""

from array import array
from typing import Final

NO_TAG: Final = -1


class Slab:
    """`used[i]` is 1 where slot i is handed out; `tags[i]` is a number its owner keeps there."""

    __slots__ = ("first_free", "num_used", "slot_bytes", "start", "tags", "used")

    def __init__(self, start: int, slot_bytes: int, used: bytearray, tags: "array[int]") -> None:
        self.start = start
        self.slot_bytes = slot_bytes
        self.used = used
        self.tags = tags
        self.num_used = used.count(1)
        # No slot before this one is free.
        self.first_free = 0

    @property
    def end(self) -> int:
        return self.start + self.slot_bytes * len(self.used)

    def index(self, offset: int) -> int:
        """Return which slot in use begins at `offset`. Raises KeyError."""
        index, rest = divmod(offset - self.start, self.slot_bytes)
        if rest or not 0 <= index < len(self.used) or not self.used[index]:
            raise KeyError(offset)
        return index

    def take(self) -> int:
        """Hand out the first free slot, of which there must be one, and return its offset."""
        index = self.used.find(0, self.first_free)
        self.used[index] = 1
        self.first_free = index + 1
        self.num_used += 1
        return self.start + index * self.slot_bytes

    def give_back(self, offset: int) -> None:
        """Raises KeyError where no slot in use begins at `offset`."""
        index = self.index(offset)
        self.used[index] = 0
        self.tags[index] = NO_TAG
        self.first_free = min(self.first_free, index)
        self.num_used -= 1

    def part(self, first: int, last: int) -> "Slab":
        """Return the slots [first, last) as a slab of their own."""
        return Slab(self.start + first * self.slot_bytes, self.slot_bytes, self.used[first:last], self.tags[first:last])

    def slots_in(self, start: int, end: int) -> tuple[int, int]:
        """Return which slots [first, last) lie whole in [start, end)."""
        first = max(0, -(-(start - self.start) // self.slot_bytes))
        return first, max(first, min(len(self.used), (end - self.start) // self.slot_bytes))

    def check_integrity(self) -> None:
        assert len(self.tags) == len(self.used)
        assert self.num_used == self.used.count(1) > 0, "an empty slab was kept"
        assert self.used.find(0, 0, self.first_free) < 0, "a free slot is never found again"


def empty_slab(start: int, slot_bytes: int, num_slots: int) -> Slab:
    return Slab(start, slot_bytes, bytearray(num_slots), array("i", [NO_TAG]) * num_slots)
