"""Session records in a bucket: one small object each, with compare-and-swap by If-Match and If-None-Match.

    {prefix}/records/{name, escaped}=r

An object is a number that is drawn anew for every write, and the record as `tiers/sealed.py` makes it. So two writes of
equal data have different tags (a tag is a digest of the content in S3), and a writer whose answer was lost knows its
own record again.
"""

import re
import secrets
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvstore.core.errors import CorruptBlock, TierUnavailable, WrongKey
from tiers.base import Record
from tiers.faults import FaultCounter
from tiers.inventory import ListedRecord, RecordPage
from tiers.names import check_name
from tiers.objects import ObjectStore, Page
from tiers.s3calls import Runner
from tiers.s3client import S3Settings
from tiers.scrub import Inspected, fault_of
from tiers.sealed import open_record, seal_record

if TYPE_CHECKING:
    from tiers.keys import KeyRing

_T = TypeVar("_T")
_DRAWN_BYTES = 12
# Far beyond any record: what is longer is somebody else's, and would only fill our memory.
_MAX_RECORD_BYTES = 256 << 20
# Ends every record's key. No escaped name ends like that, so that no record's key is a folder of another's: some
# servers keep objects in folders.
_SUFFIX = "=r"
_ESCAPED = re.compile(r"=([0-9A-F]{2})")
_PLAIN = re.compile(r"[^A-Za-z0-9._/-]")


class S3Records:
    """A RecordStore in a bucket. Thread-safe. `run` makes requests as `S3Calls.run` does."""

    def __init__(
        self,
        settings: S3Settings,
        objects: ObjectStore,
        run: Runner,
        faults: FaultCounter,
        keys: "KeyRing | None" = None,
    ) -> None:
        self._settings = settings
        self._objects = objects
        self._run = run
        self._faults = faults
        self._keys = keys

    def put(self, name: str, data: bytes, *, if_match: str | None = None, if_absent: bool = False) -> str | None:
        check_name(name)
        body = secrets.token_bytes(_DRAWN_BYTES) + seal_record(self._keys, name, data)
        return self._run(partial(self._put, self._key(name), body, if_absent, if_match))

    def get(self, name: str) -> Record | None:
        """As `RecordStore.get`; a record that is damaged is counted and None."""
        check_name(name)
        found = self._run(partial(self._get, self._key(name)))
        if found is None:
            return None
        body, etag = found
        try:
            return Record(open_record(self._keys, name, body[_DRAWN_BYTES:]), etag)
        except CorruptBlock:
            self._faults.count("record_corrupt", detail=name.rpartition("/")[0])
            return None
        except WrongKey as error:
            self._faults.count("wrong_key", detail=f"a session record: {error}")
            raise

    def names(self, prefix: str) -> Iterator[str]:
        """As `RecordStore.names`; lists all of them before it yields the first, since servers order keys in
        different ways."""
        names: list[str] = []
        token: str | None = None
        while True:
            page = self.page(prefix, token)
            names += [listed.name for listed in page.records]
            token = page.following
            if token is None:
                break
        yield from sorted(names)

    def page(self, prefix: str, following: str | None) -> RecordPage:
        """Some of the records whose names begin with `prefix`, with their tags; one request."""
        page: Page = self._run(partial(self._list, self._key_prefix(prefix), following))
        found = [
            ListedRecord(name, listed.etag, listed.modified_s)
            for listed in page.objects
            if (name := self.name_of(listed.name)) is not None
        ]
        return RecordPage(found, page.following)

    def delete(self, name: str) -> bool:
        check_name(name)
        key = self._key(name)
        existed = self._run(lambda deadline, _attempt: self._objects.head(key, deadline)) is not None
        if existed and self._run(lambda deadline, _attempt: self._objects.delete([key], deadline)):
            raise TierUnavailable("the bucket refuses to delete a record")
        return existed

    def inspect(self, name: str) -> Inspected | None:
        """As `InspectedRecords.inspect`."""
        found = self._run(partial(self._get, self._key(name)))
        if found is None:
            return None
        body, etag = found
        return Inspected(etag, len(body), fault_of(lambda: open_record(self._keys, name, body[_DRAWN_BYTES:])))

    def delete_unchanged(self, name: str, etag: str) -> bool:
        """As `InspectedRecords.delete_unchanged`; what is written between the look and the deletion goes too, since
        not every server deletes on a condition."""
        found = self._run(partial(self._get, self._key(name)))
        if found is not None and found[1] != etag:
            return False
        self.delete(name)
        return True

    # ------------------------------------------------------------ one request each

    def _put(
        self, key: str, body: bytes, if_absent: bool, if_match: str | None, deadline: float, attempt: int
    ) -> str | None:
        etag = self._objects.put(key, [body], deadline, if_absent=if_absent, if_match=if_match)
        if etag is not None or attempt == 0:
            return etag
        # An earlier try may have been carried out although its answer was lost.
        found = self._get(key, deadline, 0)
        return found[1] if found is not None and found[0] == body else None

    def _get(self, key: str, deadline: float, _attempt: int) -> tuple[bytes, str] | None:
        body = bytearray()

        def place(num_bytes: int) -> list[memoryview]:
            nonlocal body
            if num_bytes > _MAX_RECORD_BYTES:
                raise _TooLong
            body = bytearray(num_bytes)
            return [memoryview(body)]

        try:
            found = self._objects.get(key, place, deadline)
        except _TooLong:
            # As damaged as an empty one.
            return b"", ""
        return None if found is None else (bytes(body), found.etag)

    def _list(self, prefix: str, following: str | None, deadline: float, _attempt: int) -> Page:
        return self._objects.list(prefix, deadline, following=following)

    # ------------------------------------------------------------ names and keys

    def _key(self, name: str) -> str:
        return self._key_prefix(name) + _SUFFIX

    def _key_prefix(self, prefix: str) -> str:
        # Character by character, so that the prefix of a name becomes the prefix of its key.
        return self._settings.key("records/" + _PLAIN.sub(lambda match: f"={ord(match[0]):02X}", prefix))

    def name_of(self, key: str) -> str | None:
        """Return the name of a key, or None where it is no record of ours."""
        start = self._settings.key("records/")
        if not key.startswith(start) or not key.endswith(_SUFFIX):
            return None
        return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), key[len(start) : -len(_SUFFIX)])


class _TooLong(Exception):
    """An object is far too long for a record."""
