"""What a daemon knows after it has been started on a disk that was used before."""

import threading
from collections.abc import Callable

import pytest

from kvstore import wire
from kvstore.core.outcome import Outcome, TierKind
from kvstore.wire import ErrorCode
from kvstore.worker import ops
from kvstore.worker import serving as worker
from tests.support import batches
from tests.support.chats import Prefix, namespace
from tests.support.memory import MemoryRecords, MemoryTier
from tests.support.rig import Rig, memory
from tests.support.sessions import NAMESPACE, Bucket, get, ids, put, turn, view
from tiers.faulty import Fault, FaultyTier, ScriptedPlan

MakeRig = Callable[..., Rig]


def test_a_disk_that_opens_late_is_still_asked_what_it_holds(make_rig: MakeRig) -> None:
    """Where the SSD tier could not be opened at the start, what it held stayed unknown until the next restart: its
    sessions were gone, and once it was full nothing on it could be evicted."""
    disk = memory(TierKind.SSD, 8)
    before = make_rig("a", ssd=disk)
    turn(before, before.attach(NAMESPACE), 8)
    before.settle()
    rig = make_rig("b", ssd=disk, ssd_records=before.ssd_records, is_started=False)
    link = rig.links[TierKind.SSD]
    link.wire.answers.clear()
    rig.settle(seconds=1.0)
    assert not rig.store.recovery.is_done
    engine = rig.attach(NAMESPACE)
    rig.put(engine, NAMESPACE, Prefix(NAMESPACE, 5, 4).keys)
    link._answer([ops.Ready(), link.worker._level()])
    rig.settle(seconds=1.0)
    assert rig.store.recovery.is_done
    assert view(rig).messages == put(8).messages
    rig.settle(seconds=2.0)
    assert len(rig.lookup(engine, Prefix(NAMESPACE, 5, 4).keys)) == 4
    assert disk.most_bytes <= 8 * 8192
    rig.check()


def test_a_worker_that_dies_while_it_recovers_is_asked_again(make_rig: MakeRig) -> None:
    disk = memory(TierKind.SSD)
    before = make_rig("a", ssd=disk)
    turn(before, before.attach(NAMESPACE), 8)
    before.settle()
    rig = make_rig("b", ssd=disk, ssd_records=before.ssd_records, is_started=False)
    rig.turn()
    rig.turn()
    rig.links[TierKind.SSD].die()
    rig.turn()
    assert not rig.store.recovery.is_done
    rig.settle(seconds=2.0)
    assert rig.store.recovery.is_done and view(rig).num_blocks == 8


def test_after_a_restart_the_blocks_of_the_sessions_used_last_are_evicted_last(make_rig: MakeRig) -> None:
    disk = memory(TierKind.SSD, 12)
    before = make_rig("a", ssd=disk)
    engine = before.attach(NAMESPACE)
    for seed in (3, 1, 2):
        before.put(engine, NAMESPACE, Prefix(NAMESPACE, seed, 4).keys)
        before.store.session_put(engine, put(4, session_id=f"chat-{seed}", seed=seed))
        before.clock.now += 10.0
        before.settle()
    disk.blocks = dict(sorted(disk.blocks.items()))
    rig = make_rig("b", ssd=disk, ssd_records=before.ssd_records)
    engine = rig.attach(NAMESPACE)
    rig.put(engine, NAMESPACE, Prefix(NAMESPACE, 9, 3).keys)
    rig.settle()
    rig.store.evict(wire.Evict(["ram"]), lambda _: None)
    assert len(rig.lookup(engine, Prefix(NAMESPACE, 1, 4).keys)) == 4
    assert len(rig.lookup(engine, Prefix(NAMESPACE, 2, 4).keys)) == 4
    assert len(rig.lookup(engine, Prefix(NAMESPACE, 3, 4).keys)) < 4
    rig.check()


def test_a_session_begun_anew_before_the_disk_came_back_keeps_both_chats(make_rig: MakeRig) -> None:
    disk = memory(TierKind.SSD)
    before = make_rig("a", ssd=disk)
    turn(before, before.attach(NAMESPACE), 2)
    before.settle()
    rig = make_rig("b", ssd=disk, ssd_records=before.ssd_records, is_started=False)
    link = rig.links[TierKind.SSD]
    link.wire.answers.clear()
    rig.store.session_put(rig.attach(NAMESPACE), put(2, seed=4))
    link._answer([ops.Ready()])
    rig.settle(seconds=1.0)
    (fork,) = ids(rig) - {"chat"}
    assert view(rig).messages == put(2, seed=4).messages and view(rig, fork).messages == put(2).messages
    rig.check()


