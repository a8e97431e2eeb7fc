"""Which blocks the session records in a bucket name: what any daemon's session uses, not only ours.

Covers: a picture of all session records there, brought up to date by listing them and reading those that have changed.
In memory a session is a few numbers and eight bytes per block, a block's key being as good as random: that two
share those eight bytes would only keep a block that could go.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore import session_record as records
from kvstore.core.errors import WrongKey
from kvstore.core.key import KEY_BYTES
from kvstore.session_record import RECORD_PREFIX, SessionKey, SessionRecord
from tiers.base import RecordStore
from tiers.inventory import Inventory

Marks = npt.NDArray[np.uint64]
"""The first eight bytes of keys, as numbers."""

# More than this share of records that cannot be read: then it is we who lack something, such as the right key.
_MOST_UNREADABLE = 0.1


@dataclass(frozen=True, slots=True)
class SessionInBucket:
    """`marks` are those of the session's blocks, in order."""

    name: str
    etag: str
    key: SessionKey
    created_s: float
    revision: int
    last_turn_s: float
    ttl_s: float
    pinned: bool
    marks: Marks

    def is_expired(self, written_s: float, now_s: float) -> bool:
        """`written_s` is when its record was put, by the server's clock, like `now_s`: a daemon's own may be wrong by
        more than the `ttl`."""
        return not self.pinned and written_s + self.ttl_s <= now_s


class BucketIndex:
    """Used by one thread. `go_on` is called before each request and may raise, which leaves the picture as it was."""

    def __init__(self, records: RecordStore, inventory: Inventory, go_on: Callable[[], None]) -> None:
        self._records = records
        self._inventory = inventory
        self._go_on = go_on
        self._sessions: dict[str, SessionInBucket] = {}
        self._unreadable: dict[str, str] = {}
        self._written_s: dict[str, float] = {}

    @property
    def sessions(self) -> list[SessionInBucket]:
        return list(self._sessions.values())

    @property
    def is_complete(self) -> bool:
        """Whether so many records could be read that a block which none of them names is nobody's."""
        return len(self._unreadable) <= _MOST_UNREADABLE * (len(self._sessions) + len(self._unreadable))

    def written_s(self, name: str) -> float:
        """Return when the record was put, as far as known."""
        return self._written_s.get(name, math.inf)

    def get(self, key: SessionKey) -> SessionInBucket | None:
        return self._sessions.get(records.record_name(key))

    def refresh(self) -> None:
        """Take in what has changed since the last time. Raises TierUnavailable."""
        found: dict[str, str] = {}
        written_s: dict[str, float] = {}
        following: str | None = None
        while True:
            self._go_on()
            page = self._inventory.records(RECORD_PREFIX, following)
            found.update((listed.name, listed.etag) for listed in page.records)
            written_s.update((listed.name, listed.modified_s) for listed in page.records)
            following = page.following
            if following is None:
                break
        self._written_s = written_s
        for name, etag in found.items():
            known = self._sessions.get(name)
            if (known is None or known.etag != etag) and self._unreadable.get(name) != etag:
                self._read(name, etag)
        for gone in self._sessions.keys() - found.keys():
            del self._sessions[gone]
        for gone in self._unreadable.keys() - found.keys():
            del self._unreadable[gone]

    def read(self, name: str) -> tuple[SessionRecord, str] | None:
        """Return the record and its tag, as it is there now; None where it cannot be read."""
        self._go_on()
        try:
            found = self._records.get(name)
        except WrongKey:
            return None
        record = None if found is None else records.decode(found.data)
        if found is None or record is None or records.record_name(record.session_key) != name:
            return None
        return record, found.etag

    def forget(self, name: str) -> None:
        """The record has been deleted."""
        self._sessions.pop(name, None)

    def marks(self) -> tuple[Marks, npt.NDArray[np.int64]]:
        """Return the marks of all blocks that are named, in order and each once, and how many sessions name each."""
        everything = [session.marks for session in self._sessions.values()]
        if not everything:
            return np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64)
        marks, counts = np.unique(np.concatenate(everything), return_counts=True)
        return marks, counts.astype(np.int64)

    def _read(self, name: str, etag: str) -> None:
        read = self.read(name)
        self._sessions.pop(name, None)
        self._unreadable.pop(name, None)
        if read is None:
            self._unreadable[name] = etag
            return
        record, etag = read
        self._sessions[name] = SessionInBucket(
            name=name,
            etag=etag,
            key=record.session_key,
            created_s=record.created_s,
            revision=record.revision,
            last_turn_s=record.last_turn_s,
            ttl_s=record.ttl_s,
            pinned=record.pinned,
            marks=marks_of(record.keys),
        )


def marks_of(keys: bytes) -> Marks:
    """Return the marks of joined keys."""
    columns = np.frombuffer(keys, dtype=">u8").reshape(-1, KEY_BYTES // 8)
    return columns[:, 0].astype(np.uint64)


def is_among(marks: Marks, ordered: Marks) -> npt.NDArray[np.bool_]:
    """Return which of `marks` are in `ordered`, which is sorted."""
    if not len(ordered):
        return np.zeros(len(marks), dtype=np.bool_)
    places = np.minimum(np.searchsorted(ordered, marks), len(ordered) - 1)
    return np.equal(ordered[places], marks)
