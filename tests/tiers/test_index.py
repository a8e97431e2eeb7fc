"""The SSD tier's index: transactions that fit or change nothing, growth, compaction, other formats."""

from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from tests.support.blocks import key, meta
from tiers.environment import DamagedEnvironment
from tiers.index import BlockIndex, IndexEntry, IndexFull, Place, compact_index

SMALL = 64 << 10


def entry(number: int) -> IndexEntry:
    return IndexEntry(meta(number), Place(1 + number % 3, number), number * 2**40)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[BlockIndex]:
    index = BlockIndex(tmp_path / "index.mdb", SMALL)
    yield index
    index.close()


def test_entries_come_back_whole(index: BlockIndex) -> None:
    assert index.insert([entry(1), entry(2)]) == [True, True]
    assert index.get([key(2), key(3), key(1)]) == [entry(2), None, entry(1)]
    assert index.contains([key(3), key(1)]) == [False, True]


def test_an_entry_that_is_there_is_left_alone(index: BlockIndex) -> None:
    index.insert([entry(1)])
    assert index.insert([IndexEntry(meta(1), Place(9, 9), 9), entry(2)]) == [False, True]
    assert index.get([key(1)]) == [entry(1)]


def test_an_entry_is_removed_only_from_where_it_is_said_to_be(index: BlockIndex) -> None:
    index.insert([entry(1), entry(2)])
    assert index.remove([key(1), key(2)], [Place(9, 9), entry(2).place]) == [None, entry(2)]
    assert index.remove([key(1), key(7)]) == [entry(1), None]


def test_a_transaction_that_does_not_fit_changes_nothing_until_the_map_grows(index: BlockIndex) -> None:
    index.insert([entry(0)])
    with pytest.raises(IndexFull):
        index.insert([entry(number) for number in range(1, 1000)])
    assert [place for _, place, _ in index.places()] == [entry(0).place]
    index.grow(1 << 20)
    assert all(index.insert([entry(number) for number in range(1, 1000)]))
    assert len(list(index.places())) == 1000


def test_a_map_never_shrinks_by_growing(index: BlockIndex) -> None:
    index.grow(4096)
    assert index.map_bytes == SMALL


def test_entries_may_come_and_go_while_all_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = BlockIndex(tmp_path / "index.mdb", 8 << 20)
    index.insert([entry(number) for number in range(3000)])
    seen: set[int] = set()
    monkeypatch.setattr("tiers.index._SCAN_ENTRIES", 100)
    for count, columns in enumerate(index.columns()):
        seen |= set(columns.entries["depth"].tolist())
        if count == 5:
            index.remove([key(number) for number in range(0, 3000, 2)])
            index.insert([entry(number) for number in range(3000, 3100)])
    assert set(range(1, 3000, 2)) <= seen
    index.close()


def test_compaction_makes_the_file_smaller_and_keeps_the_entries(tmp_path: Path) -> None:
    path = tmp_path / "index.mdb"
    index = BlockIndex(path, 8 << 20)
    index.insert([entry(number) for number in range(5000)])
    index.remove([key(number) for number in range(10, 5000)])
    index.close()
    before = path.stat().st_size
    compact_index(path)
    assert path.stat().st_size < before / 10
    index = BlockIndex(path, SMALL)
    assert {place.slot for _, place, _ in index.places()} == set(range(10))
    index.close()


def test_another_environment_is_not_taken_for_an_index(tmp_path: Path) -> None:
    path = tmp_path / "index.mdb"
    with lmdb.open(str(path), subdir=False, map_size=1 << 20) as other, other.begin(write=True) as transaction:
        transaction.put(b"something", b"else")
    with pytest.raises(DamagedEnvironment, match="of this version"):
        BlockIndex(path, SMALL)
