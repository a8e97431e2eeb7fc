"""Keeps a bucket from growing without end: expiry, blocks that nobody names, and a limit for all of it.

One sweep, under the lease:

    1  sessions whose time is over get a tombstone                      (graves.py does the rest)
    2  every block is listed once; one that no session record names and that is older than it may be is deleted
    3  uploads in parts that somebody began and never ended are aborted
    4  where what is left is above the limit: blocks of no session, oldest first; then, of the session that was used
       longest ago, those blocks that it shares with no other, from the end to the head; then of the next one, pinned
       sessions last. Its record stays, so the chat goes on, and says how many blocks are left

"Older than it may be" is `orphan_grace` where only sessions write to the bucket, since a session's blocks come before
its record; and `sessions.ttl` where all blocks are written (`s3.write = "all"`), since nobody names those. They are
deleted as the listing gives them, which knows no parents: what is left of such a chain is found up to the gap, and the
rest grows old as well. A block that is stored again is uploaded again.

Ages are by the server's clock. Memory is some columns of numbers, 24 bytes for each block in the bucket.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore import session_record as records
from kvstore.bucket.graves import Graves, delete_in_order
from kvstore.bucket.index import BucketIndex, Marks, SessionInBucket, is_among, marks_of
from kvstore.bucket.tombstone import make_tombstone
from kvstore.core.counts import Counts
from kvstore.core.errors import TierUnavailable
from kvstore.core.key import KEY_BYTES, BlockKey, split_keys
from tiers.base import RecordStore
from tiers.inventory import Inventory

# Down to this share of the limit, so that not every sweep finds it passed again.
_LOW: Final = 0.95
_ORPHANS_AT_ONCE: Final = 10_000
# Of no session, and candidates where there is too much; further ones wait for the next sweep.
_MAX_LOOSE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_bytes` 0: no limit. `write` is what this bucket is used for, `s3.write`."""

    max_bytes: int
    ttl_s: float
    orphan_grace_s: float
    write: Literal["sessions", "all"]

    @property
    def max_loose_age_s(self) -> float:
        return self.orphan_grace_s if self.write == "sessions" else max(self.ttl_s, self.orphan_grace_s)


@dataclass(slots=True)
class _Loose:
    """Blocks that no record names: joined keys and columns."""

    keys: bytearray
    num_bytes: list[npt.NDArray[np.int64]]
    modified_s: list[npt.NDArray[np.float64]]


