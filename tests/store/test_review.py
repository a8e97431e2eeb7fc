"""What a running daemon believes of its disk after the disk's worker had to be started again."""

from collections.abc import Callable

from kvstore import wire
from kvstore.core.outcome import TierKind
from kvstore.worker import ops
from tests.support.chats import Prefix
from tests.support.memory import MemoryRecords
from tests.support.rig import Rig, memory
from tests.support.sessions import NAMESPACE, ids, put, turn, view

MakeRig = Callable[..., Rig]
PREFIX = Prefix(NAMESPACE, 1, 8)


def errors(rig: Rig) -> dict[str, int]:
    return dict(rig.stats()["errors"])


def restart_worker(rig: Rig) -> None:
    rig.links[TierKind.SSD].die()
    rig.settle(seconds=3.0)


def test_blocks_that_went_with_the_worker_are_durable_no_more_and_are_stored_again(make_rig: MakeRig) -> None:
    """Where the disk's files were removed under it, the worker began anew and the catalog did not notice: sessions
    showed `durable: ssd` with nothing of them on the disk."""
    disk = memory(TierKind.SSD)
    rig = make_rig(ssd=disk)
    turn(rig, rig.attach(NAMESPACE), 8)
    rig.settle()
    assert view(rig).durable == "ssd"
    for key in PREFIX.keys[3:]:
        del disk.blocks[key]
    rig.links[TierKind.SSD].die()
    rig.settle(seconds=3.0)
    assert errors(rig)["ssd_lost"] == 5
    assert set(disk.blocks) == set(PREFIX.keys)
    assert view(rig).durable == "ssd"
    rig.check()


def test_blocks_that_are_nowhere_else_are_gone_at_once(make_rig: MakeRig) -> None:
    disk = memory(TierKind.SSD)
    rig = make_rig(ssd=disk)
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 8)
    rig.settle()
    rig.store.evict(wire.Evict(["ram"]), lambda _: None)
    for key in PREFIX.keys[3:]:
        del disk.blocks[key]
    restart_worker(rig)
    assert len(rig.lookup(engine, PREFIX.keys)) == 3
    assert view(rig).durable == "none"
    rig.check()


def test_what_the_disk_kept_is_believed_as_before(make_rig: MakeRig) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD))
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 8)
    rig.settle()
    rig.store.evict(wire.Evict(["ram"]), lambda _: None)
    restart_worker(rig)
    assert len(rig.lookup(engine, PREFIX.keys)) == 8
    assert (view(rig).durable, ids(rig)) == ("ssd", {"chat"})
    assert not {"ssd_lost", "session_conflict", "ssd_session_lost"} & set(errors(rig))
    rig.check()


def test_a_session_whose_record_went_with_the_worker_is_put_again(make_rig: MakeRig) -> None:
    records = MemoryRecords()
    rig = make_rig(ssd=memory(TierKind.SSD), ssd_records=records)
    turn(rig, rig.attach(NAMESPACE), 8)
    rig.settle()
    (name,) = records.names("")
    records.delete(name)
    restart_worker(rig)
    assert list(records.names("")) == [name]
    assert view(rig).durable == "ssd"
    assert errors(rig)["ssd_session_lost"] == 1


def test_a_block_stored_while_the_disk_is_asked_is_not_taken_for_lost(make_rig: MakeRig) -> None:
    disk = memory(TierKind.SSD)
    rig = make_rig(ssd=disk)
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 8)
    rig.settle()
    review = rig.store.recovery.review
    review.begin()
    rig.put(engine, NAMESPACE, Prefix(NAMESPACE, 2, 4).keys)
    rig.settle()
    review.end()
    while review.is_busy:
        rig.turn()
    rig.settle(seconds=2.0)
    assert set(disk.blocks) >= set(Prefix(NAMESPACE, 2, 4).keys)
    rig.check()


def test_a_worker_that_dies_again_while_it_is_asked_is_asked_anew(make_rig: MakeRig) -> None:
    disk = memory(TierKind.SSD)
    rig = make_rig(ssd=disk)
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 8)
    rig.settle()
    rig.store.evict(wire.Evict(["ram"]), lambda _: None)
    link = rig.links[TierKind.SSD]
    link.die()
    while not rig.store.recovery.review.is_running:
        rig.clock.now += 0.1
        rig.turn()
    restart_worker(rig)
    assert not rig.store.recovery.review.is_running
    assert len(rig.lookup(engine, PREFIX.keys)) == 8
    rig.check()


def test_a_record_that_is_told_twice_makes_no_fork(make_rig: MakeRig) -> None:
    """A worker that died after it had told of some sessions, in the middle of a recovery, was asked again: each of
    those sessions came up a second time, as a fork of itself."""
    disk = memory(TierKind.SSD)
    before = make_rig("a", ssd=disk)
    turn(before, before.attach(NAMESPACE), 8)
    before.settle()
    (name,) = before.ssd_records.names("")
    record = before.ssd_records.get(name)
    assert record is not None
    rig = make_rig("b", ssd=disk, ssd_records=before.ssd_records, is_started=False)
    rig.store.recovery.take_in(ops.Recovered(0, records=[record.data]))
    rig.settle(seconds=1.0)
    assert ids(rig) == {"chat"}
    assert view(rig).messages == put(8).messages
    rig.check()
