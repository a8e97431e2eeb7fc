"""Fetches: every block is answered once and in time, from the fastest tier that can, and pinned until released."""

from collections.abc import Callable

import pytest

from kvstore import wire
from kvstore.core.errors import ProtocolError
from kvstore.core.key import join_keys
from kvstore.core.outcome import Outcome, TierKind
from kvstore.store import store as store_module
from kvstore.store.engines import Engine
from tests.support.chats import Prefix, namespace
from tests.support.rig import Rig, memory
from tiers.faulty import Fault, FaultyTier, ScriptedPlan

NAMESPACE = namespace()
MakeRig = Callable[..., Rig]


def evict(rig: Rig, *tiers: str, drop: bool = False) -> wire.Evicted:
    replies: list[wire.Message] = []
    rig.store.evict(wire.Evict(list(tiers), drop), replies.append)
    rig.settle()
    (answer,) = replies
    assert isinstance(answer, wire.Evicted)
    return answer


def stored(rig: Rig, prefix: Prefix, tier: str) -> Engine:
    """An engine, and the prefix in that tier alone."""
    engine = rig.attach(prefix.namespace)
    assert set(rig.put(engine, prefix.namespace, prefix.keys)) == {Outcome.OK}
    rig.settle()
    if tier == "s3":
        to_bucket = rig.store._demoters[TierKind.S3]
        for key in prefix.keys:
            to_bucket.add(rig.store._catalog.find(key))
        rig.settle()
    evict(rig, *{"ram": [], "ssd": ["ram"], "s3": ["ram", "ssd"]}[tier] or ["ram"]) if tier != "ram" else None
    assert {kind.label for kind in rig.lookup(engine, prefix.keys)} == {tier}
    return engine


def test_blocks_come_from_wherever_they_are(make_rig: MakeRig) -> None:
    prefix = Prefix(NAMESPACE, 1, 6)
    for tier in ("ram", "ssd", "s3"):
        rig = make_rig(tier, ssd=memory(TierKind.SSD), s3=memory(TierKind.S3))
        engine = stored(rig, prefix, tier)
        fetch = rig.fetch(engine, prefix.keys)
        assert fetch.outcomes == [Outcome.OK] * 6
        assert {kind.label for kind in fetch.sources.values()} == {tier}
        assert set(rig.fetch(engine, prefix.keys).sources.values()) == {TierKind.RAM}
        rig.check()


def test_the_first_message_comes_in_the_next_turn_and_names_the_lease(make_rig: MakeRig) -> None:
    """An engine that gave up before anything had landed could not say what it gave up, and its pins stayed."""
    rig = make_rig(ssd=memory(TierKind.SSD))
    prefix = Prefix(NAMESPACE, 1, 3)
    engine = stored(rig, prefix, "ssd")
    fetch = rig.begin_fetch(engine, prefix.keys)
    rig.turn()
    assert fetch.lease > 0 and not fetch.answers
    fetch.release()
    rig.turn()
    assert fetch.done
    rig.check()


def test_what_has_not_landed_at_the_deadline_is_told_to_be_too_late(make_rig: MakeRig) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD))
    prefix = Prefix(NAMESPACE, 1, 6)
    engine = stored(rig, prefix, "ssd")
    fetch = rig.begin_fetch(engine, prefix.keys, deadline_s=0.5)
    rig.turn()
    rig.links[TierKind.SSD].work(2)
    rig.turn()
    rig.clock.now += 0.49
    rig.turn()
    assert not fetch.done
    assert rig.store.next_deadline() <= rig.clock.now + 0.011
    rig.clock.now += 0.02
    rig.turn()
    assert fetch.done
    assert fetch.outcomes == [Outcome.OK] * 2 + [Outcome.TIMED_OUT] * 4
    fetch.copy()
    fetch.release()
    rig.check()


def test_a_fetch_of_more_than_ram_holds_gets_all_if_it_releases_as_it_goes(make_rig: MakeRig) -> None:
    rig = make_rig(ram_bytes=8 * 8192, ssd=memory(TierKind.SSD))
    prefix = Prefix(NAMESPACE, 1, 30)
    engine = rig.attach(NAMESPACE)
    for start in range(0, 30, 5):
        assert set(rig.put(engine, NAMESPACE, prefix.keys[: start + 5], start)) == {Outcome.OK}
        rig.settle()
    assert rig.fetch(engine, prefix.keys).outcomes == [Outcome.OK] * 30
    rig.check()


