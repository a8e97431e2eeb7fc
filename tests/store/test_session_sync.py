"""Sessions in the tiers: how far a turn is durable, and what happens when tiers are slow, away, or shared."""

from collections.abc import Callable
from typing import Any

import pytest

from kvstore import wire
from kvstore.config import SessionsConfig
from kvstore.core.outcome import Outcome, TierKind
from kvstore.store import ops
from kvstore.store import record as records
from kvstore.store.engines import Engine
from kvstore.wire import ErrorCode
from tests.store.test_session import NAMESPACE, get, ids, put, view
from tests.support.chats import Prefix, namespace
from tests.support.memory import MemoryRecords, MemoryTier
from tests.support.rig import Rig, memory
from tiers.faulty import Fault, FaultyTier, ScriptedPlan

MakeRig = Callable[..., Rig]
NAME = records.record_name(("", NAMESPACE.digest(), "chat"))


class Bucket:
    """What several daemons share."""

    def __init__(self) -> None:
        self.tier = memory(TierKind.S3)
        self.records = MemoryRecords()

    def options(self) -> dict[str, Any]:
        return {"s3": self.tier, "s3_records": self.records}

    def revision(self, name: str = NAME) -> int | None:
        found = self.records.records.get(name)
        record = None if found is None else records.decode(found.data)
        return None if record is None else record.revision


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


def turn(rig: Rig, engine: Engine, num_blocks: int, revision: int = 0, seed: int = 1) -> wire.SessionSaved:
    """Store the blocks of a turn and record it."""
    rig.put(engine, NAMESPACE, Prefix(NAMESPACE, seed, num_blocks).keys)
    return rig.store.session_put(engine, put(num_blocks, revision, seed=seed))


def delete(rig: Rig, session_id: str = "chat") -> list[wire.Message]:
    replies: list[wire.Message] = []
    rig.store.sessions.delete(wire.SessionDelete(session_id, "", NAMESPACE.digest()), replies.append)
    return replies


def pin(rig: Rig, pinned: bool) -> list[wire.Message]:
    replies: list[wire.Message] = []
    rig.store.sessions.pin(wire.SessionPin("chat", pinned, "", NAMESPACE.digest()), replies.append)
    return replies


# ---------------------------------------------------------------- how far a turn is durable


def test_a_turn_is_durable_where_its_record_and_all_its_blocks_are(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD), **bucket.options())
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 3)
    assert rig.store.sessions.list(wire.SessionList()).sessions[0].durable == "none"
    seen = []
    for number in range(200):
        rig.turn()
        rig.links[TierKind.SSD].work(1)
        rig.links[TierKind.S3].work(number % 10 == 0)
        rig.clock.now += 0.02
        seen.append(rig.store.sessions.list(wire.SessionList()).sessions[0].durable)
        if seen[-1] == "s3":
            assert bucket.revision() == 1 and len(bucket.tier.blocks) == 3
        elif seen[-1] == "ssd":
            assert NAME in rig.ssd_records.records
    rig.settle()
    assert sorted(set(seen)) == ["none", "s3", "ssd"]
    turn(rig, engine, 5, 1)
    assert rig.store.sessions.list(wire.SessionList()).sessions[0].durable == "none"
    rig.settle()
    assert rig.store.sessions.list(wire.SessionList()).sessions[0].durable == "s3"
    rig.check()


def test_a_restart_knows_what_was_durable(make_rig: MakeRig, bucket: Bucket) -> None:
    disk = memory(TierKind.SSD)
    before = make_rig("a", ssd=disk, **bucket.options())
    turn(before, before.attach(NAMESPACE), 3)
    before.settle()
    rig = make_rig("b", ssd=disk, ssd_records=before.ssd_records, **bucket.options())
    assert view(rig).durable == "s3"
    assert view(rig).messages == put(3).messages
    engine = rig.attach(NAMESPACE)
    assert rig.fetch(engine, Prefix(NAMESPACE, 1, 3).keys).outcomes == [Outcome.OK] * 3
    assert turn(rig, engine, 4, 1) == wire.SessionSaved("chat", 2, False)
    rig.settle()
    assert bucket.revision() == 2
    rig.check()


