"""What every tier promises, run on each of them, the one that stores nothing and the one that fails included."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from kvstore.core.block import BlockMeta
from kvstore.core.outcome import Outcome, TierKind
from tests.support.blocks import blank, key, meta, payload, recovered
from tiers.base import Tier
from tiers.codec import PLAIN, Codec
from tiers.faulty import FaultyTier, SeededPlan
from tiers.keys import KeyRing
from tiers.noop import NoopTier
from tiers.ram import RamTier
from tiers.region import Region
from tiers.s3 import S3Tier
from tiers.ssd import SsdTier

STORING = ["ram", "ssd", "ssd_encrypted", "s3", "s3_encrypted", "s3_obstore"]
ALL = [*STORING, "noop", "faulty"]
ENCRYPTING = Codec(KeyRing(bytes(range(32))))
CODECS = {"ssd": PLAIN, "s3": PLAIN, "s3_obstore": PLAIN, "ssd_encrypted": ENCRYPTING, "s3_encrypted": ENCRYPTING}
# What `tiers/base.py` allows each call to answer.
CONTAINS = DELETE = {Outcome.OK, Outcome.MISS, Outcome.UNAVAILABLE}
READ = {Outcome.OK, Outcome.MISS, Outcome.CORRUPT, Outcome.UNAVAILABLE}
WRITE = {Outcome.OK, Outcome.EXISTS, Outcome.FULL, Outcome.UNAVAILABLE}

# Named here, so that it starts before a test's own fixtures look at what is open.
pytestmark = pytest.mark.usefixtures("s3_server")

on_all_tiers = pytest.mark.parametrize("tier", ALL, indirect=True)
on_storing_tiers = pytest.mark.parametrize("tier", STORING, indirect=True)


@pytest.fixture
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    if request.param == "noop":
        yield NoopTier(TierKind.SSD)
    elif request.param.startswith("s3"):
        client = "obstore" if request.param == "s3_obstore" else "boto3"
        open_s3 = cast("Callable[..., S3Tier]", request.getfixturevalue("open_s3"))
        yield open_s3(client=client, codec=CODECS[request.param])
    elif request.param in ("ssd", "ssd_encrypted"):
        ssd = SsdTier(tmp_path / "ssd", max_bytes=32 << 20, codec=CODECS[request.param])
        yield ssd
        ssd.close()
    else:
        region = Region.create(tmp_path / "region", 8 << 20, 1)
        ram = RamTier(region)
        yield FaultyTier(ram, SeededPlan(3, rate=0.3)) if request.param == "faulty" else ram
        ram.check_integrity()
        region.close()


def store(tier: Tier, blocks: list[BlockMeta]) -> list[Outcome]:
    return tier.write(blocks, [payload(block) for block in blocks])


def fetch(tier: Tier, blocks: list[BlockMeta]) -> list[Outcome]:
    """Read the blocks; every one that answers OK must have the right bytes."""
    into = [blank(block) for block in blocks]
    outcomes = tier.read(blocks, into)
    for block, view, outcome in zip(blocks, into, outcomes, strict=True):
        assert outcome is not Outcome.OK or view == payload(block)
    return outcomes


# ---------------------------------------------------------------- every tier


@on_all_tiers
def test_each_call_answers_once_per_key_and_only_what_it_may(tier: Tier) -> None:
    blocks = [meta(i, 1000 * (i + 1)) for i in range(12)]
    keys = [block.key for block in blocks]
    for _ in range(3):
        for outcomes, allowed in (
            (store(tier, blocks), WRITE),
            (tier.contains(keys), CONTAINS),
            (fetch(tier, blocks), READ),
            (tier.delete(keys[::2]), DELETE),
        ):
            assert len(outcomes) in (12, 6)
            assert set(outcomes) <= allowed


@on_all_tiers
def test_only_what_was_stored_is_found(tier: Tier) -> None:
    blocks = [meta(i) for i in range(20)]
    stored = [block for block, outcome in zip(blocks, store(tier, blocks), strict=True) if outcome is Outcome.OK]
    for block, outcome in zip(blocks, fetch(tier, blocks), strict=True):
        assert outcome is not Outcome.OK or block in stored


@on_all_tiers
def test_an_empty_batch_has_an_empty_answer(tier: Tier) -> None:
    assert tier.contains([]) == tier.read([], []) == tier.write([], []) == tier.delete([]) == []


@on_all_tiers
def test_an_unknown_block_is_a_miss(tier: Tier) -> None:
    assert set(tier.contains([key(i) for i in range(5)])) <= {Outcome.MISS, Outcome.UNAVAILABLE}
    assert Outcome.OK not in fetch(tier, [meta(i) for i in range(5)])


@on_all_tiers
def test_views_of_the_wrong_length_are_a_fault_of_the_caller(tier: Tier) -> None:
    for call in (tier.read, tier.write):
        with pytest.raises(ValueError):
            call([meta(1, 100)], [memoryview(bytearray(101))])
        with pytest.raises(ValueError):
            call([meta(1, 100)], [])


@on_all_tiers
def test_a_tier_names_itself_and_its_use_and_closes_twice(tier: Tier) -> None:
    assert isinstance(tier.kind, TierKind)
    usage = tier.usage()
    assert (usage.blocks, usage.used_bytes) == (0, 0)
    assert recovered(tier) == []
    tier.close()
    tier.close()


# ---------------------------------------------------------------- tiers that store


@on_storing_tiers
@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 4097, 12288, 100_001, 737_280])
def test_a_block_of_any_length_comes_back(tier: Tier, num_bytes: int) -> None:
    assert store(tier, [meta(1, num_bytes)]) == [Outcome.OK]
    assert tier.contains([key(1)]) == [Outcome.OK]
    assert fetch(tier, [meta(1, num_bytes)]) == [Outcome.OK]


@on_storing_tiers
def test_a_batch_answers_in_order(tier: Tier) -> None:
    store(tier, [meta(2), meta(4)])
    assert store(tier, [meta(i) for i in range(5)]) == [
        Outcome.OK,
        Outcome.OK,
        Outcome.EXISTS,
        Outcome.OK,
        Outcome.EXISTS,
    ]
    assert tier.contains([key(9), key(4), key(0)]) == [Outcome.MISS, Outcome.OK, Outcome.OK]
    assert fetch(tier, [meta(3), meta(8), meta(1)]) == [Outcome.OK, Outcome.MISS, Outcome.OK]


@on_storing_tiers
def test_a_block_that_is_there_is_left_alone(tier: Tier) -> None:
    store(tier, [meta(1)])
    assert tier.write([meta(1)], [payload(meta(1), salt=1)]) == [Outcome.EXISTS]
    assert fetch(tier, [meta(1)]) == [Outcome.OK]


@on_storing_tiers
def test_a_block_twice_in_one_batch_is_stored_once(tier: Tier) -> None:
    assert store(tier, [meta(1), meta(1)]) == [Outcome.OK, Outcome.EXISTS]
    assert tier.usage().blocks == 1
    assert fetch(tier, [meta(1), meta(1)]) == [Outcome.OK, Outcome.OK]


@on_storing_tiers
def test_a_deleted_block_is_gone_and_can_be_stored_again(tier: Tier) -> None:
    store(tier, [meta(1), meta(2)])
    assert tier.delete([key(1)]) == [Outcome.OK]
    # S3 does not tell whether there was something to delete.
    assert tier.delete([key(1)]) == [Outcome.OK if tier.kind is TierKind.S3 else Outcome.MISS]
    assert tier.contains([key(1), key(2)]) == [Outcome.MISS, Outcome.OK]
    assert fetch(tier, [meta(1)]) == [Outcome.MISS]
    assert store(tier, [meta(1)]) == [Outcome.OK]
    assert fetch(tier, [meta(1)]) == [Outcome.OK]


@on_storing_tiers
def test_another_block_under_the_same_key_is_corrupt_and_goes(tier: Tier) -> None:
    store(tier, [meta(1)])
    other = BlockMeta(key(1), key(7), meta(1).namespace, 1, meta(1).payload_bytes)
    assert tier.read([other], [blank(other)]) == [Outcome.CORRUPT]
    assert tier.contains([key(1)]) == [Outcome.MISS]


@on_storing_tiers
def test_a_block_of_another_length_is_corrupt(tier: Tier) -> None:
    store(tier, [meta(1, 8192)])
    assert fetch(tier, [meta(1, 4096)]) == [Outcome.CORRUPT]


@on_storing_tiers
def test_use_follows_what_is_stored(tier: Tier) -> None:
    store(tier, [meta(i) for i in range(4)])
    usage = tier.usage()
    assert usage.blocks == 4
    assert usage.used_bytes >= 4 * 8192
    assert usage.capacity_bytes is None or usage.capacity_bytes >= usage.used_bytes
    tier.delete([key(i) for i in range(4)])
    assert tier.usage().blocks == 0


@on_storing_tiers
def test_many_threads_at_once_see_whole_blocks(tier: Tier) -> None:
    blocks = [meta(i, 20_000) for i in range(24)]
    with ThreadPoolExecutor(6) as pool:
        for outcomes in pool.map(lambda i: store(tier, blocks[i % 4 * 6 :][:6]), range(8)):
            assert set(outcomes) <= {Outcome.OK, Outcome.EXISTS}
        for outcomes in pool.map(lambda _: fetch(tier, blocks), range(6)):
            assert outcomes == [Outcome.OK] * 24
