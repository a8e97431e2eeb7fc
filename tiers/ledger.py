"""The SSD tier's books: the index, the slots it names, how much that is, and the room the index itself takes.

Covers: what becomes visible, what goes, in which order slots are freed. Does not cover: bytes (`tiers/writer.py`,
`tiers/reader.py`).
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

from kvstore.core.key import BlockKey
from tiers import reconcile
from tiers.direct import record_size
from tiers.environment import DamagedEnvironment, remove_environment
from tiers.faults import FaultCounter
from tiers.index import BYTES_PER_ENTRY, BlockIndex, IndexEntry, IndexFull, Place
from tiers.segments import Segments
from tiers.space import MIB, DiskSpace


class Ledger:
    """Thread-safe once it is open."""

    def __init__(self, folder: Path, space: DiskSpace, faults: FaultCounter) -> None:
        self._folder = folder
        self._space = space
        self._faults = faults
        self._index_path = folder / "index.mdb"
        self._counts_lock = Lock()
        self._num_blocks = self._used_bytes = 0
        self.index: BlockIndex
        self.segments: Segments

    def open(self, empty: Callable[[int], None], opened: contextlib.ExitStack) -> None:
        """Open index and segments and bring them into agreement, below the cap; `opened` is told what to close.
        `empty` is what `Segments` wants. An index that is damaged anywhere is replaced by an empty one. Raises
        TierUnavailable and OSError."""
        try:
            with contextlib.ExitStack() as attempt:
                self._open(empty, attempt)
                opened.enter_context(attempt.pop_all())
        except DamagedEnvironment as error:
            self._faults.count("index_lost", detail=error)
            remove_environment(self._index_path)
            self._open(empty, opened)

    def condemn(self) -> None:
        """The index turned out to be damaged while it was in use: the next `open` begins with an empty one."""
        with contextlib.suppress(OSError):
            remove_environment(self._index_path)

    def _open(self, empty: Callable[[int], None], opened: contextlib.ExitStack) -> None:
        self.segments = Segments(
            self._folder / "segments",
            segment_bytes=self._space.segment_bytes,
            room=self._room,
            reserve=self._reserve,
            empty=empty,
        )
        opened.callback(self.segments.close)
        path = self._index_path
        self.index = reconcile.open_index(path, self._space, self.segments.num_slots, self._faults)
        # Looked up when called: compaction replaces the index.
        opened.callback(lambda: self.index.close())
        matched = reconcile.match(self.index, self.segments, self._faults)
        reconcile.shrink(self.index, self.segments, self._space, matched, self._faults)
        self.index = reconcile.compacted(self.index, path, self._space, self.segments, self._faults)
        self._num_blocks, self._used_bytes = matched.num_blocks, matched.used_bytes

    def totals(self) -> tuple[int, int]:
        """Return the number of blocks and what their records take up."""
        with self._counts_lock:
            return self._num_blocks, self._used_bytes

    def publish(self, entries: Sequence[IndexEntry]) -> list[bool]:
        """Make the entries visible in one durable transaction; False where the block was there already. Slots of those
        that did not become visible are free again. Raises IndexFull and TierUnavailable: then none did."""
        inserted = [False] * len(entries)
        try:
            inserted = self._insert(entries)
        finally:
            published = [entry for entry, ok in zip(entries, inserted, strict=True) if ok]
            self.segments.settle([entry.place for entry in published])
            self.segments.give_back([entry.place for entry, ok in zip(entries, inserted, strict=True) if not ok])
            self._count(1, published)
        return inserted

    def remove(
        self, keys: Sequence[BlockKey], places: Sequence[Place] | None = None, *, reuse: bool = True
    ) -> list[IndexEntry | None]:
        """Delete the keys durably, those with `places[i]` only if they still lie there, and then free their slots, for
        `reuse` at once or at the next start; return what was deleted. Raises IndexFull and TierUnavailable."""
        try:
            removed = self.index.remove(keys, places)
        except IndexFull:
            if len(keys) == 1 and not self._stretch(1):
                raise
            # A large batch changes many pages at once; one at a time needs only a few.
            one_by_one = [places[i : i + 1] if places is not None else None for i in range(len(keys))]
            return [
                entry
                for key, place in zip(keys, one_by_one, strict=True)
                for entry in self.remove([key], place, reuse=reuse)
            ]
        gone = [entry for entry in removed if entry is not None]
        self._count(-1, gone)
        (self.segments.retire if reuse else self.segments.withhold)([entry.place for entry in gone])
        return removed

    def drop(self, entries: Sequence[IndexEntry], reuse: bool) -> set[BlockKey]:
        """Remove the entries that lie where they say; return the keys of those."""
        if not entries:
            return set()
        keys, places = [entry.meta.key for entry in entries], [entry.place for entry in entries]
        return {entry.meta.key for entry in self.remove(keys, places, reuse=reuse) if entry is not None}

    def check_integrity(self) -> None:
        """Assert that index, slots and counts agree. No other call may be running."""
        entries = list(self.index.places())
        assert len({place for _, place, _ in entries}) == len(entries) == self._num_blocks
        assert self._used_bytes == sum(record_size(payload_bytes) for _, _, payload_bytes in entries)
        self.segments.check_integrity({place for _, place, _ in entries})

    # ------------------------------------------------------------ helpers

    def _insert(self, entries: Sequence[IndexEntry]) -> list[bool]:
        try:
            return self.index.insert(entries)
        except IndexFull:
            if not self._stretch(len(entries)):
                raise
            return self.index.insert(entries)

    def _stretch(self, num_entries: int) -> bool:
        """Give the index more than its due, at the cost of room for blocks; return whether there was any."""
        more_bytes = max(MIB // 4, 2 * num_entries * BYTES_PER_ENTRY)
        # No segment is added meanwhile, so both together stay below the cap.
        with self.segments.growing():
            if self._room(BYTES_PER_ENTRY) < more_bytes:
                return False
            self.index.grow(self.index.map_bytes + more_bytes)
        return True

    def _room(self, record_bytes: int) -> int:
        segments = self.segments
        return self._space.room_bytes(record_bytes, segments.size_bytes, segments.num_slots, self.index.map_bytes)

    def _reserve(self, num_slots: int) -> bool:
        """Let the index grow to what so many slots call for; return whether the disk has room for that."""
        try:
            self.index.grow(self._space.index_bytes(num_slots))
        except IndexFull:
            return False
        return True

    def _count(self, sign: int, entries: Sequence[IndexEntry]) -> None:
        with self._counts_lock:
            self._num_blocks += sign * len(entries)
            self._used_bytes += sign * sum(record_size(entry.meta.payload_bytes) for entry in entries)