def test_a_session_goes_on_at_another_daemon_from_the_bucket_alone(make_rig: MakeRig, bucket: Bucket) -> None:
    first = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    turn(first, first.attach(NAMESPACE), 4)
    first.settle()
    second = make_rig("b", ssd=memory(TierKind.SSD), **bucket.options())
    assert view(second).messages == put(4).messages
    engine = second.attach(NAMESPACE)
    fetch = second.fetch(engine, Prefix(NAMESPACE, 1, 4).keys)
    assert fetch.outcomes == [Outcome.OK] * 4 and set(fetch.sources.values()) == {TierKind.S3}
    turn(second, engine, 6, 1)
    second.settle()
    first.settle(seconds=2.0)
    assert view(first).revision == 2 and view(first).num_blocks == 6
    first.check()
    second.check()


def test_a_bucket_that_is_down_does_not_keep_turns_from_the_ssd(make_rig: MakeRig, bucket: Bucket) -> None:
    """After a put to the bucket had failed nothing was put on SSD for a second either."""
    rig = make_rig(ssd=memory(TierKind.SSD), **bucket.options())
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 2)
    rig.settle()
    bucket.records.is_down = True
    turn(rig, engine, 3, 1)
    rig.settle()
    assert rig.stats()["errors"]["s3_session_put_failed"] > 0
    turn(rig, engine, 4, 2)
    rig.settle(seconds=0.2)
    assert rig.store.sessions.list(wire.SessionList()).sessions[0].durable == "ssd"
    bucket.records.is_down = False
    rig.settle(seconds=3.0)
    assert rig.store.sessions.list(wire.SessionList()).sessions[0].durable == "s3"
    rig.check()


def test_blocks_whose_ram_copy_is_gone_reach_the_bucket_from_the_ssd(make_rig: MakeRig, bucket: Bucket) -> None:
    plan = ScriptedPlan()
    rig = make_rig(ssd=memory(TierKind.SSD), s3=FaultyTier(bucket.tier, plan), s3_records=bucket.records)
    engine = rig.attach(NAMESPACE)
    plan.add("write", [Fault(Outcome.UNAVAILABLE)] * 12)
    turn(rig, engine, 12)
    rig.settle(seconds=0.1)
    rig.store.evict(wire.Evict(["ram"]), lambda _: None)
    assert rig.stats()["tiers"]["ram"]["blocks"] == 0
    rig.settle(seconds=10.0)
    assert view(rig).durable == "s3" and len(bucket.tier.blocks) == 12
    rig.check()


def test_a_turn_whose_blocks_never_arrive_is_put_in_the_bucket_all_the_same(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD), **bucket.options())
    rig.store.session_put(rig.attach(NAMESPACE), put(3))
    rig.settle(seconds=10.0)
    assert bucket.revision() is None
    rig.settle(seconds=25.0)
    assert bucket.revision() == 1
    assert view(rig).durable == "none"
    rig.check()


def test_a_drain_does_not_wait_for_blocks_that_will_not_arrive(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD), **bucket.options())
    rig.store.session_put(rig.attach(NAMESPACE), put(3))
    rig.settle()
    assert not rig.store.is_drained()
    rig.store.drain()
    rig.settle(seconds=0.2)
    assert rig.store.is_drained() and bucket.revision() == 1


def test_many_sessions_take_turns_to_be_looked_at(make_rig: MakeRig, bucket: Bucket) -> None:
    """All that were behind were looked at fifty times a second, which with a thousand of them was all the control
    thread did."""
    rig = make_rig(ssd=memory(TierKind.SSD), **bucket.options())
    engine = rig.attach(NAMESPACE)
    for number in range(200):
        rig.store.session_put(engine, put(1, session_id=f"chat-{number}", seed=number))
    asked = []
    may_put = rig.store.sessions._sync._may_put
    rig.store.sessions._sync._may_put = lambda *a: asked.append(a) or may_put(*a)  # type: ignore[method-assign, func-returns-value]
    rig.turn()
    assert 0 < len(asked) <= 64
    rig.settle()
    assert len(rig.ssd_records.records) == 200
    rig.check()


# ---------------------------------------------------------------- two daemons at once


