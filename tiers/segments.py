"""The SSD tier's segment files: preallocated, reused, each cut into slots for records of one size.

    segments/00000007-00741376.seg     segment 7, slots of 741,376 bytes, as many as the file is long

Preallocated and reused, since first writes into new file space are two to three times slower than overwrites. A
segment that holds nothing is unlinked when a record of another size needs its room; where there is none, the blocks of
one are moved to free slots of their size, once those would hold them all (`tiers/emptying.py`). So of each size no more
than about one segment stays unused.
A slot that is freed may still be under a reader's system call; it becomes free for writing only after every read
that began before has ended (epoch-based reclamation, Fraser 2004, with one ticket per read batch).

Covers: files, and which slot is taken. Does not cover: which block a slot holds (`tiers/index.py`), how much room
there is altogether (`tiers/ssd.py`), the bytes (`tiers/pieces.py`).
"""

import contextlib
import errno
import os
import re
import stat
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from tiers.direct import RecordFile
from tiers.environment import sync_folder
from tiers.index import Place
from tiers.pages import PAGE_BYTES
from tiers.segment import Segment, SlotMap, sparsest_movable

_NAME = re.compile(r"(\d{8,})-(\d{8,})\.seg")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A new segment has at least this share of the usual size: crumbs would use up file descriptors.
_MIN_SHARE = 16


