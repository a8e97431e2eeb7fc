"""Which sessions were deleted, here or at another daemon, as far as this one has been told."""

from collections import OrderedDict

from kvstore.bucket.tombstone import Tombstone, tombstone_name
from kvstore.session_record import SessionKey, SessionRecord

_MAX_KNOWN = 65_536


class Burials:
    """Owned by the control thread. Past a number of them those known longest are forgotten: a session that comes back
    because of that is dropped again when the lease's holder has deleted its record."""

    def __init__(self) -> None:
        self._revisions: OrderedDict[str, int] = OrderedDict()

    def remember(self, tombstone: Tombstone) -> bool:
        """Return whether that is new."""
        name = tombstone.name
        before = self._revisions.get(name, -1)
        self._revisions[name] = max(before, tombstone.revision)
        if len(self._revisions) > _MAX_KNOWN:
            self._revisions.popitem(last=False)
        return before < tombstone.revision

    def covers(self, record: SessionRecord) -> bool:
        """Whether the record is of a session that was deleted."""
        return (record.bucket_revision or record.revision) <= self.up_to(record.session_key, record.created_s)

    def up_to(self, key: SessionKey, created_s: float) -> int:
        """Return the last revision of the session that was deleted, -1 where none was."""
        return self._revisions.get(tombstone_name(key, created_s), -1) if self._revisions else -1