def test_two_daemons_that_go_on_with_one_session_the_later_one_becomes_a_fork(
    make_rig: MakeRig, bucket: Bucket
) -> None:
    first = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    second = make_rig("b", ssd=memory(TierKind.SSD), **bucket.options())
    turn(first, first.attach(NAMESPACE), 2)
    first.settle()
    view(second)
    first_engine, second_engine = first.attach(NAMESPACE), second.attach(NAMESPACE)
    turn(first, first_engine, 4, 1, seed=1)
    longer = [*put(2).messages, wire.ChatMessage("user", "other", [1, 2, 3, 4])]
    second.store.session_put(second_engine, put(2, 1, messages=longer))
    first.settle()
    second.settle()
    assert bucket.revision() == 2
    assert view(second).messages == put(4).messages
    (fork,) = ids(second) - {"chat"}
    assert view(second, fork).messages == longer and view(second, fork).forked_from == "chat"
    assert second.stats()["errors"]["session_conflict"] == 1
    assert view(second, fork).durable == "s3"
    first.settle(seconds=2.0)
    assert view(first).messages == put(4).messages
    first.check()
    second.check()


def test_who_began_a_turn_before_a_conflict_was_found_out_does_not_overwrite_the_other_branch(
    make_rig: MakeRig, bucket: Bucket
) -> None:
    """Both branches had the same revision number, so the next turn of the loser went on top of the winner's."""
    first = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    second = make_rig("b", ssd=memory(TierKind.SSD), **bucket.options())
    turn(first, first.attach(NAMESPACE), 2)
    first.settle()
    view(second)
    engine = second.attach(NAMESPACE)
    turn(first, first.attach(NAMESPACE), 4, 1)
    saved = turn(second, engine, 2, 1, seed=7)
    first.settle()
    second.settle()
    after = turn(second, engine, 3, saved.revision, seed=7)
    assert after.forked
    second.settle()
    assert view(second).messages == put(4).messages
    second.check()


def test_our_own_unsaved_turn_is_not_lost_to_a_newer_one_in_the_bucket(make_rig: MakeRig, bucket: Bucket) -> None:
    """The bucket's record had the higher number, and so it replaced a turn that was nowhere else."""
    first = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    second = make_rig("b", ssd=memory(TierKind.SSD), **bucket.options())
    turn(first, first.attach(NAMESPACE), 2)
    first.settle()
    view(second)
    replies: list[wire.Message] = []
    second.clock.now += 5.0
    second.store.sessions.get(wire.SessionGet("chat", "", NAMESPACE.digest()), replies.append)
    turn(second, second.attach(NAMESPACE), 3, 1, seed=8)
    first_engine = first.attach(NAMESPACE)
    turn(first, first_engine, 3, 1)
    turn(first, first_engine, 4, 2)
    first.settle()
    second.settle()
    texts = {view(second, name).messages[0].content for name in ids(second)}
    assert texts == {"said 1", "said 8"}
    second.check()


def test_a_session_that_went_on_elsewhere_is_not_deleted_when_its_time_here_is_over(
    make_rig: MakeRig, bucket: Bucket
) -> None:
    """A daemon that had once served a session deleted it from the bucket a week later; it lived on at another."""
    config = SessionsConfig(ttl_s=100.0)
    first = make_rig("a", ssd=memory(TierKind.SSD), sessions=config, **bucket.options())
    second = make_rig("b", ssd=memory(TierKind.SSD), sessions=config, **bucket.options())
    turn(first, first.attach(NAMESPACE), 2)
    first.settle()
    view(second)
    second.settle(seconds=80.0)
    turn(second, second.attach(NAMESPACE), 3, 1)
    second.settle()
    first.clock.now = second.clock.now
    first.settle(seconds=40.0)
    assert bucket.revision() == 2 and len(bucket.tier.blocks) == 3
    assert view(first).revision == 2
    second.settle(seconds=40.0)
    assert view(second).revision == 2
    first.settle(seconds=200.0)
    assert bucket.revision() is None and not bucket.tier.blocks and not ids(first)
    first.check()


def test_sessions_beyond_what_may_be_kept_stay_in_the_bucket(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD), sessions=SessionsConfig(max_sessions=1), **bucket.options())
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 2)
    rig.settle()
    rig.store.session_put(engine, put(1, session_id="another", seed=5))
    rig.settle(seconds=10)
    assert ids(rig) == {"another"}
    assert bucket.revision() == 1 and NAME not in rig.ssd_records.records
    assert view(rig).messages == put(2).messages
    rig.check()


