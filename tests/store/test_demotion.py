"""Copying down and making room: what goes when, and what happens where it cannot."""

from collections.abc import Callable

import pytest

from kvstore import wire
from kvstore.core.errors import ProtocolError
from kvstore.core.outcome import Outcome, TierKind
from kvstore.worker import ops
from tests.support.chats import Prefix, namespace
from tests.support.rig import Rig, memory
from tiers.faulty import Fault, FaultyTier, ScriptedPlan

NAMESPACE = namespace()
MakeRig = Callable[..., Rig]
PREFIX = Prefix(NAMESPACE, 1, 8)


def test_every_stored_block_goes_to_the_ssd_parents_first_and_in_batches(make_rig: MakeRig) -> None:
    disk = memory(TierKind.SSD)
    rig = make_rig(ssd=disk)
    rig.put(rig.attach(NAMESPACE), NAMESPACE, PREFIX.keys)
    rig.turn()
    sent = [op for op in rig.links[TierKind.SSD].wire.sent if isinstance(op, ops.Write)]
    assert [op.meta.key for op in sent] == PREFIX.keys
    rig.settle()
    assert list(disk.blocks) == PREFIX.keys
    rig.check()


def test_ram_loses_nothing_that_the_ssd_is_about_to_take(make_rig: MakeRig) -> None:
    rig = make_rig(ram_bytes=8 * 8192, ssd=memory(TierKind.SSD))
    engine = rig.attach(NAMESPACE)
    rig.put(engine, NAMESPACE, PREFIX.keys)
    assert set(rig.put(engine, NAMESPACE, Prefix(NAMESPACE, 2, 2).keys)) == {Outcome.BUSY}
    rig.settle()
    assert set(rig.put(engine, NAMESPACE, Prefix(NAMESPACE, 2, 2).keys)) == {Outcome.OK}
    assert rig.lookup(engine, PREFIX.keys) == [TierKind.RAM] * 6 + [TierKind.SSD] * 2
    rig.check()


def test_a_disk_that_takes_nothing_does_not_stop_the_ram_tier(make_rig: MakeRig) -> None:
    """After five refusals a block was left alone in RAM and could never be evicted; RAM filled up with those, and from
    then on every store was told to come back later."""
    plan = ScriptedPlan()
    rig = make_rig(ram_bytes=8 * 8192, ssd=FaultyTier(memory(TierKind.SSD), plan))
    engine = rig.attach(NAMESPACE)
    plan.add("write", [Fault(Outcome.UNAVAILABLE)] * 10_000)
    for seed in range(5):
        assert set(rig.put(engine, NAMESPACE, Prefix(NAMESPACE, seed, 8).keys)) == {Outcome.OK}
        rig.settle()
    assert rig.stats()["errors"]["ssd_write_unavailable"] > 0
    plan.faults["write"].clear()
    rig.settle(seconds=20)
    assert rig.stats()["tiers"]["ssd"]["blocks"] == 8
    rig.check()


def test_a_full_disk_gives_up_its_coldest_blocks_and_no_more_than_are_needed(make_rig: MakeRig) -> None:
    disk = memory(TierKind.SSD, 40)
    rig = make_rig(ssd=disk)
    engine = rig.attach(NAMESPACE)
    for seed in range(20):
        rig.put(engine, NAMESPACE, Prefix(NAMESPACE, seed, 8).keys)
        rig.settle()
        assert len(disk.blocks) > 40 - 8 or seed < 4
    assert disk.most_bytes <= 40 * 8192
    for seed in range(16, 20):
        assert len(rig.lookup(engine, Prefix(NAMESPACE, seed, 8).keys)) == 8
    assert not rig.stats()["errors"], "that is how a full tier takes the next block, and no fault"
    assert {meta.depth for meta, _ in disk.blocks.values()} >= {0}
    rig.check()


