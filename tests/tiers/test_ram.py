"""The RAM tier's slots: reserve, publish, abandon, and the generation that guards each reuse."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.core.block import BlockMeta
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome
from tiers.copying import Copier
from tiers.ram import RamTier
from tiers.region import Region

SIZE = 40_960


def block(number: int, payload_bytes: int = SIZE) -> BlockMeta:
    return BlockMeta(BlockKey(bytes([number]) * 32), BlockKey(bytes(32)), bytes(32), number, payload_bytes)


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    region = Region.create(tmp_path / "region", 4 * SIZE, 1)
    yield region
    region.close()


@pytest.fixture
def tier(region: Region) -> Iterator[RamTier]:
    tier = RamTier(region)
    yield tier
    tier.close()
    tier.check_integrity()


def test_a_reserved_block_is_invisible_until_it_is_published(region: Region, tier: RamTier) -> None:
    ref = tier.reserve(block(1))
    assert ref is not None
    region.view(ref.offset, ref.num_bytes)[:] = b"a" * SIZE
    into = memoryview(bytearray(SIZE))
    assert tier.contains([block(1).key]) == [Outcome.MISS]
    assert tier.read([block(1)], [into]) == [Outcome.MISS]
    assert tier.delete([block(1).key]) == [Outcome.MISS]
    assert tier.slot(block(1).key) is None
    assert tier.write([block(1)], [into]) == [Outcome.EXISTS]
    tier.publish(block(1).key)
    assert tier.contains([block(1).key]) == [Outcome.OK]
    assert tier.slot(block(1).key) == ref
    assert tier.read([block(1)], [into]) == [Outcome.OK]
    assert bytes(into) == b"a" * SIZE


def test_each_use_of_a_slot_has_a_new_generation(region: Region, tier: RamTier) -> None:
    first = tier.reserve(block(1))
    assert first is not None
    tier.publish(block(1).key)
    assert region.generation(first.offset) == first.generation
    tier.delete([block(1).key])
    assert region.generation(first.offset) != first.generation
    second = tier.reserve(block(2))
    assert second is not None
    assert second.offset == first.offset
    assert second.generation > first.generation


def test_an_abandoned_slot_is_free_again_and_stale(region: Region, tier: RamTier) -> None:
    refs = [tier.reserve(block(i)) for i in range(4)]
    assert all(refs)
    assert tier.reserve(block(9)) is None
    assert refs[0] is not None
    tier.abandon(block(0).key)
    assert region.generation(refs[0].offset) != refs[0].generation
    assert tier.reserve(block(9)) is not None


def test_slots_are_only_published_or_abandoned_while_reserved(tier: RamTier) -> None:
    for wrong in (tier.publish, tier.abandon):
        with pytest.raises(KeyError):
            wrong(block(1).key)
    tier.reserve(block(1))
    with pytest.raises(ValueError):
        tier.reserve(block(1))
    tier.publish(block(1).key)
    for wrong in (tier.publish, tier.abandon):
        with pytest.raises(KeyError):
            wrong(block(1).key)


def test_blocks_of_several_sizes_share_the_region(tier: RamTier) -> None:
    assert tier.reserve(block(1, SIZE)) is not None
    assert tier.reserve(block(2, SIZE // 2)) is not None
    assert tier.reserve(block(3, 5)) is not None
    tier.check_integrity()


def test_usage_counts_reserved_slots(tier: RamTier) -> None:
    tier.reserve(block(1))
    usage = tier.usage()
    assert (usage.blocks, usage.used_bytes, usage.capacity_bytes) == (1, SIZE, 4 * SIZE)


def test_a_copy_that_fails_gives_its_slots_back(tier: RamTier, monkeypatch: pytest.MonkeyPatch) -> None:
    payloads = [memoryview(bytes([number]) * SIZE) for number in (1, 2)]

    def fail(_: object, pairs: Iterator[object], num_bytes: int) -> None:
        next(pairs)
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(Copier, "copy_all", fail)
        with pytest.raises(MemoryError):
            tier.write([block(1), block(2)], payloads)
    assert tier.usage().used_bytes == 0
    assert tier.write([block(1), block(2)], payloads) == [Outcome.OK, Outcome.OK]


def test_the_same_block_twice_in_a_batch_is_stored_once(tier: RamTier) -> None:
    payloads = [memoryview(bytes([number]) * SIZE) for number in (1, 2)]
    assert tier.write([block(1), block(1)], payloads) == [Outcome.OK, Outcome.EXISTS]
    into = memoryview(bytearray(SIZE))
    assert tier.read([block(1)], [into]) == [Outcome.OK]
    assert into == payloads[0]


def test_a_block_is_seen_once_the_whole_batch_was_copied(tier: RamTier, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    def copy(into: memoryview, source: memoryview) -> None:
        assert tier.contains([block(1).key, block(2).key]) == [Outcome.MISS, Outcome.MISS]
        into[:] = source
        copied.append(len(source))

    monkeypatch.setattr("tiers.copying.copy_bytes", copy)
    tier.write([block(1), block(2)], [memoryview(bytes(SIZE))] * 2)
    assert copied == [SIZE, SIZE]
    assert tier.contains([block(1).key, block(2).key]) == [Outcome.OK, Outcome.OK]


def test_a_block_whose_slot_became_another_one_s_during_the_copy_is_a_miss(
    tier: RamTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.write([block(number) for number in range(4)], [memoryview(bytes([number]) * SIZE) for number in range(4)])

    def copy(into: memoryview, source: memoryview) -> None:
        if source[0] == 1:
            tier.delete([block(1).key])
            assert tier.reserve(block(7)) is not None
            source[:] = b"7" * SIZE
        into[:] = source

    monkeypatch.setattr("tiers.copying.copy_bytes", copy)
    into = [memoryview(bytearray(SIZE)) for _ in range(4)]
    assert tier.read([block(number) for number in range(4)], into) == [
        Outcome.OK,
        Outcome.MISS,
        Outcome.OK,
        Outcome.OK,
    ]


def test_batches_of_several_callers_at_once_keep_their_bytes(tier: RamTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.copying._SHARED_BYTES", SIZE)
    monkeypatch.setattr("tiers.copying._SHARE_BYTES", SIZE // 2)
    monkeypatch.setattr("tiers.copying._FIRST_SHARE_BYTES", SIZE // 4)

    def store_and_fetch(caller: int) -> None:
        for turn in range(100):
            metas = [block(2 * caller + i) for i in range(2)]
            payloads = [memoryview(bytes([caller, turn, i, 9]) * (SIZE // 4)) for i in range(2)]
            assert tier.write(metas, payloads) == [Outcome.OK, Outcome.OK]
            into = [memoryview(bytearray(SIZE)) for _ in range(2)]
            assert tier.read(metas, into) == [Outcome.OK, Outcome.OK]
            assert into == payloads
            assert tier.delete([meta.key for meta in metas]) == [Outcome.OK, Outcome.OK]

    with ThreadPoolExecutor(2) as callers:
        for done in [callers.submit(store_and_fetch, caller) for caller in range(2)]:
            done.result()
