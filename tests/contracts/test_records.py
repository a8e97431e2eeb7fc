"""What every record store promises, run on each of them."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from kvstore.core.errors import WrongKey
from tiers.base import RecordStore
from tiers.codec import Codec
from tiers.keys import KeyRing
from tiers.records import LmdbRecords
from tiers.s3 import S3Tier

# Named here, so that it starts before a test's own fixtures look at what is open.
pytestmark = pytest.mark.usefixtures("s3_server")


KEY, OTHER = bytes(range(32)), bytes(range(50, 82))
OPEN = Callable[[KeyRing | None], RecordStore]


@pytest.fixture(params=["lmdb", "boto3", "obstore"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OPEN]:
    """Opens the same store with these or those keys, one after the other."""
    stores: list[LmdbRecords] = []

    def open_records(keys: KeyRing | None) -> RecordStore:
        if request.param != "lmdb":
            open_s3 = cast("Callable[..., S3Tier]", request.getfixturevalue("open_s3"))
            return open_s3(client=request.param, codec=Codec(keys)).records
        if stores:
            stores[-1].close()
        stores.append(LmdbRecords(tmp_path / "records.mdb", 4 << 20, keys=keys))
        return stores[-1]

    yield open_records
    if stores:
        stores[-1].close()


@pytest.fixture(params=["plain", "encrypted"])
def records(request: pytest.FixtureRequest, opened: OPEN) -> RecordStore:
    return opened(KeyRing(KEY) if request.param == "encrypted" else None)


def test_a_record_comes_back_with_its_tag(records: RecordStore) -> None:
    tag = records.put("sessions/tenant/abc", b"\0text\xff")
    record = records.get("sessions/tenant/abc")
    assert record is not None
    assert (record.data, record.etag) == (b"\0text\xff", tag)
    assert records.get("sessions/tenant") is None


def test_an_empty_record_is_not_a_missing_one(records: RecordStore) -> None:
    assert records.put("empty", b"") is not None
    record = records.get("empty")
    assert record is not None
    assert record.data == b""


def test_a_large_record_comes_back(records: RecordStore) -> None:
    data = bytes(range(256)) * 4000
    records.put("large", data)
    record = records.get("large")
    assert record is not None
    assert record.data == data


def test_a_write_changes_the_tag(records: RecordStore) -> None:
    first = records.put("a", b"1")
    second = records.put("a", b"2")
    assert first != second
    record = records.get("a")
    assert record is not None
    assert (record.data, record.etag) == (b"2", second)


def test_a_write_on_an_older_tag_is_refused_and_changes_nothing(records: RecordStore) -> None:
    first = records.put("a", b"1")
    second = records.put("a", b"2", if_match=first)
    assert second is not None
    assert records.put("a", b"3", if_match=first) is None
    record = records.get("a")
    assert record is not None
    assert record.data == b"2"


def test_a_conditional_write_needs_a_record(records: RecordStore) -> None:
    tag = records.put("other", b"1")
    assert records.put("a", b"1", if_match=tag) is None
    assert records.get("a") is None


def test_a_record_is_created_once(records: RecordStore) -> None:
    assert records.put("a", b"1", if_absent=True) is not None
    assert records.put("a", b"2", if_absent=True) is None
    record = records.get("a")
    assert record is not None
    assert record.data == b"1"


def test_a_deleted_record_is_gone_and_its_tag_with_it(records: RecordStore) -> None:
    tag = records.put("a", b"1")
    assert records.delete("a") is True
    assert records.delete("a") is False
    assert records.get("a") is None
    assert records.put("a", b"2", if_match=tag) is None
    assert records.put("a", b"2", if_absent=True) is not None


def test_names_are_listed_by_prefix_in_order(records: RecordStore) -> None:
    for name in ("b/2", "a/1", "b/10", "b", "c/1", "b/1/x"):
        records.put(name, b"")
    assert list(records.names("b/")) == ["b/1/x", "b/10", "b/2"]
    assert list(records.names("")) == ["a/1", "b", "b/1/x", "b/10", "b/2", "c/1"]
    assert list(records.names("d")) == []


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/../b", "a/.", "a\nb", "ä", "x" * 501])
def test_names_that_could_lead_elsewhere_are_refused(records: RecordStore, name: str) -> None:
    for call in (records.get, records.delete, lambda name: records.put(name, b"")):
        with pytest.raises(ValueError):
            call(name)


def test_unusual_characters_in_names_are_kept_apart(records: RecordStore) -> None:
    names = ["a b", "a+b", "a%20b", "a%2Fb", "a/b", "a?b", "a#b", "a&b=c", "A/b", "~a", "a..b"]
    for number, name in enumerate(names):
        records.put(name, bytes([number]))
    assert list(records.names("")) == sorted(names)
    for number, name in enumerate(names):
        record = records.get(name)
        assert record is not None
        assert record.data == bytes([number])


def test_of_many_writers_on_one_tag_one_wins(records: RecordStore) -> None:
    tag = records.put("a", b"start")
    tags: list[str | None] = []

    def write(number: int) -> None:
        tags.append(records.put("a", b"%d" % number, if_match=tag))

    writers = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    (won,) = [tag for tag in tags if tag is not None]
    record = records.get("a")
    assert record is not None
    assert record.etag == won


def test_a_record_of_another_key_is_refused_and_neither_deleted_nor_replaced(opened: OPEN) -> None:
    opened(KeyRing(KEY)).put("a", b"what people wrote")
    for keys in (None, KeyRing(OTHER)):
        store = opened(keys)
        with pytest.raises(WrongKey):
            store.get("a")
        assert store.put("a", b"new", if_absent=True) is None
    record = opened(KeyRing(OTHER, [KEY])).get("a")
    assert record is not None
    assert record.data == b"what people wrote"


def test_with_a_key_what_was_stored_without_one_is_read_only_where_that_is_allowed(opened: OPEN) -> None:
    opened(None).put("a", b"1")
    with pytest.raises(WrongKey, match="not encrypted"):
        opened(KeyRing(KEY)).get("a")
    store = opened(KeyRing(KEY, accepts_plain=True))
    record = store.get("a")
    assert record is not None
    assert record.data == b"1"
    assert store.put("a", b"2", if_match=record.etag) is not None
    record = opened(KeyRing(KEY)).get("a")
    assert record is not None
    assert record.data == b"2"
