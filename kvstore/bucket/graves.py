"""The tombstones in a bucket: reads them for this daemon, and, under the lease, deletes what they cover.

    poll (everybody)     list the tombstones, read the new ones
    bury (lease)         delete records that a tombstone covers; of the blocks that it names delete, from the end of the
                         prefix to its head, those that no session record in the bucket names; note that this is done

All of it may be cut off anywhere and done again by anybody: the tombstone names its blocks until they are gone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from kvstore.bucket import tombstone
from kvstore.bucket.index import BucketIndex, is_among, marks_of
from kvstore.bucket.tombstone import TOMBSTONE_PREFIX, Tombstone, tombstone_name
from kvstore.core.counts import Counts
from kvstore.core.errors import WrongKey
from kvstore.core.key import BlockKey, split_keys
from tiers.base import RecordStore
from tiers.inventory import Inventory, ListedRecord
from tiers.objects import DELETE_AT_ONCE

# Seconds of requests; `second_look.py` relies on records being known that are older than some of these.
_REFRESH_AFTER: Final = 32


@dataclass(frozen=True, slots=True)
class _Grave:
    """`stone` is without keys; `is_open`: it may still have some in the bucket; `written_s` is the server's clock."""

    etag: str
    stone: Tombstone
    is_open: bool
    written_s: float = math.inf


class Graves:
    """Used by one thread. `pace` is called before each request of a poll, `go_on` before each under the lease; both may
    raise."""

    def __init__(
        self,
        records: RecordStore,
        inventory: Inventory,
        index: BucketIndex,
        deleted: Counts,
        pace: Callable[[], None],
        go_on: Callable[[], None],
    ) -> None:
        self._records = records
        self._inventory = inventory
        self._index = index
        self._deleted = deleted
        self._pace = pace
        self._go_on = go_on
        self._graves: dict[str, _Grave] = {}
        self._told: dict[str, int] = {}
        # What no key of ours opens, or is damaged: not to be read at every poll.
        self._unreadable: dict[str, str] = {}

    @property
    def has_open(self) -> bool:
        return any(grave.is_open for grave in self._graves.values())

    def poll(self) -> list[bytes]:
        """Return the tombstones that have come or cover more since the last time, ours too. Raises TierUnavailable."""
        found: dict[str, ListedRecord] = {}
        following: str | None = None
        while True:
            self._pace()
            page = self._inventory.records(TOMBSTONE_PREFIX, following)
            found.update((listed.name, listed) for listed in page.records)
            following = page.following
            if following is None:
                break
        for gone in self._graves.keys() - found.keys():
            del self._graves[gone]
        self._unreadable = {name: etag for name, etag in self._unreadable.items() if name in found}
        self._told = {name: revision for name, revision in self._told.items() if name in found}
        new = []
        for name, listed in found.items():
            known = self._graves.get(name)
            if (known is None or known.etag != listed.etag) and self._unreadable.get(name) != listed.etag:
                self._pace()
                self._read(listed)
            if name in self._graves:
                self._graves[name] = replace(self._graves[name], written_s=listed.modified_s)
            stone = self._graves[name].stone if name in self._graves else None
            if stone is not None and stone.revision > self._told.get(name, -1):
                self._told[name] = stone.revision
                new.append(tombstone.encode(stone))
        return new

    def put(self, stone: Tombstone) -> None:
        """Write a tombstone of our own."""
        self._go_on()
        whole, etag = tombstone.put(self._records, stone)
        self._graves[stone.name] = _Grave(etag, _without_keys(whole), True)

    def bury(self, now_s: float) -> None:
        """Do what the tombstones say, and take away those whose time is over. Raises TierUnavailable."""
        self._index.refresh()
        for session in self._index.sessions:
            grave = self._graves.get(tombstone_name(session.key, session.created_s))
            if grave is not None and grave.stone.covers(session.key, session.created_s, session.revision):
                self._go_on()
                self._records.delete(session.name)
                self._index.forget(session.name)
                self._deleted.add("deleted_sessions")
        for number, (name, grave) in enumerate(list(self._graves.items()), 1):
            if number % _REFRESH_AFTER == 0 and grave.is_open:
                self._index.refresh()  # records have come meanwhile
            if grave.is_open and self._index.is_complete:
                self._bury(name)
            elif not grave.is_open and grave.written_s + grave.stone.keep_s <= now_s:
                # By the server's clock: that of who deleted the session may be wrong by years.
                self._go_on()
                self._records.delete(name)
                del self._graves[name]

    # ------------------------------------------------------------ private

    def _read(self, listed: ListedRecord) -> None:
        try:
            found = self._records.get(listed.name)
        except WrongKey:
            found = None
        stone = None if found is None else tombstone.decode(found.data)
        if found is not None and stone is not None and stone.name == listed.name:
            self._graves[listed.name] = _Grave(found.etag, _without_keys(stone), bool(stone.keys))
        else:
            self._unreadable[listed.name] = listed.etag

    def _bury(self, name: str) -> None:
        self._go_on()
        found = self._records.get(name)
        stone = None if found is None else tombstone.decode(found.data)
        if found is None or stone is None:
            return
        marks, _ = self._index.marks()
        is_used = is_among(marks_of(stone.keys), marks)
        loose = [key for key, used in zip(split_keys(stone.keys), is_used, strict=True) if not used]
        if delete_in_order(self._inventory, loose[::-1], self._go_on, self._deleted, "deleted_blocks"):
            return  # some were refused: another time
        emptied = _without_keys(stone)
        self._go_on()
        etag = self._records.put(name, tombstone.encode(emptied), if_match=found.etag)
        if etag is not None:
            self._graves[name] = _Grave(etag, emptied, False)


def delete_in_order(
    inventory: Inventory, keys: list[BlockKey], go_on: Callable[[], None], deleted: Counts, why: str
) -> int:
    """Delete the blocks, one request's worth after the other, so that what comes first is gone first; return how many
    were refused."""
    refused = 0
    for start in range(0, len(keys), DELETE_AT_ONCE):
        go_on()
        batch = keys[start : start + DELETE_AT_ONCE]
        kept = inventory.delete_blocks(batch)
        deleted.add(why, len(batch) - kept)
        refused += kept
    return refused


def _without_keys(stone: Tombstone) -> Tombstone:
    return msgspec.structs.replace(stone, keys=b"")
