"""The SSD tier's index: which block lies in which slot of which segment. What it does not name does not exist.

    key (32 bytes) -> segment, slot, depth, payload length, payload checksum, namespace digest, parent key

Covers: one LMDB environment, its transactions and its growth. Does not cover: the payloads, and whether there is room
on the disk for a larger map (`tiers/ssd.py` decides).
"""

import errno
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import ge
from pathlib import Path
from typing import Any, Final

import lmdb
import numpy as np

from kvstore.core.block import BlockMeta
from kvstore.core.errors import KVStoreError, TierUnavailable
from kvstore.core.key import KEY_BYTES, BlockKey, split_keys
from tiers.columns import ENTRY, Columns
from tiers.environment import DAMAGE, DamagedEnvironment, open_environment, sync_folder

# An entry takes 134 bytes of a leaf page, pages of random keys are about two thirds full, and LMDB writes changed
# pages to new places, keeping the old ones until the transaction after the next: twice the filled room is plenty.
BYTES_PER_ENTRY: Final = 512
# segment, slot, depth, payload_bytes, checksum, namespace, parent; `tiers/columns.py` reads many at once
_ENTRY = struct.Struct("<IIIQQ32s32s")
# No block has this name, since keys are longer.
_FORMAT_NAME, _FORMAT = b"\0format", b"kvstore-index-1"
_SCAN_ENTRIES = 8192


