"""The SSD tier over a folder that was damaged, swapped, or written with another key: misses, and nothing wrong."""

import os
from pathlib import Path

import pytest

from kvstore.core.block import HEADER_BYTES
from kvstore.core.outcome import Outcome
from tests.support.blocks import key, meta, payload
from tests.support.ssd import OPEN, fetched, segment_files, store
from tiers.codec import PLAIN, Codec
from tiers.keys import KeyRing


def test_a_missing_segment_costs_its_blocks_only(opened: OPEN, folder: Path) -> None:
    tier = opened()
    store(tier, [meta(1, 8192), meta(2, 16384)])
    tier.close()
    segment_files(folder)[0].unlink()
    tier = opened()
    assert fetched(tier, [meta(1, 8192), meta(2, 16384)]) == [Outcome.MISS, Outcome.OK]
    assert tier.faults() == {"segment_missing": 1}
    assert store(tier, [meta(1, 8192)]) == [Outcome.OK]
    tier.check_integrity()


def test_a_truncated_segment_costs_what_lay_behind(opened: OPEN, folder: Path) -> None:
    tier = opened()
    blocks = [meta(i) for i in range(10)]
    store(tier, blocks)
    tier.close()
    os.truncate(segment_files(folder)[0], 3 * (8192 + HEADER_BYTES) + 100)
    tier = opened()
    assert fetched(tier, blocks) == [Outcome.OK] * 3 + [Outcome.MISS] * 7
    assert tier.faults() == {"segment_truncated": 7}
    tier.check_integrity()


def test_a_segment_that_is_cut_while_open_answers_corrupt(opened: OPEN, folder: Path) -> None:
    tier = opened()
    blocks = [meta(i) for i in range(10)]
    store(tier, blocks)
    os.truncate(segment_files(folder)[0], 3 * (8192 + HEADER_BYTES) + 100)
    assert fetched(tier, blocks) == [Outcome.OK] * 3 + [Outcome.CORRUPT] * 7
    assert fetched(tier, blocks) == [Outcome.OK] * 3 + [Outcome.MISS] * 7
    assert tier.faults() == {"corrupt": 7}


def test_a_foreign_segment_of_the_right_size_is_never_served(opened: OPEN, folder: Path) -> None:
    tier = opened()
    store(tier, [meta(1), meta(2)])
    tier.close()
    path = segment_files(folder)[0]
    path.write_bytes(os.urandom(path.stat().st_size))
    tier = opened()
    assert fetched(tier, [meta(1), meta(2)]) == [Outcome.CORRUPT] * 2
    assert tier.faults() == {"corrupt": 2}


def test_a_segment_that_became_a_link_is_not_followed(opened: OPEN, folder: Path, tmp_path: Path) -> None:
    tier = opened()
    store(tier, [meta(1)])
    tier.close()
    path = segment_files(folder)[0]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    tier = opened()
    assert fetched(tier, [meta(1)]) == [Outcome.MISS]
    assert store(tier, [meta(1)]) == [Outcome.OK]


@pytest.mark.parametrize("position", [0, 20, 100, 130, HEADER_BYTES, HEADER_BYTES + 8191])
def test_a_flipped_bit_is_corrupt_once_then_heals(opened: OPEN, folder: Path, position: int) -> None:
    tier = opened()
    store(tier, [meta(1)])
    with open(segment_files(folder)[0], "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))
    assert fetched(tier, [meta(1)]) == [Outcome.CORRUPT]
    assert fetched(tier, [meta(1)]) == [Outcome.MISS]
    assert store(tier, [meta(1)]) == [Outcome.OK]
    assert fetched(tier, [meta(1)]) == [Outcome.OK]
    assert tier.faults() == {"corrupt": 1}


def test_a_start_with_the_wrong_key_misses_every_block_and_deletes_none(opened: OPEN) -> None:
    right, wrong = Codec(KeyRing(bytes(range(32)))), Codec(KeyRing(bytes(32)))
    blocks = [meta(i, 8192 + i) for i in range(4)]
    assert store(opened(codec=right), blocks) == [Outcome.OK] * 4
    for codec in (wrong, PLAIN):
        tier = opened(codec=codec)
        assert fetched(tier, blocks) == [Outcome.MISS] * 4
        assert tier.faults() == {"wrong_key": 4}
    tier = opened(codec=right)
    assert fetched(tier, blocks) == [Outcome.OK] * 4
    assert tier.faults() == {}


def test_nothing_of_an_encrypted_payload_is_on_the_disk(opened: OPEN, folder: Path) -> None:
    store(opened(codec=Codec(KeyRing(bytes(range(32))))), [meta(1, 8192), meta(2, 8192)])
    stored = segment_files(folder)[0].read_bytes()
    assert key(1) in stored
    assert not any(bytes(payload(meta(1)))[start : start + 32] in stored for start in range(0, 8192, 512))


def test_slots_that_were_swapped_on_disk_are_not_mixed_up(opened: OPEN, folder: Path) -> None:
    tier = opened()
    store(tier, [meta(1), meta(2)])
    record = 8192 + HEADER_BYTES
    with open(segment_files(folder)[0], "r+b") as file:
        first, second = file.read(record), file.read(record)
        file.seek(0)
        file.write(second + first)
    assert fetched(tier, [meta(1), meta(2)]) == [Outcome.CORRUPT] * 2


def test_an_older_copy_of_the_same_block_is_not_served(opened: OPEN, folder: Path) -> None:
    """A copy-on-write snapshot that was restored under the index brings such slots back."""
    tier = opened()
    assert tier.write([meta(1)], [payload(meta(1), salt=1)]) == [Outcome.OK]
    old = segment_files(folder)[0].read_bytes()
    tier.delete([key(1)])
    store(tier, [meta(2), meta(1)])
    tier.delete([key(2)])
    slot = segment_files(folder)[0].read_bytes().index(payload(meta(1))) - HEADER_BYTES
    with open(segment_files(folder)[0], "r+b") as file:
        file.seek(slot)
        file.write(old[: 8192 + HEADER_BYTES])
    assert fetched(tier, [meta(1)]) == [Outcome.CORRUPT]


@pytest.mark.parametrize("content", [b"not an environment" * 1000, b""])
def test_a_damaged_index_is_an_empty_one(opened: OPEN, folder: Path, content: bytes) -> None:
    tier = opened()
    store(tier, [meta(1)])
    tier.close()
    (folder / "index.mdb").write_bytes(content)
    tier = opened()
    assert fetched(tier, [meta(1)]) == [Outcome.MISS]
    assert tier.faults() == ({"index_lost": 1} if content else {})
    assert store(tier, [meta(1)]) == [Outcome.OK]
    tier.check_integrity()


def test_a_truncated_index_is_an_empty_one(opened: OPEN, folder: Path) -> None:
    """LMDB itself would map the missing pages and die of SIGBUS when it touches them."""
    tier = opened()
    store(tier, [meta(i, 1) for i in range(200)])
    tier.close()
    os.truncate(folder / "index.mdb", 3 * 4096)
    tier = opened()
    assert tier.usage().blocks == 0
    assert tier.faults() == {"index_lost": 1}