class Segments:
    """All segment files of one folder.

    Thread-safe; files are made and removed outside of the lock that readers need.
    """

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int,
        room: Callable[[int], int],
        reserve: Callable[[int], bool] = lambda num_slots: True,
        empty: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Open what is there. `room(record_bytes)` says how many bytes of slots of that size may be added now;
        `reserve(num_slots)` makes sure, before any are, that so many slots can be kept track of. `empty(number)`
        moves the blocks of a segment to others, as far as it can.

        Slots are free until `occupy` says otherwise. Files that are no segments are left alone.
        """
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._room = room
        self._reserve = reserve
        self._empty = empty
        self._lock = threading.Lock()
        self._growth_lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self._next_number = 1
        self._next_ticket = 1
        self._tickets: dict[int, None] = {}
        # Freed slots and the first ticket that could not have seen them in use, oldest first.
        self._limbo: deque[tuple[int, Place]] = deque()
        # Slots whose block is still being written, and those that stay unused because the disk may be bad there.
        self._unsettled: set[Place] = set()
        self._withheld: set[Place] = set()
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------ at start

    def layout(self) -> list[tuple[int, int, int]]:
        """Return number, record size and number of slots of each segment, by number."""
        with self._lock:
            found = [(one.number, one.record_bytes, len(one.taken)) for one in self._segments.values()]
        return sorted(found)

    def occupy(self, number: int, taken: bytes) -> None:
        """Say which slots of a segment are taken: a byte for each, 0 where it is free."""
        segment = self._segments[number]
        assert len(taken) == len(segment.taken)
        segment.taken[:] = taken
        segment.num_taken = len(taken) - taken.count(0)

    def sparsest(self, excess_bytes: int) -> list[int]:
        """Return the numbers of segments whose removal gives back at least `excess_bytes`, those that hold the least
        for their size first."""
        chosen, given_back = [], 0
        for segment in sorted(self._segments.values(), key=lambda s: s.num_taken / max(1, len(s.taken))):
            if given_back >= excess_bytes:
                break
            chosen.append(segment.number)
            given_back += segment.size_bytes
        return chosen

    # ------------------------------------------------------------ slots

    @property
    def size_bytes(self) -> int:
        """What all files take up, empty slots included."""
        with self._lock:
            return sum(segment.size_bytes for segment in self._segments.values())

    @property
    def num_slots(self) -> int:
        with self._lock:
            return sum(len(segment.taken) for segment in self._segments.values())

    def capacity_bytes(self, record_bytes: int) -> int:
        """Return what all slots hold, and those of that size that may be added now."""
        wanted = max(1, self._segment_bytes // record_bytes)
        whole, rest = divmod(self._room(record_bytes) // record_bytes, wanted)
        addable = whole * wanted + (rest if rest >= max(1, wanted // _MIN_SHARE) else 0)
        with self._lock:
            slots_bytes = sum(segment.record_bytes * len(segment.taken) for segment in self._segments.values())
        return slots_bytes + addable * record_bytes

    def take_free(self, record_bytes: int, count: int) -> list[Place]:
        """Take up to `count` slots of those there are."""
        places: list[Place] = []
        with self._lock:
            for segment in self._segments.values():
                if len(places) == count:
                    break
                if segment.record_bytes == record_bytes:
                    places += segment.take(count - len(places))
            self._unsettled.update(places)
        return places

    def take(self, record_bytes: int, count: int) -> list[Place]:
        """Take up to `count` slots, making or replacing segments where that is allowed; fewer mean: no room for more.

        Raises OSError where the disk fails.
        """
        places = self.take_free(record_bytes, count)
        try:
            while len(places) < count:
                with self._growth_lock:
                    # Somebody else may have made room while this thread waited.
                    places += self.take_free(record_bytes, count - len(places))
                    if len(places) == count or not self._add_segment(record_bytes):
                        break
                    places += self.take_free(record_bytes, count - len(places))
        except OSError:
            self.give_back(places)
            raise
        return places

    def give_back(self, places: Sequence[Place]) -> None:
        """Free slots that no reader can know of."""
        with self._lock:
            self._unsettled.difference_update(places)
            for place in places:
                self._release(place)

    def settle(self, places: Sequence[Place]) -> None:
        """Take note that the index names these slots now."""
        with self._lock:
            self._unsettled.difference_update(places)

    def withhold(self, places: Sequence[Place]) -> None:
        """Keep slots of blocks that were deleted from being used again before the next start."""
        with self._lock:
            self._withheld.update(places)

    def settled_slots(self) -> SlotMap:
        """Return the slots that are taken and should be named by the index."""
        with self._lock:
            taken = SlotMap({segment.number: bytearray(segment.taken) for segment in self._segments.values()})
            for place in (*self._unsettled, *self._withheld, *(place for _, place in self._limbo)):
                taken.clear(place)
        return taken

    def file_names(self) -> set[str]:
        """Return the names of the files that are in use."""
        with self._lock:
            return {segment.path.name for segment in self._segments.values()}

    def displaced(self, numbers: Collection[int] | None = None) -> Path | None:
        """Return a segment's path that no longer leads to the file we have open, among `numbers` or all; None where all
        do."""
        with self._lock:
            for number in self._segments if numbers is None else numbers:
                if not self._segments[number].is_in_place:
                    return self._segments[number].path
        return None

    def retire(self, places: Sequence[Place]) -> None:
        """Free slots of blocks that were deleted, durably, once no read that began before is left."""
        with self._lock:
            self._limbo.extend((self._next_ticket, place) for place in places)
            self._drain()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Keep every slot that is in use now from being reused. Enter before looking up places, leave after the bytes
        were copied."""
        with self._lock:
            ticket = self._next_ticket
            self._next_ticket += 1
            self._tickets[ticket] = None
        try:
            yield
        finally:
            with self._lock:
                del self._tickets[ticket]
                self._drain()

    def file(self, number: int) -> RecordFile:
        """Return the file of a segment that holds a slot the caller has taken or, inside `reading`, has looked up."""
        with self._lock:
            return self._segments[number].file

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
        """Keep segments from being added meanwhile: what is asked of `room` stays so."""
        with self._growth_lock:
            yield

    def discard(self, numbers: Collection[int]) -> None:
        """Remove segments with all they hold, at the start, while nobody reads. Raises OSError."""
        for number in numbers:
            self._unlink(self._segments.pop(number))

    def unlink_empty(self) -> int:
        """Remove all segments that hold nothing; return how many bytes that gave back. Raises OSError."""
        given_back = 0
        while (segment := self._pop_empty(0)) is not None:
            given_back += segment.size_bytes
            self._unlink(segment)
        return given_back

    def give_way(self) -> bool:
        """Remove a segment that holds nothing, or whose blocks have room elsewhere; return whether there was one.
        Raises OSError."""
        with self._growth_lock:
            return self._give_way(0)

    def close(self) -> None:
        """Idempotent. No read or write may be running."""
        with self._lock:
            for segment in self._segments.values():
                segment.file.close()
            self._segments.clear()
            self._limbo.clear()

    def check_integrity(self, places: Collection[Place]) -> None:
        """Assert that slots, counts and files agree, and that all of `places` are taken."""
        with self._lock:
            for segment in self._segments.values():
                assert segment.num_taken == sum(segment.taken)
                assert segment.path.stat().st_size >= segment.size_bytes
            for place in [*places, *(place for _, place in self._limbo)]:
                assert self._segments[place.segment].taken[place.slot]
            assert not self._limbo or self._tickets

    # ------------------------------------------------------------ helpers

    def _load(self) -> None:
        for path in sorted(self._folder.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match is None:
                continue
            number, record_bytes = int(match[1]), int(match[2])
            self._next_number = max(self._next_number, number + 1)
            status = path.lstat()
            if (
                not stat.S_ISREG(status.st_mode)
                or not record_bytes
                or record_bytes % PAGE_BYTES
                or number in self._segments
            ):
                continue
            try:
                file = RecordFile(path, record_bytes)
            except OSError:
                # As if it were missing: what the index says of it is dropped.
                continue
            taken = bytearray(status.st_size // record_bytes)
            self._segments[number] = Segment(number, record_bytes, path, file, status.st_size, taken)

    def _add_segment(self, record_bytes: int) -> bool:
        """Make one more segment for that size, at the cost of empty ones of other sizes; return False where no room
        can be made. Holds the growth lock."""
        while (num_slots := self._num_addable(record_bytes)) == 0:
            if not self._give_way(record_bytes):
                return False
        if not self._reserve(self.num_slots + num_slots):
            return False
        number, size_bytes = self._next_number, num_slots * record_bytes
        self._next_number += 1
        path = self._folder / f"{number:08}-{record_bytes:08}.seg"
        file = RecordFile(path, record_bytes, create=True)
        try:
            file.allocate(size_bytes)
            # The name and the room must be there before the index may speak of them.
            os.fsync(file.descriptor)
            sync_folder(self._folder)
        except OSError as error:
            file.close()
            path.unlink(missing_ok=True)
            if error.errno in _NO_ROOM:
                return False
            raise
        with self._lock:
            self._segments[number] = Segment(number, record_bytes, path, file, size_bytes, bytearray(num_slots))
        return True

    def _num_addable(self, record_bytes: int) -> int:
        wanted = max(1, self._segment_bytes // record_bytes)
        allowed = self._room(record_bytes) // record_bytes
        return 0 if allowed < max(1, wanted // _MIN_SHARE) else min(wanted, allowed)

    def _give_way(self, record_bytes: int) -> bool:
        """Remove a segment of another size. Holds the growth lock."""
        empty = self._pop_empty(record_bytes)
        if empty is None:
            with self._lock:
                doomed = sparsest_movable(self._segments.values(), record_bytes)
                if doomed is None:
                    return False
                doomed.is_emptying = True
            try:
                self._empty(doomed.number)
            finally:
                with self._lock:
                    # One that waits only for reads to end is taken the next time.
                    waiting = sum(place.segment == doomed.number for _, place in self._limbo)
                    doomed.is_emptying = doomed.num_taken == waiting
            empty = self._pop_empty(record_bytes)
            if empty is None:
                return False
        self._unlink(empty)
        return True

    def _pop_empty(self, unlike_bytes: int) -> Segment | None:
        with self._lock:
            for segment in self._segments.values():
                # Slots in limbo count as taken, so nobody reads from this file.
                if segment.num_taken == 0 and segment.record_bytes != unlike_bytes:
                    return self._segments.pop(segment.number)
        return None

    def _unlink(self, segment: Segment) -> None:
        segment.file.close()
        segment.path.unlink(missing_ok=True)

    def _drain(self) -> None:
        oldest = next(iter(self._tickets), None)
        while self._limbo and (oldest is None or oldest >= self._limbo[0][0]):
            self._release(self._limbo.popleft()[1])

    def _release(self, place: Place) -> None:
        segment = self._segments[place.segment]
        segment.taken[place.slot] = 0
        segment.num_taken -= 1
