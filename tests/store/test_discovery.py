"""Blocks that only the bucket has, put there by another daemon: asked for in the background, found a moment later."""

import math
from collections.abc import Callable

import pytest

from kvstore import wire
from kvstore.core.key import join_keys
from kvstore.core.outcome import Outcome, TierKind
from kvstore.store import bucket_known
from kvstore.store.discovery import REMEMBER_MISS_S
from kvstore.store.engines import Engine
from kvstore.worker import ops
from tests.support.chats import Prefix
from tests.support.rig import Rig, memory
from tests.support.sessions import NAMESPACE, Bucket, put, turn
from tiers.faulty import Fault, FaultyTier, ScriptedPlan

MakeRig = Callable[..., Rig]
PREFIX = Prefix(NAMESPACE, 1, 30)


def look(rig: Rig, engine: Engine, prefix: Prefix = PREFIX) -> wire.Found:
    return rig.store.lookup(engine, wire.Lookup(join_keys(prefix.keys)))


def shown(found: wire.Found) -> tuple[int, Outcome]:
    assert set(found.tiers) <= {TierKind.S3}
    return len(found.tiers), Outcome(found.s3)


def filled(make_rig: MakeRig, bucket: Bucket, num_blocks: int) -> None:
    """Another daemon has put the first blocks of PREFIX there."""
    other = make_rig("other", **bucket.options())
    turn(other, other.attach(NAMESPACE), num_blocks)
    other.settle(seconds=2.0)
    assert len(bucket.tier.blocks) == num_blocks


@pytest.mark.parametrize("num_there", [0, 1, 17, 30])
def test_a_lookup_says_that_the_bucket_was_not_asked_and_the_next_one_finds_what_it_has(
    make_rig: MakeRig, bucket: Bucket, num_there: int
) -> None:
    if num_there:
        filled(make_rig, bucket, num_there)
    rig = make_rig(ssd=memory(TierKind.SSD), **bucket.options())
    engine = rig.attach(NAMESPACE)
    assert shown(look(rig, engine)) == (0, Outcome.UNKNOWN)
    rig.settle()
    found = look(rig, engine)
    assert shown(found) == (num_there, Outcome.MISS)
    assert found.next == (Outcome.OK if num_there == 30 else Outcome.MISS)
    fetch = rig.fetch(engine, PREFIX.keys[:num_there]) if num_there else None
    assert fetch is None or set(fetch.outcomes) == {Outcome.OK}
    rig.check()