def test_a_fetch_of_more_than_ram_holds_that_releases_nothing_ends_at_its_deadline(make_rig: MakeRig) -> None:
    rig = make_rig(ram_bytes=8 * 8192, ssd=memory(TierKind.SSD))
    prefix = Prefix(NAMESPACE, 1, 16)
    engine = rig.attach(NAMESPACE)
    for start in range(0, 16, 4):
        rig.put(engine, NAMESPACE, prefix.keys[: start + 4], start)
        rig.settle()
    evict(rig, "ram")
    fetch = rig.begin_fetch(engine, prefix.keys, deadline_s=2.0)
    rig.settle(seconds=2.5)
    assert fetch.done
    assert fetch.outcomes.count(Outcome.OK) == 8 and fetch.outcomes.count(Outcome.TIMED_OUT) == 8
    fetch.copy(release=False)
    fetch.release()
    rig.check()


def test_two_fetches_of_one_block_read_it_once(make_rig: MakeRig) -> None:
    disk = memory(TierKind.SSD)
    plan = ScriptedPlan()
    rig = make_rig(ssd=FaultyTier(disk, plan))
    prefix = Prefix(NAMESPACE, 1, 3)
    engine = stored(rig, prefix, "ssd")
    plan.add("read", [None] * 3 + [Fault(Outcome.CORRUPT)] * 3)
    fetches = [rig.begin_fetch(engine, prefix.keys) for _ in range(2)]
    rig.settle()
    for fetch in fetches:
        assert fetch.outcomes == [Outcome.OK] * 3
        fetch.copy()
        fetch.release()
    rig.check()


@pytest.mark.parametrize("fault", [Outcome.CORRUPT, Outcome.MISS, Outcome.UNAVAILABLE])
def test_where_the_ssd_fails_the_bucket_serves(make_rig: MakeRig, fault: Outcome) -> None:
    plan = ScriptedPlan()
    rig = make_rig(ssd=FaultyTier(memory(TierKind.SSD), plan), s3=memory(TierKind.S3))
    prefix = Prefix(NAMESPACE, 1, 3)
    engine = rig.attach(NAMESPACE)
    rig.put(engine, NAMESPACE, prefix.keys)
    rig.settle()
    for key in prefix.keys:
        rig.store._demoters[TierKind.S3].add(rig.store._catalog.find(key))
    rig.settle()
    evict(rig, "ram")
    plan.add("read", [Fault(fault)] * 3)
    fetch = rig.fetch(engine, prefix.keys)
    assert fetch.outcomes == [Outcome.OK] * 3
    assert set(fetch.sources.values()) == {TierKind.S3}
    errors = rig.stats()["errors"]
    assert errors.get("ssd_corrupt", 0) == (3 if fault == Outcome.CORRUPT else 0)
    rig.check()


@pytest.mark.parametrize("fault", [Outcome.CORRUPT, Outcome.MISS])
def test_a_copy_that_is_broken_or_gone_is_known_no_more_and_can_be_stored_again(
    make_rig: MakeRig, fault: Outcome
) -> None:
    plan = ScriptedPlan()
    rig = make_rig(ssd=FaultyTier(memory(TierKind.SSD), plan))
    prefix = Prefix(NAMESPACE, 1, 3)
    engine = stored(rig, prefix, "ssd")
    plan.add("read", [None, Fault(fault)])
    assert rig.fetch(engine, prefix.keys).outcomes == [Outcome.OK, fault, Outcome.OK]
    found = rig.store.lookup(engine, wire.Lookup(join_keys(prefix.keys)))
    assert len(found.tiers) == 1 and found.why == ("corrupt" if fault == Outcome.CORRUPT else "lost")
    assert rig.put(engine, NAMESPACE, prefix.keys)[1] == Outcome.OK
    rig.settle()
    evict(rig, "ram")
    assert rig.fetch(engine, prefix.keys).outcomes == [Outcome.OK] * 3
    rig.check()


def test_blocks_too_large_for_this_ram_do_not_hold_up_the_others(make_rig: MakeRig) -> None:
    """After a restart with less RAM a block of the old size waited for a slot for ever, and all loads behind it."""
    large = Prefix(namespace("large", block_bytes=20 * 8192), 1, 2)
    small = Prefix(NAMESPACE, 2, 2)
    disk = memory(TierKind.SSD)
    before = make_rig("before", ram_bytes=100 * 8192, ssd=disk)
    for prefix in (large, small):
        before.put(before.attach(prefix.namespace), prefix.namespace, prefix.keys)
        before.settle()
    rig = make_rig("after", ram_bytes=8 * 8192, ssd=disk, ssd_records=before.ssd_records)
    with pytest.raises(ProtocolError, match="do not fit"):
        rig.attach(large.namespace)
    block = rig.store._catalog.find(large.keys[0])
    assert rig.store._loader.load(block, lambda *_: None) == Outcome.FULL
    assert rig.fetch(rig.attach(NAMESPACE), small.keys).outcomes == [Outcome.OK] * 2
    rig.check()