class IndexFull(KVStoreError):
    """The map, or the disk, has no page left for this transaction; nothing was changed."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A slot of a segment."""

    segment: int
    slot: int


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A block, its place, and the checksum its payload must have."""

    meta: BlockMeta
    place: Place
    checksum: int


class BlockIndex:
    """Thread-safe. Every change is one transaction that is durable on return; commits stand in line, as LMDB's own do.

    All calls but `close` raise TierUnavailable where the disk fails, and DamagedEnvironment, which is one, where a page
    is not what it must be.
    """

    def __init__(self, path: Path, map_bytes: int) -> None:
        """Open or create the index. Raises DamagedEnvironment where the file is not an index of this format."""
        self._path = path
        # The map may be resized only with no transaction open in this process, so readers hold a lock for the few
        # microseconds of theirs. Taken after `_commit_lock`, never before.
        self._commit_lock = threading.Lock()
        self._gate = threading.Lock()
        self._environment: Any = open_environment(path, map_bytes)
        self.map_bytes = int(self._environment.info()["map_size"])
        """The size the file can grow to."""
        try:
            if path.stat().st_size > self.map_bytes:
                os.truncate(path, self.map_bytes)
            self.reserve()
            self._check_format()
        except BaseException:
            self._environment.close()
            raise

    def get(self, keys: Sequence[BlockKey]) -> list[IndexEntry | None]:
        """Return the entry of each key."""
        with self._gate, _faults_as_unavailable, self._environment.begin() as transaction:
            values = [transaction.get(key) for key in keys]
        return [_decode(key, value) for key, value in zip(keys, values, strict=True)]

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._gate, _faults_as_unavailable, self._environment.begin(buffers=True) as transaction:
            return [transaction.get(key) is not None for key in keys]

    def insert(self, entries: Sequence[IndexEntry]) -> list[bool]:
        """Add the entries; False where the key was there, which is left as it is. Raises IndexFull."""
        with self._commit_lock, _faults_as_unavailable, self._environment.begin(write=True) as transaction:
            return [
                bool(transaction.put(entry.meta.key, _encode(entry), overwrite=False, dupdata=False))
                for entry in entries
            ]

    def remove(self, keys: Sequence[BlockKey], places: Sequence[Place] | None = None) -> list[IndexEntry | None]:
        """Delete the keys, those with `places[i]` only if they still lie there; return what was deleted.

        Raises IndexFull: a deletion, too, writes pages.
        """
        removed: list[IndexEntry | None] = []
        with self._commit_lock, _faults_as_unavailable, self._environment.begin(write=True) as transaction:
            for index, key in enumerate(keys):
                entry = _decode(key, transaction.get(key))
                if entry is not None and (places is None or places[index] == entry.place):
                    transaction.delete(key)
                    removed.append(entry)
                else:
                    removed.append(None)
        return removed

    def move(self, entries: Sequence[IndexEntry], places: Sequence[Place]) -> list[bool]:
        """Let each block that still lies where its entry says lie at `places[i]` from now on; False for the others.
        Raises IndexFull, and then nothing was changed."""
        moved = []
        with self._commit_lock, _faults_as_unavailable, self._environment.begin(write=True) as transaction:
            for entry, place in zip(entries, places, strict=True):
                is_there = _decode(entry.meta.key, transaction.get(entry.meta.key)) == entry
                moved.append(is_there)
                if is_there:
                    transaction.put(entry.meta.key, _encode(replace(entry, place=place)))
        return moved

    def columns(self) -> Iterator[Columns]:
        """Yield every entry, some thousands at a time; those that come or go meanwhile may or may not be among them.

        Every leaf page is looked at, so a walk to the end finds what is damaged there.
        """
        # In short transactions: an open reader keeps every page that is freed meanwhile from being used again.
        after = b""
        while True:
            with self._gate, _faults_as_unavailable, self._environment.begin() as transaction:
                cursor = transaction.cursor()
                found = cursor.set_range(after) if after else cursor.first()
                batch = list(islice(cursor.iternext(), _SCAN_ENTRIES)) if found else []
            if not batch:
                return
            # A walk over keys that are out of order might never end, and no search finds them.
            names = [key for key, _ in batch]
            if names[0] < after or any(map(ge, names, islice(names, 1, None))):
                raise DamagedEnvironment("the SSD index is damaged: its keys are out of order")
            # The smallest key behind the last one.
            after = names[-1] + b"\0"
            whole = [(key, value) for key, value in batch if len(key) == KEY_BYTES and len(value) == _ENTRY.size]
            if len(whole) + (_FORMAT_NAME in names) < len(batch):
                raise DamagedEnvironment("the SSD index is damaged: it has entries of other lengths")
            keys = b"".join([key for key, _ in whole])
            entries = np.frombuffer(b"".join([value for _, value in whole]), dtype=ENTRY)
            if whole:
                yield Columns(keys, entries)

    def places(self) -> Iterator[tuple[BlockKey, Place, int]]:
        """Yield key, place and payload length of every entry."""
        for columns in self.columns():
            fields = (columns.entries[name].tolist() for name in ("segment", "slot", "payload_bytes"))
            for key, segment, slot, payload_bytes in zip(split_keys(columns.keys), *fields, strict=True):
                yield key, Place(segment, slot), payload_bytes

    def reserve(self) -> bool:
        """Take the disk's room for the whole map, so that no transaction ever fails for lack of it: on a full disk a
        deletion, too, needs pages. Return whether it is there."""
        with self._commit_lock:
            return self._reserve(self.map_bytes)

    def grow(self, map_bytes: int) -> None:
        """Let the file grow up to `map_bytes`. Raises IndexFull where the disk has no room for that."""
        with self._commit_lock, _faults_as_unavailable:
            if map_bytes <= self.map_bytes:
                return
            if not self._reserve(map_bytes):
                raise IndexFull("the disk has no room for a larger index")
            with self._gate:
                self._environment.set_mapsize(map_bytes)
                self.map_bytes = int(self._environment.info()["map_size"])

    def close(self) -> None:
        """Idempotent. No call may be running."""
        self._environment.close()

    # ------------------------------------------------------------ helpers

    def _reserve(self, map_bytes: int) -> bool:
        # Holds the commit lock: where the file system cannot allocate, the C library writes what it reads.
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, map_bytes)
            os.fsync(descriptor)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                return False
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        finally:
            os.close(descriptor)
        return True

    def _check_format(self) -> None:
        with _faults_as_unavailable:
            with self._environment.begin() as transaction:
                found = transaction.get(_FORMAT_NAME)
                is_new = transaction.stat()["entries"] == 0
            if is_new:
                with self._environment.begin(write=True) as transaction:
                    transaction.put(_FORMAT_NAME, _FORMAT)
            elif found != _FORMAT:
                raise DamagedEnvironment(f"{self._path.name} is not a block index of this version")


def compact_index(path: Path) -> None:
    """Rewrite a closed index without its unused pages, since LMDB's file never shrinks by itself.

    Crash-safe: the old file stays until the new one is complete. Raises DamagedEnvironment, TierUnavailable.
    """
    fresh = _compacted_path(path)
    fresh.unlink(missing_ok=True)
    environment: Any = open_environment(path, path.stat().st_size)
    try:
        with _faults_as_unavailable:
            environment.copy(str(fresh), compact=True)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    finally:
        environment.close()
    with open(fresh, "rb") as file:
        os.fchmod(file.fileno(), 0o600)
        os.fsync(file.fileno())
    os.replace(fresh, path)
    sync_folder(path.parent)


def remove_leftovers(path: Path) -> None:
    """Delete what a process that was killed while it compacted has left: it counts against the cap."""
    _compacted_path(path).unlink(missing_ok=True)


def _compacted_path(path: Path) -> Path:
    return path.with_name(path.name + ".compact")


class _FaultsAsUnavailable:
    """Turns LMDB's exceptions into ours. A class, since a generator would take as long as a small transaction."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, lmdb.MapFullError | lmdb.TxnFullError | lmdb.DiskError):
            raise IndexFull(str(error)) from error
        if isinstance(error, DAMAGE):
            raise DamagedEnvironment(f"the SSD index is damaged: {error}") from error
        if isinstance(error, lmdb.Error):
            raise TierUnavailable(f"the SSD index failed: {error}") from error


_faults_as_unavailable: Final = _FaultsAsUnavailable()


def _encode(entry: IndexEntry) -> bytes:
    meta, place = entry.meta, entry.place
    return _ENTRY.pack(
        place.segment, place.slot, meta.depth, meta.payload_bytes, entry.checksum, meta.namespace, meta.parent
    )


def _decode(key: BlockKey, value: bytes | None) -> IndexEntry | None:
    if value is None or len(value) != _ENTRY.size:
        return None
    segment, slot, depth, payload_bytes, checksum, namespace, parent = _ENTRY.unpack(value)
    meta = BlockMeta(key, BlockKey(parent), namespace, depth, payload_bytes)
    return IndexEntry(meta, Place(segment, slot), checksum)


assert _ENTRY.size == ENTRY.itemsize