def test_who_only_looks_whether_the_daemon_is_there_asks_the_bucket_nothing(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(**bucket.options())
    found = rig.store.lookup(rig.attach(NAMESPACE), wire.Lookup(NAMESPACE.root()))
    assert shown(found) == (0, Outcome.MISS)
    rig.settle()
    assert "unknown_lookups" not in rig.stats()["discovery"]


def test_one_question_is_asked_however_many_look_and_a_miss_is_remembered_for_a_while(
    make_rig: MakeRig, bucket: Bucket
) -> None:
    rig = make_rig(**bucket.options())
    engine = rig.attach(NAMESPACE)
    for num_blocks in (30, 20, 25):
        assert shown(look(rig, engine, Prefix(NAMESPACE, 1, num_blocks))) == (0, Outcome.UNKNOWN)
    rig.turn()
    asked = [op for op in rig.links[TierKind.S3].wire.sent if isinstance(op, ops.Discover)]
    assert len(asked) == 1
    rig.settle()
    filled(make_rig, bucket, 30)
    rig.clock.now += REMEMBER_MISS_S / 2
    assert shown(look(rig, engine)) == (0, Outcome.MISS)
    rig.clock.now += REMEMBER_MISS_S / 2
    assert shown(look(rig, engine)) == (0, Outcome.UNKNOWN)
    rig.settle()
    assert shown(look(rig, engine)) == (30, Outcome.MISS)
    counts = rig.stats()["discovery"]
    assert counts == {"answered": 2, "found_blocks": 30, "unknown_lookups": 4}


def test_what_is_known_here_is_not_asked_for(make_rig: MakeRig, bucket: Bucket) -> None:
    filled(make_rig, bucket, 30)
    rig = make_rig(ssd=memory(TierKind.SSD), **bucket.options())
    engine = rig.attach(NAMESPACE)
    rig.put(engine, NAMESPACE, PREFIX.keys[:10])
    found = look(rig, engine)
    assert list(found.tiers) == [TierKind.RAM] * 10 and found.s3 == Outcome.UNKNOWN
    rig.turn()
    (asked,) = [op for op in rig.links[TierKind.S3].wire.sent if isinstance(op, ops.Discover)]
    assert asked.keys == join_keys(PREFIX.keys[10:])
    rig.settle()
    assert list(look(rig, engine).tiers) == [TierKind.RAM] * 10 + [TierKind.S3] * 20
    rig.check()


def test_a_hole_that_a_crash_left_costs_a_recompute_and_is_known_then(make_rig: MakeRig, bucket: Bucket) -> None:
    filled(make_rig, bucket, 30)
    gap = PREFIX.keys[8]
    assert math.isqrt(29) + 1 == 6, "the search must not ask for block 8 by name"
    del bucket.tier.blocks[gap]
    rig = make_rig(**bucket.options())
    engine = rig.attach(NAMESPACE)
    look(rig, engine)
    rig.settle()
    assert shown(look(rig, engine)) == (30, Outcome.MISS)
    outcomes = rig.fetch(engine, PREFIX.keys).outcomes
    assert outcomes == [Outcome.OK] * 8 + [Outcome.MISS] + [Outcome.OK] * 21
    assert len(look(rig, engine).tiers) == 8 and look(rig, engine).s3 == Outcome.MISS
    rig.clock.now += REMEMBER_MISS_S
    look(rig, engine)
    rig.settle()
    assert len(look(rig, engine).tiers) == 8 and look(rig, engine).s3 == Outcome.MISS
    rig.check()


def test_questions_wait_for_loads_and_there_are_only_so_many(make_rig: MakeRig, bucket: Bucket) -> None:
    filled(make_rig, bucket, 4)
    rig = make_rig(**bucket.options())
    engine = rig.attach(NAMESPACE)
    look(rig, engine, Prefix(NAMESPACE, 1, 4))
    rig.settle()
    rig.begin_fetch(engine, PREFIX.keys[:4])
    rig.turn()
    for seed in range(2, 200):
        look(rig, engine, Prefix(NAMESPACE, seed, 3))
    rig.turn()
    sent = rig.links[TierKind.S3].wire.sent
    assert {type(op) for op in sent} == {ops.Read}
    assert rig.stats()["discovery"]["dropped"] > 100 and len(rig.store._discovery or ()) <= 64
    rig.settle(seconds=2.0)
    assert not rig.store._discovery


def test_a_bucket_that_does_not_answer_is_left_alone_for_a_while(make_rig: MakeRig, bucket: Bucket) -> None:
    plan = ScriptedPlan().add("contains", [Fault(Outcome.UNAVAILABLE)])
    rig = make_rig(s3=FaultyTier(bucket.tier, plan), s3_records=bucket.records)
    engine = rig.attach(NAMESPACE)
    look(rig, engine)
    rig.settle(seconds=1.0)
    assert shown(look(rig, engine)) == (0, Outcome.UNKNOWN)
    rig.settle(seconds=1.0)
    assert rig.stats()["discovery"] == {"unanswered": 1, "unknown_lookups": 2}
    rig.settle(seconds=6.0)
    assert shown(look(rig, engine)) == (0, Outcome.MISS)


def test_what_was_found_and_belongs_to_no_session_is_forgotten_past_a_number(
    make_rig: MakeRig, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(make_rig, bucket, 30)
    monkeypatch.setattr(bucket_known.BucketKnown.__init__, "__defaults__", (20,))
    rig = make_rig(**bucket.options())
    engine = rig.attach(NAMESPACE)
    rig.store.session_put(engine, put(2, seed=5))
    look(rig, engine)
    rig.settle(seconds=10.0)
    assert rig.lookup(engine, PREFIX.keys) == [TierKind.S3] * 20, "the deepest ones went"
    assert rig.store._catalog.blocks_in(TierKind.S3) == 20
    rig.check()


def test_without_a_bucket_nothing_is_unknown(make_rig: MakeRig) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD))
    assert shown(look(rig, rig.attach(NAMESPACE))) == (0, Outcome.MISS)