def test_a_batch_that_is_refused_for_want_of_room_does_not_empty_the_disk(make_rig: MakeRig) -> None:
    """Every block of the batch asked for the room of sixteen."""
    disk = memory(TierKind.SSD, 200)
    rig = make_rig(ram_bytes=300 * 8192, ssd=disk)
    engine = rig.attach(NAMESPACE)
    rig.put(engine, NAMESPACE, Prefix(NAMESPACE, 1, 200).keys)
    rig.settle()
    rig.put(engine, NAMESPACE, Prefix(NAMESPACE, 2, 40).keys)
    rig.settle()
    assert rig.stats()["tiers"]["ssd"]["evicted_blocks"] <= 60
    assert len(rig.lookup(engine, Prefix(NAMESPACE, 2, 40).keys)) == 40
    assert rig.stats()["tiers"]["ssd"]["queue"] == 0
    rig.check()


def test_a_write_that_failed_is_tried_again_after_a_while(make_rig: MakeRig) -> None:
    disk, plan = memory(TierKind.SSD), ScriptedPlan()
    rig = make_rig(ssd=FaultyTier(disk, plan))
    plan.add("write", [None, Fault(Outcome.UNAVAILABLE)])
    rig.put(rig.attach(NAMESPACE), NAMESPACE, PREFIX.keys)
    rig.settle()
    assert len(disk.blocks) == 7
    rig.settle(seconds=1.5)
    assert len(disk.blocks) == 8
    rig.check()


def test_blocks_stored_while_the_ssd_was_away_are_written_down_when_it_is_back(make_rig: MakeRig) -> None:
    disk = memory(TierKind.SSD)
    rig = make_rig(ssd=disk)
    engine = rig.attach(NAMESPACE)
    link = rig.links[TierKind.SSD]
    link.can_start = False
    link.die()
    rig.settle(seconds=0.2)
    rig.put(engine, NAMESPACE, PREFIX.keys)
    rig.settle(seconds=5.0)
    assert rig.stats()["tiers"]["ssd"]["state"] == "down" and not disk.blocks
    link.can_start = True
    link._answer([ops.Ready()])
    rig.settle(seconds=1.0)
    assert len(disk.blocks) == 8
    rig.check()


def test_with_the_ssd_away_ram_evicts_what_is_only_there(make_rig: MakeRig) -> None:
    rig = make_rig(ram_bytes=8 * 8192, ssd=memory(TierKind.SSD))
    engine = rig.attach(NAMESPACE)
    rig.links[TierKind.SSD].can_start = False
    rig.links[TierKind.SSD].die()
    rig.settle(seconds=0.2)
    for seed in range(100):
        assert set(rig.put(engine, NAMESPACE, Prefix(NAMESPACE, seed, 8).keys)) == {Outcome.OK}
        rig.turn()
    # What waits for the disk is forgotten with the blocks, however long it is away.
    assert len(rig.store._demoters[TierKind.SSD]) <= 8
    assert len(rig.store._demoters[TierKind.SSD]._queue) <= 8
    rig.check()


def test_a_block_that_is_stored_again_while_its_old_copy_is_being_deleted_is_copied_after_that(
    make_rig: MakeRig,
) -> None:
    disk = memory(TierKind.SSD)
    rig = make_rig(ssd=disk)
    engine = rig.attach(NAMESPACE)
    rig.put(engine, NAMESPACE, PREFIX.keys)
    rig.settle()
    rig.store.evict(wire.Evict(["ram", "ssd"], drop=True), lambda _: None)
    assert set(rig.put(engine, NAMESPACE, PREFIX.keys)) == {Outcome.OK}
    rig.settle()
    assert len(disk.blocks) == 8 and rig.stats()["tiers"]["ssd"]["blocks"] == 8
    rig.check()


