"""What a request stored stays in RAM until its session is recorded, where only that brings it to another tier."""

from collections.abc import Callable
from typing import Any

import pytest

from kvstore import wire
from kvstore.config import RamConfig, SsdConfig
from kvstore.core.outcome import Outcome, TierKind
from kvstore.store.engines import Engine
from kvstore.store.unclaimed import Unclaimed
from tests.support.chats import Prefix, namespace
from tests.support.clock import Clock
from tests.support.rig import Rig, memory
from tests.support.sessions import NAMESPACE, Bucket, put

MakeRig = Callable[..., Rig]
RAM = RamConfig(policy="lru", high_watermark=0.95, low_watermark=0.9)


def newest_goes_first(rig: Rig) -> None:
    """As with a policy that expects nothing of the last blocks of new prompts."""
    room = rig.store._room

    def victims(_: int) -> list[int]:
        in_ram = reversed(rig.store._catalog.blocks_resident(TierKind.RAM))
        may_go = (block for block in in_ram if not room._in_ram.pinned(block) and not room._in_ram.children(block))
        return list(may_go)[:1]

    room.policies[TierKind.RAM].victims = victims  # type: ignore[method-assign]


def attach(rig: Rig) -> Engine:
    """Where sessions are recorded."""
    engine = rig.attach(NAMESPACE)
    rig.put(engine, NAMESPACE, Prefix(NAMESPACE, 99, 1).keys)
    rig.store.session_put(engine, put(1, session_id="first", seed=99))
    rig.settle()
    rig.store.evict(wire.Evict(["ram"]), lambda _: None)
    assert rig.ram.usage().blocks == 0 or not rig.links
    return engine


def awaited(rig: Rig, num_blocks: int) -> list[bool]:
    """Of the blocks of the first prompt, whether they stay."""
    ids = [rig.store._catalog.find(key) for key in Prefix(NAMESPACE, 1, num_blocks).keys]
    return [rig.store._writing.is_awaited(block) for block in ids]


def record(rig: Rig, seed: int, num_blocks: int) -> None:
    engine = next(iter(rig.engines))
    rig.store.session_put(engine, put(num_blocks, session_id=f"chat-{seed}", seed=seed))
    rig.settle()


def durable(rig: Rig, seed: int) -> str:
    view = rig.store._session_table.find(f"chat-{seed}", "", b"")
    return rig.store._session_table.durable(view)


@pytest.mark.parametrize("has_disk", [False, True])
def test_a_turn_is_whole_when_its_session_is_recorded(make_rig: MakeRig, bucket: Bucket, has_disk: bool) -> None:
    """Its last block left RAM for one that the bucket had, too, and the turn was not durable before the next one."""
    options: dict[str, Any] = {"ram_bytes": 256 * 8192, "ram_config": RAM, **bucket.options()}
    if has_disk:
        options |= {"ssd": memory(TierKind.SSD), "ssd_config": SsdConfig(admission="second_touch")}
    rig = make_rig(**options)
    newest_goes_first(rig)
    engine = attach(rig)
    for seed in range(6):
        prefix = Prefix(NAMESPACE, seed, 60)
        assert rig.put(engine, NAMESPACE, prefix.keys) == [Outcome.OK] * 60
        rig.settle()
        record(rig, seed, 60)
        assert durable(rig, seed) == "s3"
    assert rig.stats()["tiers"]["ram"]["evicted_blocks"] > 100
    rig.check()


