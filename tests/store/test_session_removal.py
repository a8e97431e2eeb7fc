"""Pins and deletions of sessions, while tiers are busy or away."""

from collections.abc import Callable

import pytest

from kvstore import wire
from kvstore.core.outcome import TierKind
from kvstore.worker import ops
from tests.support.chats import Prefix
from tests.support.rig import Rig, memory
from tests.support.sessions import NAME, NAMESPACE, Bucket, delete, get, ids, pin, put, turn, turn_on_disk, view

MakeRig = Callable[..., Rig]


def test_a_pin_that_comes_while_a_turn_is_being_written_is_kept(make_rig: MakeRig, bucket: Bucket) -> None:
    """The write of the turn made the session count as written, and so the pin was never written down."""
    disk = memory(TierKind.SSD)
    rig = make_rig("a", ssd=disk, **bucket.options())
    turn(rig, rig.attach(NAMESPACE), 2)
    rig.turn()
    assert any(isinstance(op, ops.RecordPut) for op in rig.links[TierKind.SSD].wire.sent)
    assert pin(rig, True) == [wire.Done()]
    rig.settle()
    assert view(rig).pinned and view(rig).durable == "s3"
    after = make_rig("b", ssd=disk, ssd_records=rig.ssd_records)
    assert view(after).pinned
    elsewhere = make_rig("c", ssd=memory(TierKind.SSD), **bucket.options())
    assert view(elsewhere).pinned
    rig.check()


def test_a_pin_that_waits_for_the_record_does_not_undo_a_turn_that_comes_first(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD))
    engine = turn_on_disk(rig, monkeypatch)
    replies = pin(rig, True)
    assert replies == []
    turn(rig, engine, 3, 1)
    rig.settle()
    assert replies == [wire.Done()]
    assert view(rig).revision == 2 and view(rig).num_blocks == 3 and view(rig).pinned
    rig.check()


def test_deleting_a_session_deletes_what_no_other_shares_in_every_tier(make_rig: MakeRig, bucket: Bucket) -> None:
    disk = memory(TierKind.SSD)
    rig = make_rig(ssd=disk, **bucket.options())
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 5)
    shared = Prefix(NAMESPACE, 1, 2)
    rig.store.session_put(engine, put(2, session_id="another"))
    rig.settle()
    replies = delete(rig)
    assert replies == []
    rig.settle()
    assert replies == [wire.SessionDeleted(blocks_deleted=3, blocks_shared=2)]
    assert set(disk.blocks) == set(bucket.tier.blocks) == set(shared.keys)
    assert rig.lookup(engine, Prefix(NAMESPACE, 1, 5).keys) == [TierKind.RAM] * 2
    assert NAME not in rig.ssd_records.records and bucket.revision() is None
    assert isinstance(get(rig), wire.Error)
    rig.check()


def test_a_session_is_not_answered_as_deleted_before_a_restart_cannot_bring_it_back(make_rig: MakeRig) -> None:
    """The disk's worker was just being started anew: the deletion failed, was counted, and nothing else."""
    disk = memory(TierKind.SSD)
    rig = make_rig("a", ssd=disk)
    turn(rig, rig.attach(NAMESPACE), 3)
    rig.settle()
    rig.links[TierKind.SSD].die()
    rig.turn()
    rig.clock.now += 0.1
    rig.turn()
    replies = delete(rig)
    rig.turn()
    assert replies == [] and rig.ssd_records.records
    rig.settle(seconds=2.0)
    assert len(replies) == 1 and not rig.ssd_records.records and not disk.blocks
    rig.check()


def test_a_deletion_waits_for_a_put_that_is_under_way_and_outlasts_a_bucket_that_is_down(
    make_rig: MakeRig, bucket: Bucket
) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD), **bucket.options())
    turn(rig, rig.attach(NAMESPACE), 2)
    while not any(isinstance(op, ops.RecordPut) for op in rig.links[TierKind.S3].wire.sent):
        rig.turn()
        rig.links[TierKind.SSD].work()
        if not any(isinstance(op, ops.RecordPut) for op in rig.links[TierKind.S3].wire.sent):
            rig.links[TierKind.S3].work()
        rig.clock.now += 0.02
    delete(rig)
    rig.turn()
    assert not any(isinstance(op, ops.RecordDelete) for op in rig.links[TierKind.S3].wire.sent)
    rig.links[TierKind.S3].work()
    assert bucket.revision() == 1
    bucket.records.is_down = True
    rig.settle(seconds=1.0)
    assert isinstance(get(rig), wire.Error)
    assert not rig.store.is_drained()
    bucket.records.is_down = False
    rig.settle(seconds=2.0)
    assert bucket.revision() is None and rig.store.is_drained()
    rig.check()


def test_a_session_begun_anew_under_the_id_of_one_that_is_being_deleted_is_no_fork_of_it(
    make_rig: MakeRig, bucket: Bucket
) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD), **bucket.options())
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 2)
    rig.settle()
    bucket.records.is_down = True
    delete(rig)
    rig.settle()
    turn(rig, engine, 3, seed=6)
    rig.settle()
    assert view(rig).messages == put(3, seed=6).messages
    bucket.records.is_down = False
    rig.settle(seconds=5.0)
    assert ids(rig) == {"chat"} and view(rig).durable == "s3" and bucket.revision() == 1
    assert "session_conflict" not in rig.stats()["errors"]
    rig.check()


def test_blocks_of_a_deleted_session_go_when_their_reader_is_through(make_rig: MakeRig) -> None:
    disk = memory(TierKind.SSD)
    rig = make_rig(ssd=disk)
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 3)
    rig.settle()
    fetch = rig.begin_fetch(engine, Prefix(NAMESPACE, 1, 3).keys)
    rig.turn()
    delete(rig)
    rig.settle()
    assert len(disk.blocks) == 3
    fetch.copy()
    fetch.release()
    rig.settle(seconds=0.3)
    assert not disk.blocks and rig.stats()["tiers"]["ram"]["blocks"] == 0
    rig.check()


def test_blocks_that_wait_to_be_deleted_are_spared_when_a_new_session_shares_them(make_rig: MakeRig) -> None:
    """Deleted, shared again, deleted again, all while somebody read them: their pins were never given back."""
    rig = make_rig(ssd=memory(TierKind.SSD))
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 3)
    rig.settle()
    fetch = rig.begin_fetch(engine, Prefix(NAMESPACE, 1, 3).keys)
    rig.turn()
    delete(rig)
    rig.store.session_put(engine, put(3, session_id="another"))
    delete(rig, "another")
    fetch.copy()
    fetch.release()
    rig.settle(seconds=0.5)
    assert rig.stats()["tiers"]["ram"]["blocks"] == 0
    rig.check()
