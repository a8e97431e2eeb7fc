"""The tier that fails to a plan does to each block what the plan says, and no more."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.outcome import Outcome
from tests.support.blocks import blank, key, meta, payload
from tiers.faulty import FAULTS, Fault, FaultyTier, ScriptedPlan, SeededPlan, Verb
from tiers.ram import RamTier
from tiers.region import Region


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[RamTier]:
    region = Region.create(tmp_path / "region", 1 << 20, 1)
    yield RamTier(region)
    region.close()


def store(tier: FaultyTier, *numbers: int) -> list[Outcome]:
    return tier.write([meta(i) for i in numbers], [payload(meta(i)) for i in numbers])


def test_a_script_is_followed_block_by_block(ram: RamTier) -> None:
    plan = ScriptedPlan().add("write", [None, Fault(Outcome.UNAVAILABLE), None, Fault(Outcome.FULL)])
    tier = FaultyTier(ram, plan)
    assert store(tier, 1, 2, 3, 4) == [Outcome.OK, Outcome.UNAVAILABLE, Outcome.OK, Outcome.FULL]
    assert tier.contains([key(i) for i in range(1, 5)]) == [Outcome.OK, Outcome.MISS, Outcome.OK, Outcome.MISS]
    assert store(tier, 2, 4) == [Outcome.OK, Outcome.OK]
    assert tier.faults() == {"unavailable": 1, "full": 1}


def test_a_corrupt_block_is_gone_afterwards(ram: RamTier) -> None:
    tier = FaultyTier(ram, ScriptedPlan().add("read", [Fault(Outcome.CORRUPT)]))
    store(tier, 1)
    assert tier.read([meta(1)], [blank(meta(1))]) == [Outcome.CORRUPT]
    assert tier.contains([key(1)]) == [Outcome.MISS]


def test_an_exception_is_raised_and_a_delay_is_slept(ram: RamTier) -> None:
    slept: list[float] = []
    plan = ScriptedPlan().add("contains", [Fault(delay_s=2.5), Fault(error=OSError("broken"))])
    tier = FaultyTier(ram, plan, sleep=slept.append)
    assert tier.contains([key(1)]) == [Outcome.MISS]
    assert slept == [2.5]
    with pytest.raises(OSError, match="broken"):
        tier.contains([key(1)])


@pytest.mark.parametrize("verb", list(FAULTS))
def test_a_seed_gives_the_same_faults_again(verb: Verb) -> None:
    first, second, other = (SeededPlan(seed, rate=0.5, delay_s=1.0) for seed in (1, 1, 2))
    faults = [[plan.next_fault(verb, key(i)) for i in range(50)] for plan in (first, second, other)]
    assert faults[0] == faults[1] != faults[2]
    assert {fault.outcome for fault in faults[0] if fault is not None} == set(FAULTS[verb])