def test_a_record_that_is_damaged_on_disk_is_counted_and_passed_over(make_rig: MakeRig) -> None:
    stored = MemoryRecords()
    stored.put("sessions/x", b"no record of ours")
    rig = make_rig(ssd=MemoryTier(TierKind.SSD), ssd_records=stored)
    assert rig.stats()["errors"] == {"session_record_unreadable": 1}
    assert not ids(rig)


def test_another_model_with_its_own_namespace_is_another_session(make_rig: MakeRig, bucket: Bucket) -> None:
    other = namespace("other")
    rig = make_rig(ssd=memory(TierKind.SSD), **bucket.options())
    turn(rig, rig.attach(NAMESPACE), 2)
    rig.settle()
    answer = get(rig, digest=other.digest())
    assert isinstance(answer, wire.Error) and answer.code == ErrorCode.NOT_FOUND


def test_a_block_that_is_in_ram_only_to_be_uploaded_does_not_stay_there(make_rig: MakeRig, bucket: Bucket) -> None:
    """After a restart every session with unfinished uploads was read back into RAM, where it pushed out what engines
    had asked for."""
    plan = ScriptedPlan()
    plan.add("write", [Fault(Outcome.UNAVAILABLE)] * 10_000)
    rig = make_rig(ssd=memory(TierKind.SSD), s3=FaultyTier(bucket.tier, plan), s3_records=bucket.records)
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 6)
    rig.settle()
    assert rig.lookup(engine, Prefix(NAMESPACE, 1, 6).keys) == [TierKind.RAM] * 6
    rig.store.evict(wire.Evict(["ram"]), lambda _: None)
    assert rig.lookup(engine, Prefix(NAMESPACE, 1, 6).keys) == [TierKind.SSD] * 6
    plan.faults["write"].clear()
    rig.settle(seconds=60)
    assert len(bucket.tier.blocks) == 6 and bucket.revision() == 1
    assert rig.lookup(engine, Prefix(NAMESPACE, 1, 6).keys) == [TierKind.SSD] * 6
    rig.check()


def test_what_a_disk_holds_comes_in_several_messages_with_its_records(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "RECOVERED_BLOCKS", 3)
    monkeypatch.setattr(worker, "_RECORD_BYTES_PER_MESSAGE", 1)
    disk = memory(TierKind.SSD)
    before = make_rig("a", ssd=disk)
    engine = before.attach(NAMESPACE)
    for seed in (1, 2):
        before.put(engine, NAMESPACE, Prefix(NAMESPACE, seed, 4).keys)
        before.store.session_put(engine, put(4, session_id=f"chat-{seed}", seed=seed))
    before.settle()
    rig = make_rig("b", ssd=disk, ssd_records=before.ssd_records)
    engine = rig.attach(NAMESPACE)
    for seed in (1, 2):
        assert rig.lookup(engine, Prefix(NAMESPACE, seed, 4).keys) == [TierKind.SSD] * 4
    assert ids(rig) == {"chat-1", "chat-2"}
    rig.check()


def test_no_more_of_what_a_disk_holds_is_under_way_than_has_room(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a disk held waited in memory until the control thread had taken it in: a worker that is to stop
    meanwhile must not wait for room either."""
    monkeypatch.setattr(batches, "RECOVERED_BLOCKS", 1)
    monkeypatch.setattr(worker, "_LOOK_EVERY_S", 0)
    disk = memory(TierKind.SSD)
    before = make_rig("a", ssd=disk)
    before.put(before.attach(NAMESPACE), NAMESPACE, Prefix(NAMESPACE, 1, 8).keys)
    before.settle()
    rig = make_rig("b", ssd=disk, is_started=False)
    link = rig.links[TierKind.SSD]
    stopping = link.worker
    stopping._recovery_room = threading.Semaphore(3)
    stopping._is_stopping = True
    stopping._recover(ops.Recover(1, "sessions/"))
    assert stopping._answers.qsize() == 3
    for _ in range(3):
        link._answer([stopping._answers.get()])
    link.receive()
    assert [type(op) for op in link.wire.sent] == [ops.Continue] * 3