def test_a_lease_that_is_never_released_ends(make_rig: MakeRig) -> None:
    rig = make_rig(ram_bytes=8 * 8192)
    engine = rig.attach(NAMESPACE)
    first, second = Prefix(NAMESPACE, 1, 8), Prefix(NAMESPACE, 2, 8)
    rig.put(engine, NAMESPACE, first.keys)
    fetch = rig.begin_fetch(engine, first.keys, deadline_s=1.0)
    rig.turn()
    assert set(rig.put(engine, NAMESPACE, second.keys)) == {Outcome.BUSY}
    rig.settle(seconds=32.0)
    assert set(rig.put(engine, NAMESPACE, second.keys)) == {Outcome.OK}
    slot = next(iter(fetch.slots.values()))
    assert rig.region.generation(slot.offset) != slot.generation
    rig.check()


def test_an_engine_that_dies_gives_back_what_it_had_pinned(make_rig: MakeRig) -> None:
    rig = make_rig(ram_bytes=8 * 8192)
    dying, other = rig.attach(NAMESPACE), rig.attach(NAMESPACE)
    rig.put(dying, NAMESPACE, Prefix(NAMESPACE, 1, 8).keys)
    fetch = rig.begin_fetch(dying, Prefix(NAMESPACE, 1, 8).keys, deadline_s=500.0)
    rig.turn()
    fetch.given_up = True
    assert set(rig.put(other, NAMESPACE, Prefix(NAMESPACE, 2, 8).keys)) == {Outcome.BUSY}
    rig.die(dying)
    rig.turn()
    assert set(rig.put(other, NAMESPACE, Prefix(NAMESPACE, 2, 8).keys)) == {Outcome.OK}
    rig.check()


def test_nobody_releases_anothers_lease(make_rig: MakeRig) -> None:
    rig = make_rig()
    owner, other = rig.attach(NAMESPACE), rig.attach(NAMESPACE)
    rig.put(owner, NAMESPACE, Prefix(NAMESPACE, 1, 2).keys)
    fetch = rig.begin_fetch(owner, Prefix(NAMESPACE, 1, 2).keys)
    rig.turn()
    rig.store.release(other, wire.Release(fetch.lease))
    assert len(rig.store._leases) == 1
    rig.store.release(owner, wire.Release(fetch.lease, [0, 5, 99, -1]))
    assert len(rig.store._leases) == 1
    rig.store.release(owner, wire.Release(fetch.lease, [1]))
    assert len(rig.store._leases) == 0
    rig.store.release(owner, wire.Release(fetch.lease))
    rig.check()


def test_there_is_an_end_to_leases(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_LEASES", 3)
    rig = make_rig()
    engine = rig.attach(NAMESPACE)
    keys = Prefix(NAMESPACE, 1, 1).keys
    rig.put(engine, NAMESPACE, keys)
    for _ in range(3):
        rig.begin_fetch(engine, keys)
        rig.turn()
    with pytest.raises(ProtocolError, match="not released"):
        rig.begin_fetch(engine, keys)
    rig.settle(seconds=40)
    assert rig.fetch(engine, keys).outcomes == [Outcome.OK]


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, 601.0, float("nan"), float("inf")])
def test_a_deadline_that_is_none_is_refused(make_rig: MakeRig, deadline_s: float) -> None:
    rig = make_rig()
    with pytest.raises(ProtocolError, match="deadline_s"):
        rig.begin_fetch(rig.attach(NAMESPACE), Prefix(NAMESPACE, 1, 1).keys, deadline_s)


def test_a_fetch_may_name_a_block_twice_and_blocks_that_are_nowhere(make_rig: MakeRig) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD))
    prefix = Prefix(NAMESPACE, 1, 1)
    engine = stored(rig, prefix, "ssd")
    unknown = Prefix(NAMESPACE, 9, 1).keys
    fetch = rig.fetch(engine, [*prefix.keys, *unknown, *prefix.keys, *unknown])
    assert fetch.outcomes == [Outcome.OK, Outcome.MISS, Outcome.OK, Outcome.MISS]
    rig.check()


def test_the_worker_that_dies_under_a_load_costs_a_miss_and_gives_the_slot_back_when_it_is_gone(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD))
    prefix = Prefix(NAMESPACE, 1, 6)
    engine = stored(rig, prefix, "ssd")
    fetch = rig.begin_fetch(engine, prefix.keys)
    rig.turn()
    rig.links[TierKind.SSD].die()
    rig.settle(seconds=0.2)
    assert fetch.done and set(fetch.outcomes) == {Outcome.UNAVAILABLE}
    assert rig.stats()["tiers"]["ssd"]["state"] == "down"
    rig.settle(seconds=1.0)
    assert rig.fetch(engine, prefix.keys).outcomes == [Outcome.OK] * 6
    rig.check()
