"""Sessions in the tiers: how far a turn is durable, and what happens when daemons share a bucket."""

from collections.abc import Callable

from kvstore import wire
from kvstore.config import SessionsConfig
from kvstore.core.outcome import Outcome, TierKind
from tests.support.chats import Prefix
from tests.support.rig import Rig, memory
from tests.support.sessions import NAME, NAMESPACE, Bucket, ids, put, turn, view
from tiers.faulty import Fault, FaultyTier, ScriptedPlan

MakeRig = Callable[..., Rig]


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
