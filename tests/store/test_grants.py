"""Grants: who may write which block, and what becomes of it when the writer dies or says nothing."""

from collections.abc import Callable

import pytest

from kvstore import wire
from kvstore.core.errors import ProtocolError
from kvstore.core.key import BlockKey, join_keys
from kvstore.core.outcome import Outcome, TierKind
from tests.support.chats import Prefix, namespace
from tests.support.rig import Rig, memory

NAMESPACE = namespace()
MakeRig = Callable[..., Rig]


def outcomes(slots: list[wire.Slot]) -> list[Outcome]:
    return [Outcome(slot.outcome) for slot in slots]


def test_a_block_is_seen_when_it_is_committed_and_not_before(make_rig: MakeRig) -> None:
    rig = make_rig()
    engine = rig.attach(NAMESPACE)
    keys = Prefix(NAMESPACE, 1, 2).keys
    slots = rig.grant(engine, NAMESPACE, keys)
    assert outcomes(slots) == [Outcome.OK, Outcome.OK]
    found = rig.store.lookup(engine, wire.Lookup(join_keys(keys)))
    assert found == wire.Found(b"", Outcome.PENDING)
    for key, slot in zip(keys, slots, strict=True):
        rig.write(key, slot)
    assert rig.commit(engine, [(keys[0], slots[0])]) == [Outcome.OK]
    assert rig.lookup(engine, keys) == [TierKind.RAM]
    assert rig.commit(engine, [(keys[1], slots[1])]) == [Outcome.OK]
    assert rig.fetch(engine, keys).outcomes == [Outcome.OK, Outcome.OK]
    assert outcomes(rig.grant(engine, NAMESPACE, keys)) == [Outcome.EXISTS, Outcome.EXISTS]
    rig.check()


def test_one_writes_the_others_are_told_to_wait_and_may_when_it_died(make_rig: MakeRig) -> None:
    rig = make_rig()
    first, second = rig.attach(NAMESPACE), rig.attach(NAMESPACE)
    keys = Prefix(NAMESPACE, 1, 3).keys
    stale = rig.grant(first, NAMESPACE, keys)
    assert outcomes(rig.grant(second, NAMESPACE, keys)) == [Outcome.PENDING] * 3
    assert rig.fetch(second, keys).outcomes == [Outcome.PENDING] * 3
    rig.die(first)
    rig.turn()
    assert rig.stats()["errors"] == {"engine_died": 1}
    slots = rig.grant(second, NAMESPACE, keys)
    assert outcomes(slots) == [Outcome.OK] * 3
    for old, new in zip(stale, slots, strict=True):
        assert rig.region.generation(old.offset) != old.generation or old.offset != new.offset
    assert rig.commit(second, list(zip(keys, stale, strict=True))) == [Outcome.STALE] * 3
    assert rig.commit(second, list(zip(keys, slots, strict=True))) == [Outcome.OK] * 3
    rig.check()


def test_an_unwritten_grant_leaves_nothing_behind(make_rig: MakeRig) -> None:
    rig = make_rig()
    engine = rig.attach(NAMESPACE)
    keys = Prefix(NAMESPACE, 1, 3).keys
    slots = rig.grant(engine, NAMESPACE, keys)
    assert set(rig.commit(engine, list(zip(keys, slots, strict=True)), written=False)) == {Outcome.CANCELLED}
    assert rig.stats()["tiers"]["ram"]["used_bytes"] == 0
    assert rig.commit(engine, [(keys[0], slots[0])]) == [Outcome.STALE]
    assert rig.put(engine, NAMESPACE, keys) == [Outcome.OK] * 3
    rig.check()


def test_a_commit_of_what_another_engine_was_granted_is_stale(make_rig: MakeRig) -> None:
    rig = make_rig()
    first, second = rig.attach(NAMESPACE), rig.attach(NAMESPACE)
    keys = Prefix(NAMESPACE, 1, 1).keys
    slots = rig.grant(first, NAMESPACE, keys)
    assert rig.commit(second, [(keys[0], slots[0])]) == [Outcome.STALE]
    assert rig.lookup(second, keys) == []
    assert rig.commit(first, [(keys[0], slots[0])]) == [Outcome.OK]
    rig.check()


def test_where_every_slot_is_being_written_a_store_is_told_to_come_back(make_rig: MakeRig) -> None:
    rig = make_rig(ram_bytes=8 * 8192)
    engine = rig.attach(NAMESPACE)
    keys = Prefix(NAMESPACE, 1, 12).keys
    granted = rig.store.store(engine, wire.Store(join_keys(keys), NAMESPACE.root(), 0))
    assert outcomes(granted.slots) == [Outcome.OK] * 8 + [Outcome.BUSY] * 4
    assert granted.retry_s > 0
    assert rig.stats()["store"]["refused"] == {"busy": 4}
    rig.check()


