"""The free runs of a stretch of memory: sorted, never adjacent, each [start, end)."""

from bisect import bisect_left
from itertools import pairwise


class FreeRuns:
    def __init__(self, total_bytes: int) -> None:
        self.runs: list[tuple[int, int]] = [(0, total_bytes)] if total_bytes else []

    def take(self, slot_bytes: int, wanted_slots: int) -> tuple[int, int]:
        """Take whole slots from the first run that has room for all, or from the longest where none has; return
        where they begin and how many they are, maybe 0."""
        wanted_bytes = slot_bytes * wanted_slots
        best, longest_bytes = -1, 0
        for index, (start, end) in enumerate(self.runs):
            if end - start > longest_bytes:
                best, longest_bytes = index, end - start
                if longest_bytes >= wanted_bytes:
                    break
        num_slots = min(wanted_slots, longest_bytes // slot_bytes)
        if num_slots == 0:
            return 0, 0
        start, end = self.runs[best]
        taken_to = start + num_slots * slot_bytes
        if taken_to == end:
            del self.runs[best]
        else:
            self.runs[best] = (taken_to, end)
        return start, num_slots

    def release(self, start: int, end: int) -> None:
        """Add [start, end), which is not in any run; nothing happens where it is empty."""
        if start == end:
            return
        index = bisect_left(self.runs, (start, end))
        if index < len(self.runs) and self.runs[index][0] == end:
            end = self.runs.pop(index)[1]
        if index > 0 and self.runs[index - 1][1] == start:
            index -= 1
            start = self.runs.pop(index)[0]
        self.runs.insert(index, (start, end))

    def check_integrity(self) -> None:
        assert all(start < end for start, end in self.runs)
        assert all(a[1] < b[0] for a, b in pairwise(self.runs)), "runs not merged"