# ---------------------------------------------------------------- pins and deletions


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
    monkeypatch.setattr("kvstore.store.session._MAX_CACHED_BYTES", 100)
    rig = make_rig(ssd=memory(TierKind.SSD))
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 2)
    rig.settle()
    rig.store.session_put(engine, put(2, session_id="another", seed=3))
    rig.settle()
    assert rig.store._session_table.cached(("", NAMESPACE.digest(), "chat")) is None
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


# ---------------------------------------------------------------- answers in time


def test_who_asks_for_an_unknown_session_is_answered_by_the_deadline(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD), **bucket.options())
    replies: list[wire.Message] = []
    rig.store.sessions.get(wire.SessionGet("chat", "", NAMESPACE.digest(), 0.5), replies.append)
    rig.turn()
    assert rig.store.next_deadline() <= rig.clock.now + 0.5
    rig.clock.now += 0.51
    rig.turn()
    (answer,) = replies
    # Not "not found": that would have the engine forget what it remembers of the chat.
    assert isinstance(answer, wire.Error) and answer.code == ErrorCode.BUSY
    rig.settle()
    rig.check()


def test_where_the_bucket_says_nothing_a_known_session_is_served_from_here(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD), **bucket.options())
    turn(rig, rig.attach(NAMESPACE), 2)
    rig.settle(seconds=2.0)
    replies: list[wire.Message] = []
    rig.store.sessions.get(wire.SessionGet("chat", "", NAMESPACE.digest(), 2.0), replies.append)
    rig.turn()
    rig.clock.now += 0.31
    rig.turn()
    assert isinstance(replies[0], wire.SessionFound)
    assert rig.stats()["errors"]["s3_session_check_timed_out"] == 1


def test_a_record_that_cannot_be_read_now_is_not_told_to_be_gone(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.store.session._MAX_CACHED_BYTES", 100)
    rig = make_rig(ssd=memory(TierKind.SSD))
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 2)
    rig.settle()
    rig.store.session_put(engine, put(2, session_id="another", seed=3))
    rig.settle()
    rig.ssd_records.is_down = True
    answer = get(rig)
    assert isinstance(answer, wire.Error) and answer.code == ErrorCode.BUSY
    rig.ssd_records.is_down = False
    assert view(rig).revision == 1


def test_a_session_whose_record_is_gone_for_good_is_known_no_more(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.store.session._MAX_CACHED_BYTES", 100)
    rig = make_rig(ssd=memory(TierKind.SSD))
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 2)
    rig.settle()
    rig.store.session_put(engine, put(2, session_id="another", seed=3))
    rig.settle()
    damaged = rig.ssd_records.records[NAME]
    rig.ssd_records.put(NAME, damaged.data[:-3] + b"xxx")
    answer = get(rig)
    assert isinstance(answer, wire.Error) and answer.code == ErrorCode.NOT_FOUND
    assert ids(rig) == {"another"}
    assert rig.stats()["errors"]["session_record_lost"] == 1
    rig.check()


def test_a_record_lost_on_the_ssd_is_read_from_the_bucket(
    make_rig: MakeRig, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.store.session._MAX_CACHED_BYTES", 100)
    rig = make_rig(ssd=memory(TierKind.SSD), **bucket.options())
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 2)
    rig.settle()
    rig.store.session_put(engine, put(2, session_id="another", seed=3))
    rig.settle()
    rig.ssd_records.delete(NAME)
    assert view(rig).messages == put(2).messages
    rig.settle()
    rig.check()


# ---------------------------------------------------------------- coming up


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
    assert not rig.store.is_recovered
    engine = rig.attach(NAMESPACE)
    rig.put(engine, NAMESPACE, Prefix(NAMESPACE, 5, 4).keys)
    link._answer([ops.Ready(), link.worker._level()])
    rig.settle(seconds=1.0)
    assert rig.store.is_recovered
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
    assert not rig.store.is_recovered
    rig.settle(seconds=2.0)
    assert rig.store.is_recovered and view(rig).num_blocks == 8


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
