"""Copies that no key opens: kept, until a write needs their name or their room."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.core.outcome import Outcome
from tests.support.blocks import key
from tests.support.s3tier import fetch, store
from tiers import otherkeys
from tiers.codec import Codec
from tiers.keys import KeyRing
from tiers.otherkeys import OtherKeys
from tiers.s3 import S3Tier
from tiers.ssd import SsdTier

KEY, OTHER = Codec(KeyRing(bytes(range(32)))), Codec(KeyRing(bytes(range(50, 82))))
Open = Callable[[Codec], SsdTier | S3Tier]

pytestmark = pytest.mark.usefixtures("s3_server")


@pytest.fixture(params=["ssd", "s3"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    tiers: list[SsdTier] = []

    def open_tier(codec: Codec) -> SsdTier | S3Tier:
        if request.param == "s3":
            tier: S3Tier = request.getfixturevalue("open_s3")(codec=codec)
            return tier
        if tiers:
            tiers[-1].close()
        tiers.append(SsdTier(tmp_path / "ssd", max_bytes=2 << 20, codec=codec, lock_wait_s=0.0))
        return tiers[-1]

    yield open_tier
    if tiers:
        tiers[-1].close()


def test_a_block_of_another_key_that_was_missed_can_be_stored_again(opened: Open) -> None:
    """The new copy found the old one there and was taken for stored, though nobody could read it."""
    store(opened(KEY), 1, 2)
    tier = opened(OTHER)
    assert fetch(tier, 1) == [Outcome.MISS]
    assert tier.contains([key(1)]) == [Outcome.MISS]
    assert store(tier, 1) == [Outcome.OK]
    assert fetch(tier, 1) == [Outcome.OK]
    assert tier.contains([key(1)]) == [Outcome.OK]
    assert fetch(opened(KEY), 1, 2) == [Outcome.MISS, Outcome.OK], "the other one was left alone"


def test_blocks_of_another_key_that_were_missed_give_way_where_there_is_no_room(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path / "ssd", max_bytes=2 << 20, codec=KEY)
    outcomes = store(tier, *range(200))
    held = outcomes.count(Outcome.OK)
    assert Outcome.FULL in outcomes
    tier.close()
    tier = SsdTier(tmp_path / "ssd", max_bytes=2 << 20, codec=OTHER)
    assert store(tier, 300) == [Outcome.FULL]
    fetch(tier, *range(10))
    assert store(tier, 300, 301, 302) == [Outcome.OK] * 3
    assert tier.usage().blocks == held
    tier.check_integrity()
    tier.close()


def test_only_so_many_are_remembered_the_last_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otherkeys, "MAX_KEPT", 3)
    copies: OtherKeys[int] = OtherKeys()
    for number in range(5):
        copies.add(key(number), number)
    assert [key(number) in copies for number in range(5)] == [False, False, True, True, True]
    copies.add(key(2), 2)
    assert copies.take([key(4), key(9)]) == [4]
    assert copies.take_oldest(9) == [3, 2]
    assert copies.take([key(2)]) == []
