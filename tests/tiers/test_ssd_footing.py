"""The SSD tier when somebody else removes, replaces or damages its files, at rest and under it while it is open."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvstore.core.outcome import Outcome
from tests.support.blocks import blank, meta, payload, recovered
from tests.support.ssd import MIB, OPEN
from tiers.records import LmdbRecords
from tiers.scrub import Orders
from tiers.ssd import SsdTier

PAGE = 4096
_BRANCH, _LEAF = 1, 2
BLOCKS = [meta(i, PAGE) for i in range(600)]


def store(tier: SsdTier, blocks: Any = BLOCKS) -> set[Outcome]:
    return set(tier.write(blocks, [payload(block) for block in blocks]))


def read(tier: SsdTier) -> list[Outcome]:
    into = [blank(block) for block in BLOCKS]
    outcomes = tier.read(BLOCKS, into)
    for block, view, outcome in zip(BLOCKS, into, outcomes, strict=True):
        assert outcome is not Outcome.OK or view == payload(block)
    return outcomes


def pages(path: Path, flag: int) -> list[int]:
    """The offsets of LMDB's pages of a kind: bytes 10 and 11 of a page are its flags (mdb.c, MDB_page)."""
    data = path.read_bytes()
    return [at for at in range(2 * PAGE, len(data), PAGE) if int.from_bytes(data[at + 10 : at + 12], "little") == flag]


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("flag", [_BRANCH, _LEAF])
def test_an_index_with_one_bad_page_deep_inside_is_lost_and_the_tier_is_not(
    opened: OPEN, folder: Path, flag: int
) -> None:
    """LMDB looks at its first pages when it opens a file. With a page of rubbish further inside, the walk over the
    index failed at every start: the tier could never be opened again until somebody deleted its files by hand."""
    tier = opened()
    assert store(tier) == {Outcome.OK}
    tier.close()
    for offset in pages(folder / "index.mdb", flag):
        overwrite(folder / "index.mdb", offset, b"\xa5" * PAGE)
    tier = opened()
    assert tier.faults() == {"index_lost": 1}
    assert set(read(tier)) == {Outcome.MISS}
    assert store(tier) == {Outcome.OK}
    assert set(read(tier)) == {Outcome.OK}
    tier.check_integrity()


def test_an_index_whose_keys_are_out_of_order_is_damaged(opened: OPEN, folder: Path) -> None:
    """A flipped bit in a key: the walk goes on behind the last key of a batch, so it might never have ended."""
    tier = opened()
    store(tier)
    tier.close()
    path = folder / "index.mdb"
    largest = max(block.key for block in BLOCKS)
    data = path.read_bytes()
    for offset in pages(path, _LEAF):
        if (at := data.find(largest, offset, offset + PAGE)) >= 0:
            overwrite(path, at, b"\0" * 32)
    assert opened().faults() == {"index_lost": 1}


def test_an_entry_of_another_length_is_no_block_that_is_there_for_ever(opened: OPEN, folder: Path) -> None:
    """It was passed over: no walk saw it, a read missed it, and a write found that the block was there already."""
    tier = opened()
    store(tier)
    tier.close()
    environment = lmdb.open(str(folder / "index.mdb"), subdir=False, map_size=16 * MIB)
    with environment, environment.begin(write=True) as transaction:
        transaction.put(BLOCKS[5].key, b"short")
    tier = opened()
    assert tier.faults() == {"index_lost": 1}
    assert store(tier) == {Outcome.OK}


def test_an_index_that_is_damaged_under_the_tier_is_replaced_when_it_is_opened_anew(opened: OPEN, folder: Path) -> None:
    tier = opened()
    store(tier)
    for offset in pages(folder / "index.mdb", _LEAF):
        overwrite(folder / "index.mdb", offset, b"\xa5" * PAGE)
    assert set(read(tier)) == {Outcome.UNAVAILABLE}
    assert "damaged" in tier.needs_reopening()
    tier = opened()
    assert tier.needs_reopening() == ""
    assert store(tier) == {Outcome.OK}
    assert set(read(tier)) == {Outcome.OK}


def test_damaged_records_are_set_aside_wherever_the_damage_is(tmp_path: Path) -> None:
    path = tmp_path / "records.mdb"
    records = LmdbRecords(path, 4 * MIB)
    for i in range(200):
        records.put(f"session/{i:04}", b"x" * 500)
    records.close()
    for offset in pages(path, _LEAF):
        overwrite(path, offset, b"\xa5" * PAGE)
    records = LmdbRecords(path, 4 * MIB)
    assert list(records.names("")) == []
    assert records.put("session/0", b"new") is not None
    assert (tmp_path / "records.mdb.damaged").exists()
    records.close()


def remove_the_last_segment(folder: Path) -> None:
    max((folder / "segments").iterdir()).unlink()


def replace_the_last_segment(folder: Path) -> None:
    path = max((folder / "segments").iterdir())
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    copy.replace(path)


def remove_the_index(folder: Path) -> None:
    (folder / "index.mdb").unlink()


def remove_the_records(folder: Path) -> None:
    (folder / "records.mdb").unlink()


def remove_everything(folder: Path) -> None:
    shutil.rmtree(folder)


def move_the_folder(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def test_a_segment_that_is_taken_away_is_noticed_without_a_write_to_it(opened: OPEN, folder: Path) -> None:
    tier = opened()
    store(tier)
    min((folder / "segments").iterdir()).unlink()
    assert "removed or replaced" in tier.needs_reopening()


@pytest.mark.parametrize(
    "harm",
    [
        remove_the_last_segment,
        replace_the_last_segment,
        remove_the_index,
        remove_the_records,
        remove_everything,
        move_the_folder,
    ],
)
def test_nothing_is_called_durable_that_goes_to_files_which_were_taken_away(
    opened: OPEN, folder: Path, harm: Callable[[Path], None]
) -> None:
    """Writes to a removed file succeed. Blocks were reported as durable and `verify` found nothing; after the next
    start they were gone."""
    tier = opened()
    store(tier, BLOCKS[:300])
    assert tier.needs_reopening() == ""
    harm(folder)
    # Into free slots of the last segment.
    assert store(tier, BLOCKS[300:310]) == {Outcome.UNAVAILABLE}
    assert "removed or replaced" in tier.needs_reopening()
    assert tier.faults()["displaced"] == 1
    with pytest.raises(Exception, match="removed or replaced"):
        list(tier.scrub(Orders()))
    tier = opened()
    assert tier.needs_reopening() == ""
    assert store(tier) <= {Outcome.OK, Outcome.EXISTS}
    assert set(read(tier)) == {Outcome.OK}
    tier.check_integrity()
    assert len(recovered(tier)) == len(BLOCKS)
