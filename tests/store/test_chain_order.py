"""Uploads of one chain run in parallel, and still nothing is relied on whose parent is not in the bucket."""

import random
from collections.abc import Callable

import pytest

from kvstore.core.outcome import Outcome, TierKind
from kvstore.store.chain_order import SPAN
from tests.support.chats import Prefix
from tests.support.rig import Rig, ThreadlessLink, memory
from tests.support.sessions import NAMESPACE, Bucket, put, turn, view
from tiers.faulty import Fault, FaultyTier, ScriptedPlan

MakeRig = Callable[..., Rig]
WINDOW = 2
NUM_BLOCKS = 60
RAM = 70 * 8192
KEYS = Prefix(NAMESPACE, 1, NUM_BLOCKS).keys


def in_bucket(bucket: Bucket) -> list[bool]:
    return [key in bucket.tier.blocks for key in KEYS]


def counted(rig: Rig) -> list[bool]:
    catalog = rig.store._catalog
    blocks = [catalog.find(key) for key in KEYS]
    return [block >= 0 and catalog.resident(block, TierKind.S3) for block in blocks]


def work_in_any_order(link: ThreadlessLink, choice: random.Random) -> None:
    """Let the worker end one of the operations it has, whichever."""
    sent = link.wire.sent
    if sent:
        sent.rotate(choice.randrange(len(sent)))
        link.work(1)


@pytest.mark.parametrize("seed", range(12))
def test_what_counts_is_prefix_closed_and_a_crash_leaves_a_hole_no_wider_than_the_span(
    make_rig: MakeRig, bucket: Bucket, seed: int
) -> None:
    choice = random.Random(seed)
    plan = ScriptedPlan()
    rig = make_rig(ram_bytes=RAM, s3=FaultyTier(bucket.tier, plan), s3_records=bucket.records)
    link = rig.links[TierKind.S3]
    turn(rig, rig.attach(NAMESPACE), NUM_BLOCKS)
    plan.add("write", [Fault(Outcome.UNAVAILABLE) if choice.random() < 0.2 else None for _ in range(60)])
    most_out = 0
    for _ in range(4000):
        rig.turn()
        most_out = max(most_out, len(link.wire.sent))
        work_in_any_order(link, choice)
        rig.clock.now += 0.05
        there, relied_on = in_bucket(bucket), counted(rig)
        assert sorted(relied_on, reverse=True) == relied_on, "a child counts before its parent"
        if False in there:
            hole = there.index(False)
            assert not any(there[hole + SPAN :]), "too much lies behind a hole"
        if all(relied_on):
            break
    assert all(relied_on) and most_out == WINDOW, "one chain must fill the window"
    rig.check()


def test_what_is_under_way_far_longer_than_the_rest_is_waited_for(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(ram_bytes=RAM, **bucket.options())
    turn(rig, rig.attach(NAMESPACE), NUM_BLOCKS)
    link = rig.links[TierKind.S3]
    rig.turn()
    slow = link.wire.sent.popleft()
    rig.settle(seconds=2.0)
    assert in_bucket(bucket) == [False] + [True] * (SPAN - 1) + [False] * (NUM_BLOCKS - SPAN)
    assert not any(counted(rig))
    link.wire.sent.append(slow)
    rig.settle(seconds=2.0)
    assert view(rig).durable == "s3" and all(counted(rig))
    rig.check()


def test_a_crash_in_the_middle_of_uploads_is_made_good_after_the_restart(make_rig: MakeRig, bucket: Bucket) -> None:
    disk = memory(TierKind.SSD)
    before = make_rig("a", ram_bytes=RAM, ssd=disk, **bucket.options())
    turn(before, before.attach(NAMESPACE), NUM_BLOCKS)
    link = before.links[TierKind.S3]
    while sum(in_bucket(bucket)) < 7:
        before.turn()
        before.links[TierKind.SSD].work()
        link.wire.sent.rotate(1)
        link.work(1)
        before.clock.now += 0.02
    assert in_bucket(bucket) != sorted(in_bucket(bucket), reverse=True) or len(link.wire.sent)
    after = make_rig("b", ram_bytes=RAM, ssd=disk, ssd_records=before.ssd_records, **bucket.options())
    after.settle(seconds=5.0)
    assert all(in_bucket(bucket)) and view(after).durable == "s3"
    after.check()


def test_children_of_a_block_that_the_bucket_does_not_take_are_not_counted(make_rig: MakeRig, bucket: Bucket) -> None:
    plan = ScriptedPlan()
    rig = make_rig(ram_bytes=RAM, s3=FaultyTier(bucket.tier, plan), s3_records=bucket.records)
    turn(rig, rig.attach(NAMESPACE), 4)
    # The first block fails, its child is taken, and then nothing is for a long time.
    plan.add("write", [Fault(Outcome.UNAVAILABLE), None, *[Fault(Outcome.UNAVAILABLE)] * 40])
    rig.settle(seconds=3.0)
    assert in_bucket(bucket)[:4] == [False, True, False, False]
    assert not any(counted(rig)) and bucket.revision() is None
    rig.settle(seconds=60.0)
    assert view(rig).durable == "s3" and bucket.revision() == 1
    rig.check()


def test_a_block_that_nobody_has_ends_what_is_uploaded_of_its_session(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(ram_bytes=RAM, **bucket.options())
    engine = rig.attach(NAMESPACE)
    rig.put(engine, NAMESPACE, KEYS[:2])
    block = KEYS[3]
    rig.put(engine, NAMESPACE, [*KEYS[:3], block], 3)
    rig.store.session_put(engine, put(4))
    rig.settle(seconds=40.0)
    assert in_bucket(bucket)[:4] == [True, True, False, False] and bucket.revision() == 1
    rig.check()
