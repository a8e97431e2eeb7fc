"""The index in columns: batches of one namespace and size, and which slots its places take."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.block import BlockMeta
from kvstore.core.key import split_keys
from tests.support.blocks import key, meta
from tiers import columns as module
from tiers.base import RecoveredBatch
from tiers.columns import joined
from tiers.index import BlockIndex, IndexEntry, Place
from tiers.occupancy import REASONS, Occupancy
from tiers.segments import Segments

RECORD = 8192


@pytest.fixture
def index(tmp_path: Path) -> Iterator[BlockIndex]:
    index = BlockIndex(tmp_path / "index.mdb", 1 << 20)
    yield index
    index.close()


@pytest.fixture
def segments(tmp_path: Path) -> Iterator[Segments]:
    segments = Segments(tmp_path / "segments", segment_bytes=16 * RECORD, room=lambda _: 64 * RECORD)
    yield segments
    segments.close()


def test_recovered_batches_are_of_one_namespace_and_size_and_not_too_long(
    index: BlockIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RECOVERED_BLOCKS", 4)
    blocks = [meta(number, 100 * (1 + number % 2)) for number in range(20)]
    blocks += [BlockMeta(key(99), key(98), b"\1" * 32, 5, 100)]
    index.insert([IndexEntry(block, Place(1, number), 7) for number, block in enumerate(blocks)])
    batches = list(joined(list(index.columns())).recovered())
    assert sorted((batch.namespace[:1], batch.payload_bytes, len(batch)) for batch in batches) == sorted(
        [
            (meta(0).namespace[:1], 100, 4),
            (meta(0).namespace[:1], 100, 4),
            (meta(0).namespace[:1], 100, 2),
            (meta(0).namespace[:1], 200, 4),
            (meta(0).namespace[:1], 200, 4),
            (meta(0).namespace[:1], 200, 2),
            (b"\1", 100, 1),
        ]
    )
    found = [block for batch in batches for block in batch.metas()]
    assert sorted(found, key=lambda block: block.key) == sorted(blocks, key=lambda block: block.key)


def test_columns_of_different_length_are_no_batch(index: BlockIndex) -> None:
    index.insert([IndexEntry(meta(number), Place(1, number), 7) for number in range(2)])
    (columns,) = index.columns()
    (good,) = columns.recovered()
    with pytest.raises(ValueError, match="differ in length"):
        RecoveredBatch(good.namespace, good.payload_bytes, good.keys[32:], good.parents, good.depths)


def test_a_place_that_cannot_be_is_told_with_the_reason(index: BlockIndex, segments: Segments) -> None:
    segments.take(RECORD, 32)
    places = {
        1: (Place(1, 3), 4096, ""),
        2: (Place(2, 15), 1, ""),
        3: (Place(2, 16), 4096, "segment_truncated"),
        4: (Place(1, 4), 4097, "segment_foreign"),
        5: (Place(7, 0), 4096, "segment_missing"),
        6: (Place(0, 0), 4096, "segment_missing"),
        7: (Place(2, 2**32 - 1), 4096, "segment_truncated"),
        8: (Place(1, 5), 2**64 - 1, "segment_foreign"),
    }
    index.insert([IndexEntry(meta(number, size), place, 0) for number, (place, size, _) in places.items()])
    (columns,) = index.columns()
    occupancy = Occupancy(segments)
    taken = zip(split_keys(columns.keys), occupancy.take(columns).tolist(), strict=True)
    reasons = {block: REASONS[number] for block, number in taken}
    assert reasons == {key(number): reason for number, (_, _, reason) in places.items()}
    # Everything that could be is taken now.
    assert {REASONS[number] for number in occupancy.take(columns)} == {
        "slot_conflict",
        "segment_truncated",
        "segment_foreign",
        "segment_missing",
    }


def test_two_blocks_in_one_slot_are_a_conflict_for_the_second(index: BlockIndex, segments: Segments) -> None:
    segments.take(RECORD, 16)
    index.insert([IndexEntry(meta(number, 4096), Place(1, 3), 0) for number in range(3)])
    (columns,) = index.columns()
    reasons = Occupancy(segments).take(columns)
    assert sorted(REASONS[number] for number in reasons) == ["", "slot_conflict", "slot_conflict"]


def test_no_segments_at_all_have_no_places(index: BlockIndex, segments: Segments) -> None:
    index.insert([IndexEntry(meta(1), Place(1, 0), 0)])
    (columns,) = index.columns()
    assert [REASONS[number] for number in Occupancy(segments).take(columns)] == ["segment_missing"]
