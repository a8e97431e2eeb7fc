"""How much of the disk the SSD tier may take: a cap on what it takes up, and a floor under what it leaves free."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.core.errors import ConfigError
from tiers.index import BYTES_PER_ENTRY

MIB: Final = 1 << 20
_MIN_CAP_BYTES = MIB
# The lock files, and the blocks that folders take.
_SMALL_FILES_BYTES = 64 << 10
# A tier has at most about this many segments, each with a file descriptor, and at least so many that
# records of another size get some of them.
_MAX_SEGMENTS, _MIN_SEGMENTS = 512, 32


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The limits of one SSD folder; all its figures are bytes on the disk."""

    folder: Path
    max_bytes: int
    min_free_bytes: int
    max_record_bytes: int
    segment_bytes: int

    @classmethod
    def of(
        cls, folder: Path, *, max_bytes: int, min_free_bytes: int, max_record_bytes: int | None, segment_bytes: int
    ) -> "DiskSpace":
        """Work out what was left open. Raises ConfigError where the limits leave no room for blocks."""
        if max_record_bytes is None:
            max_record_bytes = min(max(max_bytes // 16, MIB // 4), 256 * MIB)
        segment_bytes = min(max(segment_bytes, max_bytes // _MAX_SEGMENTS), max_bytes // _MIN_SEGMENTS)
        space = cls(folder, max_bytes, min_free_bytes, max_record_bytes, segment_bytes)
        if max_bytes < _MIN_CAP_BYTES or space.total_bytes(0, 0) >= max_bytes:
            need = max(_MIN_CAP_BYTES, 2 * space.total_bytes(0, 0))
            raise ConfigError(f"the SSD tier's max_bytes is {max_bytes}; it takes at least {need}")
        return space

    def index_bytes(self, num_slots: int) -> int:
        """Return how large the index may become for so many slots."""
        base = min(max(self.max_bytes // 16, MIB // 8), 4 * MIB)
        return base + num_slots * BYTES_PER_ENTRY

    def total_bytes(self, segments_bytes: int, num_slots: int) -> int:
        """Return what everything may take up, with such segments."""
        return segments_bytes + self.index_bytes(num_slots) + self.max_record_bytes + _SMALL_FILES_BYTES

    def room_bytes(self, record_bytes: int, segments_bytes: int, num_slots: int, map_bytes: int) -> int:
        """Return how many bytes of further slots of that size are allowed now, a whole number of slots.

        `map_bytes` is what the index may take up already; each slot beyond what that is due for adds to it.
        """
        spare = max(0, map_bytes - self.index_bytes(num_slots))
        left = min(self.max_bytes - self.total_bytes(segments_bytes, num_slots) - spare, self.free_bytes())
        if left <= 0:
            return 0
        more_slots = left // record_bytes
        if more_slots * BYTES_PER_ENTRY > spare:
            more_slots = (left + spare) // (record_bytes + BYTES_PER_ENTRY)
        return more_slots * record_bytes

    def free_bytes(self) -> int:
        """Return what the file system has left above the floor; negative below it."""
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize - self.min_free_bytes

    def taken_bytes(self) -> int:
        """Return what the folder really takes up now, as `du` would say."""
        return sum(path.lstat().st_blocks * 512 for path in self.folder.rglob("*"))
