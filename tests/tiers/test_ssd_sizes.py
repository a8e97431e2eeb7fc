"""Blocks of several sizes on one SSD: room goes from one size to another without falling apart or stopping."""

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.block import BlockMeta
from kvstore.core.errors import TierUnavailable
from kvstore.core.outcome import Outcome
from tests.support.blocks import meta
from tests.support.ssd import MIB, OPEN, fetched, store
from tiers.emptying import Emptier
from tiers.index import BlockIndex
from tiers.segments import Segments
from tiers.ssd import SsdTier

SMALL, LARGE = 4096, 61_440


@pytest.fixture
def opened(opened: OPEN) -> OPEN:
    return partial(opened, max_bytes=8 * MIB)


def filled(tier: SsdTier, payload_bytes: int = SMALL) -> list[BlockMeta]:
    """Store blocks of that size until no more go in; return them."""
    blocks = [meta(number, payload_bytes) for number in range(8 * MIB // payload_bytes)]
    outcomes = store(tier, blocks)
    assert outcomes[-1] is Outcome.FULL
    return [block for block, outcome in zip(blocks, outcomes, strict=True) if outcome is Outcome.OK]


def make_sparse(tier: SsdTier, blocks: list[BlockMeta], share: float = 0.25) -> list[BlockMeta]:
    """Delete a share of the blocks, anywhere; return those that are left."""
    chooser = random.Random(7)
    doomed = set(chooser.sample(range(len(blocks)), int(share * len(blocks))))
    tier.delete([blocks[number].key for number in doomed])
    return [block for number, block in enumerate(blocks) if number not in doomed]


def test_room_that_is_free_here_and_there_serves_another_size(opened: OPEN) -> None:
    """Only whole empty segments were given to another size. With some block in each, all of the tier had to be evicted
    before a block of a new size found room."""
    tier = opened()
    left = make_sparse(tier, filled(tier))
    large = [meta(100_000 + number, LARGE) for number in range(15)]
    assert store(tier, large) == [Outcome.OK] * 15
    assert fetched(tier, left + large) == [Outcome.OK] * (len(left) + 15)
    tier.check_integrity()
    tier = opened()
    assert fetched(tier, left + large) == [Outcome.OK] * (len(left) + 15)
    assert tier.faults() == {}


def test_churn_of_two_sizes_keeps_most_of_the_disk_in_use(opened: OPEN) -> None:
    """Victims are chosen at random, the worst case: what is evicted lies everywhere."""
    tier = opened(max_bytes=32 * MIB)
    chooser = random.Random(3)
    content = os.urandom(LARGE)
    held: list[BlockMeta] = []
    number, evicted_bytes, written_bytes = 0, 0, 0
    for turn in range(500):
        size = (SMALL, LARGE)[chooser.random() < (0.2, 0.8)[turn // 50 % 2]]
        left = [meta(number + i, size) for i in range(2 * MIB // size // 4)]
        number += len(left)
        while left:
            outcomes = tier.write(left, [memoryview(content)[:size]] * len(left))
            stored = [block for block, outcome in zip(left, outcomes, strict=True) if outcome is Outcome.OK]
            held += stored
            written_bytes += size * len(stored)
            left = [block for block, outcome in zip(left, outcomes, strict=True) if outcome is Outcome.FULL]
            if left:
                usage = tier.usage()
                assert usage.capacity_bytes is not None
                assert usage.used_bytes > 0.85 * usage.capacity_bytes
                chooser.shuffle(held)
                wanted, victims = size * len(left), []
                while wanted > 0:
                    victims.append(held.pop())
                    wanted -= victims[-1].payload_bytes
                evicted_bytes += sum(victim.payload_bytes for victim in victims)
                assert set(tier.delete([victim.key for victim in victims])) == {Outcome.OK}
    assert evicted_bytes > 4 * 32 * MIB
    assert evicted_bytes < written_bytes
    assert tier.faults() == {}
    tier.check_integrity()


def test_below_the_floor_sparse_segments_go_back_to_the_disk(opened: OPEN, tmp_path: Path) -> None:
    tier = opened()
    blocks = filled(tier)
    tier.close()
    status = os.statvfs(tmp_path)
    tier = opened(min_free_bytes=status.f_blocks * status.f_frsize)
    before = tier.taken_bytes()
    left = make_sparse(tier, blocks, share=0.5)
    assert tier.taken_bytes() < 0.6 * before
    assert fetched(tier, left) == [Outcome.OK] * len(left)
    tier.check_integrity()


def test_a_damaged_block_is_not_moved(opened: OPEN, tmp_path: Path) -> None:
    tier = opened()
    left = make_sparse(tier, filled(tier))
    for path in (tmp_path / "ssd" / "segments").iterdir():
        with open(path, "r+b") as file:
            for slot in range(0, path.stat().st_size, 8 * 8192):
                file.seek(slot + 5000)
                file.write(b"damage")
    index = tier._ledger.index
    damaged = {
        entry.meta.key: entry.place
        for entry in index.get([one.key for one in left])
        if entry is not None and entry.place.slot % 8 == 0
    }
    assert damaged
    large = [meta(100_000 + number, LARGE) for number in range(15)]
    store(tier, large)
    assert damaged == {entry.meta.key: entry.place for entry in index.get(list(damaged)) if entry is not None}
    outcomes = fetched(tier, left)
    assert set(outcomes) == {Outcome.OK, Outcome.CORRUPT}
    assert tier.faults() == {"corrupt": outcomes.count(Outcome.CORRUPT)}
    tier.check_integrity()


def test_blocks_that_go_while_they_are_moved_stay_gone(opened: OPEN, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened()
    left = make_sparse(tier, filled(tier))
    real = BlockIndex.move

    def late(index: BlockIndex, entries: Any, places: Any) -> list[bool]:
        assert tier.delete([entries[0].meta.key]) == [Outcome.OK]
        gone.append(entries[0].meta)
        return real(index, entries, places)

    gone: list[BlockMeta] = []
    monkeypatch.setattr(BlockIndex, "move", late)
    store(tier, [meta(100_000, LARGE)])
    assert gone
    assert set(fetched(tier, gone)) == {Outcome.MISS}
    kept = [block for block in left if block not in gone]
    assert set(fetched(tier, kept)) == {Outcome.OK}
    tier.check_integrity()


def test_a_disk_that_fails_while_blocks_are_moved_leaves_them_where_they_were(
    opened: OPEN, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened()
    left = make_sparse(tier, filled(tier))

    def fails(*_: object) -> None:
        raise TierUnavailable("no")

    with monkeypatch.context() as patch:
        patch.setattr(BlockIndex, "move", fails)
        assert store(tier, [meta(100_000, LARGE)]) == [Outcome.FULL]
    assert tier.faults() == {"not_emptied": 1}
    assert fetched(tier, left) == [Outcome.OK] * len(left)
    tier.check_integrity()
    assert store(tier, [meta(100_000, LARGE)]) == [Outcome.OK]


def test_a_segment_waits_for_those_who_read_from_it(opened: OPEN, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks were moved, but older reads may still be under way in its file."""
    tier = opened()
    left = make_sparse(tier, filled(tier))
    segments: Segments = tier._segments
    moved: list[int] = []
    real = Emptier.empty

    def counted(emptier: Emptier, index: BlockIndex, number: int) -> int:
        moved.append(real(emptier, index, number))
        return moved[-1]

    monkeypatch.setattr(Emptier, "empty", counted)
    with segments.reading():
        assert store(tier, [meta(100_000, LARGE)]) == [Outcome.FULL]
    assert store(tier, [meta(100_000, LARGE)]) == [Outcome.OK]
    assert len(moved) == 1
    assert fetched(tier, left) == [Outcome.OK] * len(left)
    tier.check_integrity()
