"""Small named values with compare-and-swap, beside the SSD tier.

Covers: one LMDB environment of its own, each write synced. What a record looks like is in `tiers/sealed.py`, the
objects in a bucket are in `tiers/s3records.py`.
"""

import contextlib
import logging
import struct
from collections.abc import Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb

from kvstore.core.errors import CorruptBlock, TierUnavailable, WrongKey
from tiers.base import Record
from tiers.calls import RunningCalls
from tiers.environment import DAMAGE, DamagedEnvironment, lock_path, open_environment
from tiers.faults import FaultCounter
from tiers.names import check_name
from tiers.scrub import Inspected, fault_of
from tiers.sealed import check_record, open_record, seal_record

if TYPE_CHECKING:
    from tiers.keys import KeyRing

_REVISION = struct.Struct("<Q")
# No record has this name, since names are printable.
_REVISION_NAME = b"\0revision"
_NAMES_AT_ONCE = 1024
_CLOSE_WAIT_S = 10.0
_logger = logging.getLogger("kvstore.tiers.records")


class LmdbRecords:
    """A RecordStore in one LMDB file. Thread-safe.

    A tag is the value of a counter that every write advances, so that a value that was deleted and written anew is
    never taken for the old one.
    """

    def __init__(
        self, path: Path, max_bytes: int, *, keys: "KeyRing | None" = None, faults: FaultCounter | None = None
    ) -> None:
        """Open or create the file, which never grows beyond `max_bytes`. A damaged one is renamed and kept, since
        people's chats are in it, and an empty one takes its place. Raises TierUnavailable."""
        self._keys = keys
        self._faults = FaultCounter("records") if faults is None else faults
        try:
            self._environment: Any = _open_checked(path, max_bytes)
        except DamagedEnvironment as error:
            kept = _set_aside(path)
            _logger.error("the session records are damaged (%s) and were set aside as %s", error, kept.name)
            self._environment = open_environment(path, max_bytes)
        self._calls = RunningCalls()

    def put(self, name: str, data: bytes, *, if_match: str | None = None, if_absent: bool = False) -> str | None:
        """As `RecordStore.put`. Raises TierUnavailable, too, where all room is taken, and WrongKey where the record
        that is there cannot be read with our keys: a chat is in it, and the right key may come with the next start."""
        check_name(name)
        key = name.encode()
        sealed = seal_record(self._keys, name, data)
        with self._transaction(write=True) as transaction:
            present = transaction.get(key)
            if if_absent and present is not None:
                return None
            if if_match is not None and (present is None or _tag(present) != if_match):
                return None
            if present is not None:
                self._check_replaceable(name, present)
            counter = transaction.get(_REVISION_NAME)
            revision = _REVISION.pack(1 + (_REVISION.unpack(counter)[0] if counter else 0))
            transaction.put(_REVISION_NAME, revision)
            transaction.put(key, revision + sealed)
        return _tag(revision)

    def get(self, name: str) -> Record | None:
        """As `RecordStore.get`; a record that is damaged is counted and None."""
        check_name(name)
        with self._transaction() as transaction:
            value = transaction.get(name.encode())
        if value is None:
            return None
        try:
            return Record(open_record(self._keys, name, value[_REVISION.size :]), _tag(value))
        except CorruptBlock:
            self._faults.count("record_corrupt", detail=name.rpartition("/")[0])
            return None
        except WrongKey as error:
            self._faults.count("wrong_key", detail=f"a session record: {error}")
            raise

    def names(self, prefix: str) -> Iterator[str]:
        """As `RecordStore.names`; names that come or go meanwhile may or may not be among them."""
        wanted = prefix.encode()
        after = wanted
        while True:
            with self._transaction() as transaction:
                found = _keys_from(transaction, after, wanted)
            yield from (key.decode() for key in found if key != _REVISION_NAME)
            if len(found) < _NAMES_AT_ONCE:
                return
            # The smallest key behind the last one.
            after = found[-1] + b"\0"

    def delete(self, name: str) -> bool:
        check_name(name)
        with self._transaction(write=True) as transaction:
            return bool(transaction.delete(name.encode()))

    def inspect(self, name: str) -> Inspected | None:
        """As `InspectedRecords.inspect`."""
        with self._transaction() as transaction:
            value = transaction.get(name.encode())
        if value is None:
            return None
        fault = fault_of(lambda: open_record(self._keys, name, value[_REVISION.size :]))
        return Inspected(_tag(value), len(value), fault)

    def delete_unchanged(self, name: str, etag: str) -> bool:
        """As `InspectedRecords.delete_unchanged`."""
        with self._transaction(write=True) as transaction:
            value = transaction.get(name.encode())
            if value is not None and _tag(value) != etag:
                return False
            transaction.delete(name.encode())
        return True

    def close(self) -> None:
        """Wait for running calls, then close. Idempotent."""
        if self._calls.close(_CLOSE_WAIT_S):
            self._environment.close()

    def _check_replaceable(self, name: str, present: bytes) -> None:
        try:
            check_record(self._keys, name, present[_REVISION.size :])
        except CorruptBlock:
            pass
        except WrongKey as error:
            self._faults.count("wrong_key", detail=f"a session record is not replaced: {error}")
            raise

    @contextlib.contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[Any]:
        try:
            with self._calls.enter() as is_open:
                if not is_open:
                    raise TierUnavailable("the record store is closed")
                with self._environment.begin(write=write) as transaction:
                    yield transaction
        except (lmdb.MapFullError, lmdb.DiskError) as error:
            raise TierUnavailable(f"the record store has no room left: {error}") from error
        except lmdb.Error as error:
            raise TierUnavailable(f"the record store failed: {error}") from error


def _open_checked(path: Path, max_bytes: int) -> Any:
    """Open the environment and look at every page that has names on it. Raises as `open_environment` does."""
    environment = open_environment(path, max_bytes)
    try:
        with environment.begin() as transaction:
            for _ in transaction.cursor().iternext(keys=True, values=False):
                pass
    except DAMAGE as error:
        environment.close()
        raise DamagedEnvironment(f"{path.name} is damaged: {error}") from error
    except lmdb.Error as error:
        environment.close()
        raise TierUnavailable(f"cannot read {path}: {error}") from error
    return environment


def _keys_from(transaction: Any, after: bytes, prefix: bytes) -> list[bytes]:
    cursor = transaction.cursor()
    # An empty key would be the first one; LMDB refuses to look for it.
    found = cursor.set_range(after) if after else cursor.first()
    keys = cursor.iternext(keys=True, values=False) if found else ()
    return list(islice(takewhile(lambda key: key.startswith(prefix), keys), _NAMES_AT_ONCE))


def _tag(value: bytes) -> str:
    return str(_REVISION.unpack_from(value.ljust(_REVISION.size, b"\0"))[0])


def _set_aside(path: Path) -> Path:
    """Rename a damaged file. One is kept, the newest: a disk that damages files again and again must not fill up."""
    kept = path.with_name(f"{path.name}.damaged")
    path.replace(kept)
    lock_path(path).unlink(missing_ok=True)
    return kept
