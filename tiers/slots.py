"""Places for blocks of several sizes in one run of memory, without fragmenting it: a slab allocator.

A slab is a contiguous run of whole slots of one size. A size that needs room takes a new slab from the free runs, and a
slab whose last slot is freed goes back to them and merges with its neighbours; a size that finds no room gets the free
ends of the others' slabs, and what its owner clears in the middle of them (`cells`, `carve`). So a size that is no
longer used leaves nothing behind, and one size alone can fill the memory to the last whole slot:

    | slab of 6 x 2 pages     | slab of 3 x 5 pages           | free run             |
    | s0 | s1 | s2 | .. | s5  | s0      | s1      | s2        |                      |

The idea is Bonwick's (The Slab Allocator, USENIX Summer 1994); slabs are exact multiples of their slot instead of
having one size, since slots of 2 to 32 MiB would otherwise waste the rest of each.
A slot costs 5 bytes of bookkeeping: whether it is handed out, and a number its owner may keep there.
Covers: offsets and sizes. Does not cover: keys, bytes, generations, threads (the caller's lock or owner thread).
"""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiers.freeruns import FreeRuns
from tiers.pages import PAGE_BYTES
from tiers.slab import Slab, empty_slab

_MIN_SLAB_SLOTS = 8
# A slab is at least this share of the whole, so that there are few of them and slots of one size lie together.
_SLAB_FRACTION = 64


@dataclass(frozen=True, slots=True)
class Cells:
    """A contiguous stretch of the memory, cut where slots and free runs are cut: cell i is [starts[i], ends[i])."""

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    is_used: npt.NDArray[np.bool_]


