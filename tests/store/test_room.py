"""What is evicted under each policy, and that nobody waits long for it."""

import itertools
from collections.abc import Callable

import pytest

from kvstore.config import RamConfig, SsdConfig
from kvstore.core.outcome import Outcome, TierKind
from policies.eviction.best import Best
from policies.eviction.choice import NAMES
from tests.store.test_stress import User
from tests.support.chats import Prefix, namespace
from tests.support.rig import Rig, memory

NAMESPACE = namespace()
MakeRig = Callable[..., Rig]


@pytest.mark.parametrize("name", NAMES)
def test_under_every_policy_the_store_keeps_its_promises(make_rig: MakeRig, name: str) -> None:
    rig = make_rig(
        ram_bytes=24 * 8192,
        ssd=memory(TierKind.SSD, 40),
        s3=memory(TierKind.S3),
        ram_config=RamConfig(policy=name, high_watermark=0.9, low_watermark=0.7),  # type: ignore[arg-type]
        ssd_config=SsdConfig(policy=name),  # type: ignore[arg-type]
    )
    user = User(rig, 1)
    for _ in range(200):
        user.step()
    user.finish()
    rig.check()


def test_the_policies_are_those_that_the_configuration_names(make_rig: MakeRig) -> None:
    """Of what came first and was used again, and what came later and was not, each policy gives up another."""
    lost = {}
    for name in ("lru", "fifo"):
        rig = make_rig(name, ram_bytes=9 * 8192, ram_config=RamConfig(policy=name))  # type: ignore[arg-type]
        engine = rig.attach(NAMESPACE)
        first, second, third = (Prefix(NAMESPACE, seed, 4).keys for seed in (1, 2, 3))
        rig.put(engine, NAMESPACE, first)
        rig.put(engine, NAMESPACE, second)
        rig.fetch(engine, first)
        assert set(rig.put(engine, NAMESPACE, third)) == {Outcome.OK}
        lost[name] = [4 - len(rig.lookup(engine, keys)) for keys in (first, second)]
    assert lost["lru"][1] > lost["lru"][0]
    assert lost["fifo"][0] > lost["fifo"][1]


def test_above_the_watermark_some_blocks_go_in_each_turn_until_the_lower_one_is_reached(make_rig: MakeRig) -> None:
    """All of them in one turn stopped the control thread, with a million blocks, for a quarter of a second."""
    small = namespace("small", block_bytes=4096)
    rig = make_rig(ram_bytes=1024 * 4096, ram_config=RamConfig(high_watermark=0.9, low_watermark=0.2))
    engine = rig.attach(small)
    for seed in range(10):
        rig.put(engine, small, Prefix(small, seed, 100).keys)
    left = [rig.stats()["tiers"]["ram"]["blocks"]]
    rig.clock.now += 1.0
    while len(left) < 2 or left[-1] != left[-2]:
        rig.turn()
        left.append(rig.stats()["tiers"]["ram"]["blocks"])
    assert max(before - after for before, after in itertools.pairwise(left)) <= 256
    assert left[-1] == 204
    rig.check()


def test_what_was_to_go_next_stays_if_it_is_used_before_its_turn(make_rig: MakeRig) -> None:
    """Victims are asked for in batches, so that a policy is not searched for every block."""
    small = namespace("small", block_bytes=4096)
    rig = make_rig(ram_bytes=200 * 4096)
    engine = rig.attach(small)
    chains = [Prefix(small, seed, 20).keys for seed in range(10)]
    for keys in chains:
        rig.put(engine, small, keys)
    rig.put(engine, small, Prefix(small, 50, 1).keys)
    assert len(rig.lookup(engine, chains[0])) == 19
    rig.fetch(engine, chains[0][:19])
    rig.put(engine, small, Prefix(small, 51, 15).keys)
    assert len(rig.lookup(engine, chains[0])) == 19
    assert len(rig.lookup(engine, chains[1])) == 5
    rig.check()


def test_victims_are_asked_for_in_batches(make_rig: MakeRig) -> None:
    small = namespace("small", block_bytes=4096)
    rig = make_rig(ram_bytes=200 * 4096)
    engine = rig.attach(small)
    for seed in range(10):
        rig.put(engine, small, Prefix(small, seed, 20).keys)
    policy = rig.store._room.policies[TierKind.RAM]
    searches, victims = [], policy.victims
    policy.victims = lambda wanted: searches.append(wanted) or victims(wanted)  # type: ignore[method-assign, func-returns-value]
    rig.put(engine, small, Prefix(small, 50, 32).keys)
    assert len(searches) == 2
    rig.check()


@pytest.mark.parametrize("name", NAMES)
def test_after_a_restart_the_policy_knows_all_that_the_ssd_holds(make_rig: MakeRig, name: str) -> None:
    disk = memory(TierKind.SSD)
    options = {"ssd": disk, "ssd_config": SsdConfig(policy=name)}  # type: ignore[arg-type]
    first = make_rig("first", **options)
    engine = first.attach(NAMESPACE)
    for seed in range(6):
        first.put(engine, NAMESPACE, Prefix(NAMESPACE, seed, 6).keys)
    first.settle()
    second = make_rig("second", **options)
    assert len(second.store._room.policies[TierKind.SSD]) == 36
    second.check()


def test_a_prompt_that_an_engine_stores_in_pieces_is_one_request(make_rig: MakeRig) -> None:
    """Taken for requests of their own, pieces made gittins worse than lru."""
    rig = make_rig(ram_bytes=100 * 8192, ram_config=RamConfig(policy="gittins"))
    engine, other = rig.attach(NAMESPACE), rig.attach(NAMESPACE)
    keys, others = Prefix(NAMESPACE, 1, 24).keys, Prefix(NAMESPACE, 2, 24).keys
    rig.lookup(engine, keys)
    rig.lookup(other, others)
    for start in (0, 8, 16):
        rig.put(engine, NAMESPACE, keys[: start + 8], start)
        rig.put(other, NAMESPACE, others[: start + 8], start)
        rig.clock.now += 1.0
    policy = rig.store._room.policies[TierKind.RAM]
    assert isinstance(policy, Best)
    own = policy._own
    assert own._worth._lives.end == 4, "of each prompt one for its last block and one for all before it"
    assert set(own._runs.turn[own._runs.at[own._runs.at >= 0]].tolist()) == {1}
    rig.check()