class Sweep:
    """One sweep; `run` does it and leaves the totals in `num_blocks` and `num_bytes`. `go_on` is called before each
    request and may raise, as every call raises TierUnavailable: what was done by then is done."""

    def __init__(
        self,
        records: RecordStore,
        inventory: Inventory,
        index: BucketIndex,
        graves: Graves,
        limits: Limits,
        deleted: Counts,
        go_on: Callable[[], None],
    ) -> None:
        self._records = records
        self._inventory = inventory
        self._index = index
        self._graves = graves
        self._limits = limits
        self._deleted = deleted
        self._go_on = go_on
        self.num_blocks = 0
        self.num_bytes = 0

    def run(self, now_s: float) -> None:
        self._index.refresh()
        self._expire(now_s)
        self._graves.bury(now_s)
        marks, _ = self._index.marks()
        sizes = np.zeros(len(marks), dtype=np.int64)
        loose = self._walk(marks, sizes, now_s)
        self._abort_uploads(now_s)
        if self._limits.max_bytes and self.num_bytes > self._limits.max_bytes:
            self._shrink(marks, sizes, loose)

    def _expire(self, now_s: float) -> None:
        for session in self._index.sessions:
            if not session.is_expired(self._index.written_s(session.name), now_s):
                continue
            read = self._index.read(session.name)
            if read is None or read[1] != session.etag:
                continue  # it has gone on, or away
            record = read[0]
            self._graves.put(
                make_tombstone(session.key, record.created_s, record.revision, record.keys, record.ttl_s, now_s=now_s)
            )
            self._deleted.add("expired_sessions")

    # ------------------------------------------------------------ blocks that nobody names

    def _walk(self, marks: Marks, sizes: npt.NDArray[np.int64], now_s: float) -> _Loose:
        """List all blocks: fill `sizes` for those that are named, delete what is too old, return the others."""
        loose = _Loose(bytearray(), [], [])
        orphans: list[BlockKey] = []
        oldest_s = now_s - self._limits.max_loose_age_s
        following: str | None = None
        while True:
            self._go_on()
            page = self._inventory.blocks(following)
            of_page = marks_of(page.keys)
            named = is_among(of_page, marks)
            sizes[np.searchsorted(marks, of_page[named])] = page.num_bytes[named]
            self.num_blocks += len(of_page)
            self.num_bytes += int(page.num_bytes.sum())
            is_old = ~named & (page.modified_s < oldest_s)
            if self._index.is_complete and is_old.any():
                keys = split_keys(page.keys)
                orphans += [keys[index] for index in np.flatnonzero(is_old)]
                self.num_blocks -= int(is_old.sum())
                self.num_bytes -= int(page.num_bytes[is_old].sum())
            young = np.flatnonzero(~named & ~is_old)
            if self._limits.write == "all" and len(loose.keys) < _MAX_LOOSE * KEY_BYTES:
                for index in young:
                    loose.keys += page.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
                loose.num_bytes.append(page.num_bytes[young])
                loose.modified_s.append(page.modified_s[young])
            following = page.following
            if len(orphans) >= _ORPHANS_AT_ONCE or (following is None and orphans):
                self._delete_orphans(orphans)
                orphans = []
            if following is None:
                return loose

    def _delete_orphans(self, keys: list[BlockKey]) -> None:
        """A session may have come to name one since its records were read, and taken it for stored."""
        self._index.refresh()
        used = is_among(marks_of(b"".join(keys)), self._index.marks()[0])
        orphans = [key for key, is_used in zip(keys, used, strict=True) if not is_used]
        delete_in_order(self._inventory, orphans, self._go_on, self._deleted, "orphan_blocks")

    def _abort_uploads(self, now_s: float) -> None:
        self._go_on()
        # Credentials need not allow it, and the rest of a sweep matters more.
        with contextlib.suppress(TierUnavailable):
            aborted = self._inventory.abort_uploads(now_s - self._limits.orphan_grace_s)
            self._deleted.add("aborted_uploads", aborted)

    # ------------------------------------------------------------ too much

    def _shrink(self, listed: Marks, listed_sizes: npt.NDArray[np.int64], loose: _Loose) -> None:
        """`listed_sizes[i]`: the size of the block `listed[i]`."""
        target = int(self._limits.max_bytes * _LOW)
        # Sessions may have come while the blocks were listed, and share some.
        self._index.refresh()
        marks, counts = self._index.marks()
        is_known = is_among(marks, listed)
        sizes = np.zeros(len(marks), dtype=np.int64)
        sizes[is_known] = listed_sizes[np.searchsorted(listed, marks[is_known])]
        self._drop_loose(loose, marks, target)
        for session in sorted(self._index.sessions, key=lambda s: (s.pinned, s.last_turn_s)):
            if self.num_bytes <= target:
                return
            self._strip(session, marks, counts, sizes, target)

    def _drop_loose(self, loose: _Loose, marks: Marks, target: int) -> None:
        if not loose.keys or self.num_bytes <= target:
            return
        num_bytes = np.concatenate(loose.num_bytes)
        order = np.argsort(np.concatenate(loose.modified_s), kind="stable")
        order = order[~is_among(marks_of(bytes(loose.keys)), marks)[order]]
        enough = int(np.searchsorted(np.cumsum(num_bytes[order]), self.num_bytes - target)) + 1
        chosen = order[:enough]
        keys = [BlockKey(bytes(loose.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES])) for i in chosen]
        delete_in_order(self._inventory, keys, self._go_on, self._deleted, "size_blocks")
        self.num_blocks -= len(keys)
        self.num_bytes -= int(num_bytes[chosen].sum())

    def _strip(
        self,
        session: SessionInBucket,
        marks: Marks,
        counts: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        target: int,
    ) -> None:
        """Delete blocks that only this session names, from its end, as many as it takes."""
        # A record that came after the blocks were counted has some that we know nothing of.
        places = np.searchsorted(marks, session.marks)
        if not is_among(session.marks, marks).all():
            return
        mine = (counts[places] == 1) & (sizes[places] > 0)
        freed = np.cumsum(np.where(mine, sizes[places], 0)[::-1])
        too_much = self.num_bytes - target
        num_taken = min(int(np.searchsorted(freed, too_much)) + 1, len(places))
        first = len(places) - num_taken
        chosen = first + np.flatnonzero(mine[first:])
        gone = self._give_up(session, chosen) if len(chosen) else []
        if gone is None:
            return  # it is in use, with what it shares
        if num_taken == len(places):
            counts[places] -= 1  # what it shares is the others' alone now
        delete_in_order(self._inventory, gone, self._go_on, self._deleted, "size_blocks")
        self.num_blocks -= len(gone)
        self.num_bytes -= int(sizes[places[chosen]].sum())
        sizes[places[chosen]] = 0

    def _give_up(self, session: SessionInBucket, chosen: npt.NDArray[np.intp]) -> list[BlockKey] | None:
        """Have the record say that the bucket lacks these of its blocks (places in the prefix, ascending); return their
        keys, last first. None: the record has changed."""
        read = self._index.read(session.name)
        if read is None or read[1] != session.etag:
            return None
        record = read[0]
        fewer = msgspec.structs.replace(record, s3_blocks=min(record.s3_blocks, int(chosen[0])))
        self._go_on()
        if self._records.put(session.name, records.encode(fewer), if_match=session.etag) is None:
            return None
        keys = split_keys(record.keys)
        return [keys[index] for index in chosen[::-1]]