def test_a_block_that_could_not_be_deleted_is_tried_again(make_rig: MakeRig) -> None:
    disk, plan = memory(TierKind.SSD), ScriptedPlan()
    rig = make_rig(ssd=FaultyTier(disk, plan))
    rig.put(rig.attach(NAMESPACE), NAMESPACE, PREFIX.keys)
    rig.settle()
    plan.add("delete", [Fault(Outcome.UNAVAILABLE)] * 3)
    replies: list[wire.Message] = []
    rig.store.evict(wire.Evict(["ram", "ssd"], drop=True), replies.append)
    rig.settle()
    assert replies == [wire.Evicted({"ram": 8, "ssd": 5}, {"ram": 0, "ssd": 3})]
    assert len(disk.blocks) == 3
    rig.settle(seconds=2.0)
    assert not disk.blocks
    rig.check()


def test_evicting_keeps_what_is_nowhere_else_or_in_use_unless_told_to_drop_it(make_rig: MakeRig) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD))
    engine = rig.attach(NAMESPACE)
    rig.put(engine, NAMESPACE, PREFIX.keys)
    replies: list[wire.Message] = []
    rig.store.evict(wire.Evict(["ram"]), replies.append)
    rig.settle()
    fetch = rig.begin_fetch(engine, PREFIX.keys[:3])
    rig.turn()
    rig.store.evict(wire.Evict(["ram"]), replies.append)
    rig.settle()
    rig.store.evict(wire.Evict(["ssd"]), replies.append)
    rig.settle()
    fetch.release()
    rig.store.evict(wire.Evict(["ram", "ssd"], drop=True), replies.append)
    rig.settle()
    assert replies == [
        wire.Evicted({"ram": 0}, {"ram": 8}),
        wire.Evicted({"ram": 5}, {"ram": 3}),
        wire.Evicted({"ssd": 0}, {"ssd": 8}),
        wire.Evicted({"ram": 3, "ssd": 8}, {"ram": 0, "ssd": 0}),
    ]
    rig.check()


@pytest.mark.parametrize("tiers", [[], ["hbm"], ["s3"], ["ram", "disk"]])
def test_an_order_for_a_tier_that_is_not_there_is_refused(make_rig: MakeRig, tiers: list[str]) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD))
    with pytest.raises(ProtocolError):
        rig.store.evict(wire.Evict(tiers), lambda _: None)


def test_an_order_for_a_tier_that_is_down_is_refused_at_once(make_rig: MakeRig) -> None:
    """It waited for the tier, and whoever had given it for an answer."""
    rig = make_rig(ssd=memory(TierKind.SSD))
    rig.links[TierKind.SSD].die()
    rig.turn()
    rig.clock.now += 0.1
    rig.turn()
    with pytest.raises(ProtocolError, match="does not answer"):
        rig.store.evict(wire.Evict(["ssd"]), lambda _: None)


def test_two_models_share_one_ram(make_rig: MakeRig) -> None:
    other = namespace("other", block_bytes=5 * 8192)
    rig = make_rig(ram_bytes=40 * 8192)
    first, second = rig.attach(NAMESPACE), rig.attach(other)
    for seed in range(6):
        assert set(rig.put(first, NAMESPACE, Prefix(NAMESPACE, seed, 30).keys)) == {Outcome.OK}
        assert set(rig.put(second, other, Prefix(other, seed, 5).keys)) == {Outcome.OK}
        assert rig.fetch(second, Prefix(other, seed, 5).keys).outcomes == [Outcome.OK] * 5
    rig.check()


def test_an_engine_with_another_idea_of_a_namespace_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.attach(NAMESPACE)
    spec = wire.NamespaceSpec(NAMESPACE.digest(), NAMESPACE.root(), "", 4, 8192)
    for changes in ({"block_bytes": 4096}, {"root": b"x" * 32}, {"block_tokens": 5}, {"digest": b"x"}, {"root": b""}):
        values = {name: getattr(spec, name) for name in spec.__struct_fields__} | changes
        with pytest.raises(ProtocolError):
            rig.store.attach(wire.Attach(wire.NamespaceSpec(**values), "nobody"))  # type: ignore[arg-type]