class SlotAllocator:
    """Hands out page-aligned offsets into `total_bytes` bytes (rounded down to pages)."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes - total_bytes % PAGE_BYTES
        self.used_bytes = 0
        """What the handed-out slots take up, rounding to pages included."""
        self._free = FreeRuns(self.total_bytes)
        self._slab_starts: list[int] = []
        self._slabs: dict[int, Slab] = {}
        # Per slot size, the slabs with a free slot, by start; used in the order in which they came, so that the later
        # ones can run empty.
        self._open_slabs: dict[int, dict[int, Slab]] = {}
        # The smallest slot for which there was no room, since a slot was freed: asking again is answered at once.
        self._no_room_bytes = self.total_bytes + 1

    def allocate(self, num_bytes: int) -> int | None:
        """Return the offset of a free slot of at least `num_bytes` bytes, or None where there is no room for one."""
        if num_bytes <= 0:
            raise ValueError("a slot has at least one byte")
        slot_bytes = slot_size(num_bytes)
        open_slabs = self._open_slabs.get(slot_bytes)
        slab = next(iter(open_slabs.values())) if open_slabs else self._new_slab(slot_bytes)
        if slab is None:
            return None
        offset = slab.take()
        if slab.num_used == len(slab.used):
            self._close_slab(slab)
        self.used_bytes += slot_bytes
        return offset

    def free(self, offset: int) -> None:
        """Give back a slot that `allocate` returned. Raises KeyError where it is not handed out."""
        slab = self._slab_of(offset)
        slab.give_back(offset)
        self.used_bytes -= slab.slot_bytes
        self._no_room_bytes = self.total_bytes + 1
        if slab.num_used:
            self._open_slabs.setdefault(slab.slot_bytes, {})[slab.start] = slab
        else:
            self._remove_slab(slab)
            self._free.release(slab.start, slab.end)

    @property
    def num_used(self) -> int:
        """How many slots are handed out."""
        return sum(slab.num_used for slab in self._slabs.values())

    def tag(self, offset: int, number: int) -> None:
        """Keep a number with a handed-out slot, until it is freed. Raises KeyError where it is not handed out."""
        slab = self._slab_of(offset)
        slab.tags[slab.index(offset)] = number

    def tag_of(self, offset: int) -> int:
        """Return the number kept with a slot, -1 where there is none. Raises KeyError where it is not handed out."""
        slab = self._slab_of(offset)
        return slab.tags[slab.index(offset)]

    # ------------------------------------------------------------ room for another size

    def slab_start(self, offset: int) -> int:
        """Return where the slab begins in which a slot lies. Raises KeyError where it is not handed out."""
        slab = self._slab_of(offset)
        slab.index(offset)
        return slab.start

    def has_other_sizes(self, num_bytes: int) -> bool:
        return any(slab.slot_bytes != slot_size(num_bytes) for slab in self._slabs.values())

    def cells(self, slab_start: int | None, num_bytes: int) -> Cells:
        """Return the slab's cells, and on either side of it as much as a run of `num_bytes` through it may need, but
        the free runs next to it at any rate. `slab_start` None: all of the memory. Empty where no slab begins there."""
        pieces = sorted([*self._free.runs, *((start, slab.end) for start, slab in self._slabs.items())])
        if slab_start is None:
            return self._cut(pieces)
        if slab_start not in self._slabs:
            return self._cut([])
        missing_bytes = num_bytes - (self._slabs[slab_start].end - slab_start)
        index = bisect_left(pieces, (slab_start,))
        first, last = (self._reach(pieces, index, step, missing_bytes) for step in (-1, 1))
        return self._cut(pieces[first : last + 1])

    def carve(self, start: int, end: int) -> bool:
        """Take the free slots in [start, end) out of their slabs, so that any size can use the room.

        `start` and `end` are borders of cells. False where a slot in between is handed out; then nothing changed.
        """
        index = max(0, bisect_right(self._slab_starts, start) - 1)
        slabs = [self._slabs[begin] for begin in self._slab_starts[index : bisect_left(self._slab_starts, end)]]
        cuts = [(slab, *slab.slots_in(start, end)) for slab in slabs]
        if any(slab.used.find(1, first, last) >= 0 for slab, first, last in cuts):
            return False
        for slab, first, last in cuts:
            if first < last:
                self._take_out(slab, first, last)
        self._no_room_bytes = self.total_bytes + 1
        return True

    def check_integrity(self) -> None:
        """Assert that slabs and free runs tile the memory, and that all that is kept of the slabs agrees."""
        self._free.check_integrity()
        position = 0
        for start, end in sorted([*self._free.runs, *((slab.start, slab.end) for slab in self._slabs.values())]):
            assert start == position < end, "the pieces do not tile the memory"
            position = end
        assert position == self.total_bytes
        assert self._slab_starts == sorted(self._slabs)
        assert self.used_bytes == sum(slab.num_used * slab.slot_bytes for slab in self._slabs.values())
        for slab in self._slabs.values():
            slab.check_integrity()
            is_open = slab.start in self._open_slabs.get(slab.slot_bytes, {})
            assert is_open == (slab.num_used < len(slab.used))
        num_open = sum(map(len, self._open_slabs.values()))
        assert num_open == sum(slab.num_used < len(slab.used) for slab in self._slabs.values())

    # ------------------------------------------------------------ slabs

    def _new_slab(self, slot_bytes: int) -> Slab | None:
        if slot_bytes >= self._no_room_bytes:
            return None
        wanted_slots = max(_MIN_SLAB_SLOTS, self.total_bytes // _SLAB_FRACTION // slot_bytes)
        start, num_slots = self._free.take(slot_bytes, wanted_slots)
        if num_slots == 0:
            self._trim_slabs()
            start, num_slots = self._free.take(slot_bytes, wanted_slots)
        if num_slots == 0:
            self._no_room_bytes = slot_bytes
            return None
        slab = empty_slab(start, slot_bytes, num_slots)
        self._add_slab(slab)
        # Room that comes in small pieces must not end in as many slabs.
        slab = self._join(self._slab_at(start - 1), slab, wanted_slots) or slab
        return self._join(slab, self._slab_at(slab.end), wanted_slots) or slab

    def _add_slab(self, slab: Slab) -> None:
        self._slabs[slab.start] = slab
        insort(self._slab_starts, slab.start)
        if slab.num_used < len(slab.used):
            self._open_slabs.setdefault(slab.slot_bytes, {})[slab.start] = slab

    def _remove_slab(self, slab: Slab) -> None:
        if slab.start in self._open_slabs.get(slab.slot_bytes, {}):
            self._close_slab(slab)
        del self._slabs[slab.start]
        del self._slab_starts[bisect_left(self._slab_starts, slab.start)]

    def _close_slab(self, slab: Slab) -> None:
        open_slabs = self._open_slabs[slab.slot_bytes]
        del open_slabs[slab.start]
        if not open_slabs:
            del self._open_slabs[slab.slot_bytes]

    def _join(self, left: Slab | None, right: Slab | None, max_slots: int) -> Slab | None:
        """Make one slab of two neighbours of one size, unless it would be larger than others."""
        if left is None or right is None or left.slot_bytes != right.slot_bytes:
            return None
        if len(left.used) + len(right.used) > max_slots:
            return None
        self._remove_slab(left)
        self._remove_slab(right)
        together = Slab(left.start, left.slot_bytes, left.used + right.used, left.tags + right.tags)
        self._add_slab(together)
        return together

    def _take_out(self, slab: Slab, first: int, last: int) -> None:
        """Turn the free slots [first, last) of a slab into a free run, and what is left of it into slabs."""
        self._remove_slab(slab)
        for part in (slab.part(0, first), slab.part(last, len(slab.used))):
            if part.num_used:
                self._add_slab(part)
            else:
                self._free.release(part.start, part.end)
        cut = slab.part(first, last)
        self._free.release(cut.start, cut.end)

    def _trim_slabs(self) -> None:
        """Give back the free slots at both ends of every slab, for another size that would go without."""
        for slab in [slab for slabs in self._open_slabs.values() for slab in slabs.values()]:
            first, last = slab.used.find(1), slab.used.rfind(1) + 1
            if first or last < len(slab.used):
                self._remove_slab(slab)
                self._add_slab(slab.part(first, last))
                for part in (slab.part(0, first), slab.part(last, len(slab.used))):
                    self._free.release(part.start, part.end)

    def _slab_of(self, offset: int) -> Slab:
        """Return the last slab that begins at or before `offset`. Raises KeyError where there is none."""
        index = bisect_right(self._slab_starts, offset) - 1
        if index < 0:
            raise KeyError(offset)
        return self._slabs[self._slab_starts[index]]

    def _slab_at(self, offset: int) -> Slab | None:
        index = bisect_right(self._slab_starts, offset) - 1
        slab = self._slabs[self._slab_starts[index]] if index >= 0 else None
        return slab if slab is not None and slab.end > offset else None

    # ------------------------------------------------------------ cells

    def _reach(self, pieces: list[tuple[int, int]], index: int, step: int, missing_bytes: int) -> int:
        """Return the last piece from `index` on that is needed to cover so many bytes more, or is a free run next to
        those."""
        while 0 <= index + step < len(pieces):
            start, end = pieces[index + step]
            if missing_bytes <= 0 and start in self._slabs:
                break
            missing_bytes -= end - start
            index += step
        return index

    def _cut(self, pieces: list[tuple[int, int]]) -> Cells:
        starts = [np.zeros(0, np.int64)]
        ends = [np.zeros(0, np.int64)]
        is_used = [np.zeros(0, np.bool_)]
        for start, end in pieces:
            slab = self._slabs.get(start)
            step = end - start if slab is None else slab.slot_bytes
            begins = np.arange(start, end, step, dtype=np.int64)
            starts.append(begins)
            ends.append(begins + step)
            is_used.append(np.frombuffer(b"\0" if slab is None else bytes(slab.used), dtype=np.bool_))
        return Cells(np.concatenate(starts), np.concatenate(ends), np.concatenate(is_used))


def slot_size(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to whole pages: what a slot for so many bytes takes up."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