def test_a_full_ram_is_searched_once_for_a_store_and_not_once_for_each_block(make_rig: MakeRig) -> None:
    rig = make_rig(ram_bytes=8 * 8192)
    engine = rig.attach(NAMESPACE)
    rig.grant(engine, NAMESPACE, Prefix(NAMESPACE, 1, 8).keys)
    searches = []
    policy = rig.store._room.policies[TierKind.RAM]
    victims = policy.victims
    policy.victims = lambda wanted: searches.append(wanted) or victims(wanted)  # type: ignore[method-assign, func-returns-value]
    assert set(outcomes(rig.grant(engine, NAMESPACE, Prefix(NAMESPACE, 2, 50).keys))) == {Outcome.BUSY}
    assert len(searches) == 1


def test_making_room_for_the_tail_of_a_prefix_does_not_take_its_head(make_rig: MakeRig) -> None:
    """In a full RAM each new block took the slot of its own parent, the only leaf that nobody used."""
    rig = make_rig(ram_bytes=8 * 8192)
    reader, writer = rig.attach(NAMESPACE), rig.attach(NAMESPACE)
    rig.put(reader, NAMESPACE, Prefix(NAMESPACE, 1, 5).keys)
    fetch = rig.begin_fetch(reader, Prefix(NAMESPACE, 1, 5).keys)
    rig.turn()
    keys = Prefix(NAMESPACE, 2, 6).keys
    assert rig.put(writer, NAMESPACE, keys) == [Outcome.OK] * 3 + [Outcome.BUSY] * 3
    assert rig.put(writer, NAMESPACE, keys, 3) == [Outcome.BUSY] * 3
    assert rig.lookup(writer, keys) == [TierKind.RAM] * 3
    fetch.release()
    assert rig.put(writer, NAMESPACE, keys, 3) == [Outcome.OK] * 3
    assert rig.lookup(writer, keys) == [TierKind.RAM] * 6
    rig.check()


def test_a_block_that_is_being_loaded_exists_already(make_rig: MakeRig) -> None:
    """It was told to be pending, as if it might never come."""
    rig = make_rig(ssd=memory(TierKind.SSD))
    engine = rig.attach(NAMESPACE)
    keys = Prefix(NAMESPACE, 1, 2).keys
    rig.put(engine, NAMESPACE, keys)
    rig.settle()
    rig.store.evict(wire.Evict(["ram"]), lambda _: None)
    fetch = rig.begin_fetch(engine, keys)
    rig.turn()
    assert outcomes(rig.grant(engine, NAMESPACE, keys)) == [Outcome.EXISTS] * 2
    rig.settle()
    assert fetch.done


def test_a_block_with_the_wrong_parent_or_depth_is_rejected_alone(make_rig: MakeRig) -> None:
    rig = make_rig()
    engine = rig.attach(NAMESPACE)
    keys = Prefix(NAMESPACE, 1, 4).keys
    rig.put(engine, NAMESPACE, keys[:2])
    assert outcomes(rig.store.store(engine, wire.Store(keys[1], BlockKey(b"x" * 32), 1)).slots) == [Outcome.REJECTED]
    assert outcomes(rig.store.store(engine, wire.Store(keys[2], keys[1], 7)).slots) == [Outcome.REJECTED]
    assert outcomes(rig.store.store(engine, wire.Store(keys[0], BlockKey(b"x" * 32), 0)).slots) == [Outcome.REJECTED]
    twice = rig.store.store(engine, wire.Store(join_keys([keys[2], keys[2]]), keys[1], 2)).slots
    assert outcomes(twice) == [Outcome.OK, Outcome.REJECTED]
    rig.check()


@pytest.mark.parametrize(
    "request_",
    [
        wire.Store(b"", NAMESPACE.root(), 0),
        wire.Store(b"x" * 31, NAMESPACE.root(), 0),
        wire.Store(b"x" * 32, b"short", 0),
        wire.Store(b"x" * 32, NAMESPACE.root(), -1),
        wire.Store(b"x" * 32, NAMESPACE.root(), 1 << 40),
        wire.Store(b"x" * 32 * 1025, NAMESPACE.root(), 0),
    ],
)
def test_a_store_that_makes_no_sense_is_refused_as_a_whole(make_rig: MakeRig, request_: wire.Store) -> None:
    rig = make_rig()
    engine = rig.attach(NAMESPACE)
    with pytest.raises(ProtocolError, match=r"keys|store"):
        rig.store.store(engine, request_)
    rig.check()


def test_a_commit_whose_lists_differ_in_length_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig()
    engine = rig.attach(NAMESPACE)
    with pytest.raises(ProtocolError, match="length"):
        rig.store.commit(engine, wire.Commit(b"x" * 64, [1], [True, True]))
