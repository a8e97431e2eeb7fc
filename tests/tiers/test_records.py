"""The record store beside the SSD tier: restarts, damage, its bound."""

from pathlib import Path

import pytest

from kvstore.core.errors import TierUnavailable
from tiers.records import LmdbRecords


def test_records_and_tags_survive_a_restart(tmp_path: Path) -> None:
    store = LmdbRecords(tmp_path / "records.mdb", 1 << 20)
    tag = store.put("a", b"1")
    store.close()
    store = LmdbRecords(tmp_path / "records.mdb", 1 << 20)
    assert store.put("a", b"2", if_match=tag) is not None
    store.close()


def test_more_names_than_are_read_at_once_are_all_listed(tmp_path: Path) -> None:
    store = LmdbRecords(tmp_path / "records.mdb", 64 << 20)
    # Without a commit each, which would take a while.
    with store._environment.begin(write=True) as transaction:
        for number in range(2500):
            transaction.put(b"n/%05d" % number, bytes(8))
    assert list(store.names("n/")) == [f"n/{number:05}" for number in range(2500)]
    store.close()


def test_a_store_without_room_says_so_and_goes_on(tmp_path: Path) -> None:
    store = LmdbRecords(tmp_path / "records.mdb", 256 << 10)

    def fill() -> None:
        for number in range(100):
            store.put(f"r/{number}", bytes(10_000))

    with pytest.raises(TierUnavailable, match="no room"):
        fill()
    assert store.get("r/0") is not None
    assert (tmp_path / "records.mdb").stat().st_size <= 256 << 10
    for name in list(store.names("")):
        store.delete(name)
    assert store.put("new", bytes(10_000)) is not None
    store.close()


def test_a_damaged_file_is_set_aside_and_the_newest_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each damaged file was kept, without end and beyond the tier's cap."""
    path = tmp_path / "records.mdb"
    for turn in (1, 2):
        path.write_bytes(b"damaged %d " % turn * 1000)
        store = LmdbRecords(path, 1 << 20)
        assert list(store.names("")) == []
        assert store.put("a", b"1") is not None
        store.close()
        assert (tmp_path / "records.mdb.damaged").read_bytes().startswith(b"damaged %d" % turn)
        assert len(list(tmp_path.glob("*.damaged*"))) == 1
    assert "set aside" in caplog.text