def test_what_nobody_names_keeps_nobody_out(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(ram_config=RAM, **bucket.options())
    engine = attach(rig)
    for seed in range(8):
        rig.settle(seconds=1.0)
        assert rig.put(engine, NAMESPACE, Prefix(NAMESPACE, seed, 40).keys) == [Outcome.OK] * 40
    rig.check()


def test_what_is_written_down_anyway_takes_no_part_of_what_may_be_kept(make_rig: MakeRig) -> None:
    rig = make_rig(ram_config=RAM, ssd=memory(TierKind.SSD))
    engine = attach(rig)
    rig.put(engine, NAMESPACE, Prefix(NAMESPACE, 1, 4).keys)
    assert all(awaited(rig, 4))
    rig.settle()
    rig.fetch(engine, Prefix(NAMESPACE, 1, 4).keys)
    assert not any(awaited(rig, 4))
    assert not rig.store._writing.give_up()


def test_a_prefix_that_is_used_again_is_kept_with_what_follows(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(ram_config=RAM, **bucket.options())
    engine = attach(rig)
    rig.put(engine, NAMESPACE, Prefix(NAMESPACE, 1, 3).keys)
    rig.clock.now += 121.0
    assert not any(awaited(rig, 3))
    rig.fetch(engine, Prefix(NAMESPACE, 1, 2).keys)
    assert awaited(rig, 3) == [True, True, False]


def test_an_id_that_ends_is_not_kept_for_the_next_block(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(ram_config=RAM, **bucket.options())
    prefix = Prefix(NAMESPACE, 1, 1)
    rig.put(attach(rig), NAMESPACE, prefix.keys)
    block = rig.store._catalog.find(prefix.keys[0])
    assert rig.store._writing.is_awaited(block)
    rig.store.evict(wire.Evict(["ram"], drop=True), lambda _: None)
    rig.settle()
    assert not rig.store._writing.is_awaited(block)


def test_a_store_without_other_tiers_keeps_nothing_back(make_rig: MakeRig) -> None:
    rig = make_rig(ram_config=RAM)
    rig.put(attach(rig), NAMESPACE, Prefix(NAMESPACE, 1, 4).keys)
    assert not any(awaited(rig, 4))


def test_they_are_kept_for_two_minutes_and_up_to_a_budget() -> None:
    clock = Clock(1000.0)
    unclaimed = Unclaimed(4 * 100, lambda _: 100, clock)
    unclaimed.add([1, 2])
    clock.now += 60.0
    unclaimed.add([3, 1])
    assert all(map(unclaimed.holds, (1, 2, 3))) and not unclaimed.holds(4)
    unclaimed.add([4, 5])
    assert [block for block in range(6) if unclaimed.holds(block)] == [1, 3, 4, 5]
    unclaimed.ended(4)
    unclaimed.add([6])
    assert [block for block in range(7) if unclaimed.holds(block)] == [1, 3, 5, 6]
    clock.now += 121.0
    assert not any(map(unclaimed.holds, range(7)))
    unclaimed.add([7])
    assert unclaimed.holds(7) and len(unclaimed._blocks) == 1 and unclaimed._bytes == 100
    assert unclaimed.give_up() and not unclaimed.holds(7) and not unclaimed.give_up()
    unclaimed.add([8, 9, 10, 11])
    assert all(map(unclaimed.holds, (8, 9, 10, 11)))


def test_where_nobody_records_sessions_nothing_is_kept_back(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(ram_config=RAM, **bucket.options())
    rig.put(rig.attach(NAMESPACE), NAMESPACE, Prefix(NAMESPACE, 1, 4).keys)
    assert not any(awaited(rig, 4))


def test_a_block_of_another_size_finds_room_at_once(make_rig: MakeRig, bucket: Bucket) -> None:
    """What was looked for in vain before they were given up was not looked for again for 0.2 s."""
    rig = make_rig(ram_config=RAM, **bucket.options())
    prefix = Prefix(NAMESPACE, 1, 40)
    assert rig.put(attach(rig), NAMESPACE, prefix.keys) == [Outcome.OK] * 40
    # So that no ten neighbours can go.
    rig.store._writing._unclaimed.add([rig.store._catalog.find(key) for key in prefix.keys[6::8]])
    larger = namespace("another", block_bytes=10 * 8192)
    assert rig.put(rig.attach(larger), larger, Prefix(larger, 1, 1).keys) == [Outcome.OK]
    rig.check()
