"""Places for blocks of several sizes in one run of memory, without fragmenting it: a slab allocator.

A slab is a contiguous run of whole slots of one size. A size that needs room takes a new slab from the free runs,
and a slab whose last slot is freed goes back to them and merges with its neighbours; a size that finds no room gets
the free ends of the others' slabs. So a size that is no longer
used leaves nothing behind, and one size alone can fill the memory to the last whole slot:

    | slab of 6 x 2 pages     | slab of 3 x 5 pages           | free run             |
    | s0 | s1 | s2 | .. | s5  | s0      | s1      | s2        |                      |

The idea is Bonwick's (The Slab Allocator, USENIX Summer 1994); slabs are exact multiples of their slot instead of
having one size, since slots of 2 to 32 MiB would otherwise waste the rest of each.
Covers: offsets and sizes. Does not cover: keys, bytes, generations, threads (the caller's lock or owner thread).
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

PAGE_BYTES: Final = 4096
_MIN_SLAB_SLOTS = 8
# A slab is at least this share of the whole, so that there are few of them and slots of one size lie together.
_SLAB_FRACTION = 64


@dataclass(slots=True)
class _Slab:
    start: int
    slot_bytes: int
    num_slots: int
    free_offsets: list[int]

    @property
    def end(self) -> int:
        return self.start + self.slot_bytes * self.num_slots


class SlotAllocator:
    """Hands out page-aligned offsets into `total_bytes` bytes (rounded down to pages)."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes - total_bytes % PAGE_BYTES
        self.used_bytes = 0
        """What the handed-out slots take up, rounding to pages included."""
        # Sorted and never adjacent: [start, end).
        self._free_runs: list[tuple[int, int]] = [(0, self.total_bytes)] if self.total_bytes else []
        self._slab_starts: list[int] = []
        self._slabs: dict[int, _Slab] = {}
        # Per slot size, the slabs with a free slot, by start; used in this order, so that the
        # later ones can run empty.
        self._open_slabs: dict[int, dict[int, _Slab]] = {}
        self._taken: dict[int, int] = {}

    def allocate(self, num_bytes: int) -> int | None:
        """Return the offset of a free slot of at least `num_bytes` bytes, or None where there is no room for one."""
        if num_bytes <= 0:
            raise ValueError("a slot has at least one byte")
        slot_bytes = slot_size(num_bytes)
        open_slabs = self._open_slabs.get(slot_bytes)
        slab = next(iter(open_slabs.values())) if open_slabs else self._new_slab(slot_bytes)
        if slab is None:
            return None
        offset = slab.free_offsets.pop()
        if not slab.free_offsets:
            self._close_slab(slab)
        self._taken[offset] = slot_bytes
        self.used_bytes += slot_bytes
        return offset

    def free(self, offset: int) -> None:
        """Give back a slot that `allocate` returned. Raises KeyError where it is not handed out."""
        slot_bytes = self._taken.pop(offset)
        self.used_bytes -= slot_bytes
        slab = self._slab_of(offset)
        slab.free_offsets.append(offset)
        if len(slab.free_offsets) == slab.num_slots:
            self._drop_slab(slab)
        else:
            self._open_slabs.setdefault(slot_bytes, {})[slab.start] = slab

    def check_integrity(self) -> None:
        """Assert that slabs and free runs tile the memory and every slot is either free or handed out."""
        pieces = sorted([*self._free_runs, *((slab.start, slab.end) for slab in self._slabs.values())])
        position = 0
        for start, end in pieces:
            assert start == position < end, "the pieces do not tile the memory"
            position = end
        assert position == self.total_bytes
        assert all(a[1] < b[0] for a, b in pairwise(self._free_runs)), "runs not merged"
        assert self._slab_starts == sorted(self._slabs)
        assert self.used_bytes == sum(self._taken.values())
        for slab in self._slabs.values():
            offsets = range(slab.start, slab.end, slab.slot_bytes)
            free = set(slab.free_offsets)
            assert len(free) == len(slab.free_offsets) < slab.num_slots, "an empty slab was kept"
            assert all((offset in free) != (self._taken.get(offset) == slab.slot_bytes) for offset in offsets)
            assert (slab.start in self._open_slabs.get(slab.slot_bytes, {})) == bool(free)

    def _new_slab(self, slot_bytes: int) -> _Slab | None:
        wanted_slots = max(_MIN_SLAB_SLOTS, self.total_bytes // _SLAB_FRACTION // slot_bytes)
        index, (start, end) = self._find_run(wanted_slots * slot_bytes)
        if end - start < slot_bytes:
            self._trim_slabs()
            index, (start, end) = self._find_run(wanted_slots * slot_bytes)
        num_slots = min(wanted_slots, (end - start) // slot_bytes)
        if num_slots == 0:
            return None
        slab_end = start + num_slots * slot_bytes
        if slab_end == end:
            del self._free_runs[index]
        else:
            self._free_runs[index] = (slab_end, end)
        # Reversed, so that slots are handed out in ascending order.
        offsets = list(range(start, slab_end, slot_bytes))[::-1]
        slab = _Slab(start, slot_bytes, num_slots, offsets)
        self._slabs[start] = slab
        insort(self._slab_starts, start)
        self._open_slabs.setdefault(slot_bytes, {})[start] = slab
        return slab

    def _find_run(self, num_bytes: int) -> tuple[int, tuple[int, int]]:
        """Return the first free run of that length, or the longest where none is so long, and its index."""
        longest = (0, (0, 0))
        for index, (start, end) in enumerate(self._free_runs):
            if end - start >= num_bytes:
                return index, (start, end)
            if end - start > longest[1][1] - longest[1][0]:
                longest = (index, (start, end))
        return longest

    def _trim_slabs(self) -> None:
        """Give back the free slots at the end of every slab, for another size that would go without."""
        for slab in [slab for slabs in self._open_slabs.values() for slab in slabs.values()]:
            end, free = slab.end, set(slab.free_offsets)
            # A slab in use has a slot that is not free, so this stops before it is empty.
            while slab.end - slab.slot_bytes in free:
                slab.num_slots -= 1
            if slab.end < end:
                slab.free_offsets = [offset for offset in slab.free_offsets if offset < slab.end]
                if not slab.free_offsets:
                    self._close_slab(slab)
                self._release_run(slab.end, end)

    def _slab_of(self, offset: int) -> _Slab:
        index = bisect_left(self._slab_starts, offset + 1) - 1
        return self._slabs[self._slab_starts[index]]

    def _close_slab(self, slab: _Slab) -> None:
        open_slabs = self._open_slabs[slab.slot_bytes]
        del open_slabs[slab.start]
        if not open_slabs:
            del self._open_slabs[slab.slot_bytes]

    def _drop_slab(self, slab: _Slab) -> None:
        if slab.start in self._open_slabs.get(slab.slot_bytes, {}):
            self._close_slab(slab)
        del self._slabs[slab.start]
        self._slab_starts.remove(slab.start)
        self._release_run(slab.start, slab.end)

    def _release_run(self, start: int, end: int) -> None:
        index = bisect_left(self._free_runs, (start, end))
        if index < len(self._free_runs) and self._free_runs[index][0] == end:
            end = self._free_runs.pop(index)[1]
        if index > 0 and self._free_runs[index - 1][1] == start:
            index -= 1
            start = self._free_runs.pop(index)[0]
        self._free_runs.insert(index, (start, end))


def slot_size(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to whole pages: what a slot for so many bytes takes up."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
