"""Blocks that the bucket had already, and that go before a record names them."""

from collections.abc import Callable

import pytest

from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome, TierKind
from kvstore.store.borrowed import Borrowed
from kvstore.store.second_look import LOOK_AFTER_S
from kvstore.worker import ops
from tests.support.janitors import KEYS, in_bucket, together
from tests.support.rig import Rig, memory
from tests.support.sessions import NAMESPACE, Bucket, delete, ids, put, turn, view

MakeRig = Callable[..., Rig]


def theirs(rig: Rig, num_blocks: int = 8) -> None:
    rig.put(rig.attach(NAMESPACE), NAMESPACE, KEYS[:num_blocks])
    rig.store.session_put(rig.attach(NAMESPACE), put(num_blocks, session_id="theirs"))


@pytest.mark.parametrize("is_known_by", ["upload", "session"])
def test_blocks_of_a_session_that_ends_before_ours_names_them_are_uploaded_again(
    make_rig: MakeRig, bucket: Bucket, is_known_by: str
) -> None:
    """They had answered EXISTS, or were known from the other session, and counted as stored for good: the session was
    shown as durable, and lacked its beginning."""
    first = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    second = make_rig("b", ssd=memory(TierKind.SSD), **bucket.options())
    turn(first, first.attach(NAMESPACE), 5)
    together([first, second], 3)
    assert in_bucket(bucket) == 5
    if is_known_by == "session":
        assert view(second).num_blocks == 5
        second.fetch(second.attach(NAMESPACE), KEYS[:5])
    hold_records(second, bucket)
    theirs(second)
    second.settle(seconds=1.0)
    delete(first)
    together([first, second], 40)
    assert ids(second) == {"theirs"} and not set(KEYS[:5]) & bucket.tier.blocks.keys()
    second.links[TierKind.S3].worker._records = bucket.records
    together([first, second], LOOK_AFTER_S + 10)
    assert in_bucket(bucket) == 8 and view(second, "theirs").durable == "s3"
    assert second.stats()["errors"]["s3_shared_blocks_lost"] == 1
    after = make_rig("c", ssd=memory(TierKind.SSD), **bucket.options())
    assert view(after, "theirs").num_blocks == 8
    assert set(after.fetch(after.attach(NAMESPACE), KEYS[:8]).outcomes) == {Outcome.OK}
    second.check()


def test_blocks_that_stay_are_looked_for_once_with_one_request(make_rig: MakeRig, bucket: Bucket) -> None:
    first = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    turn(first, first.attach(NAMESPACE), 5)
    first.settle(seconds=1.0)
    second = make_rig("b", ssd=memory(TierKind.SSD), **bucket.options())
    asked = count_heads(bucket)
    theirs(second)
    second.settle(seconds=LOOK_AFTER_S - 5)
    assert asked == []
    second.settle(seconds=10 * LOOK_AFTER_S)
    assert asked == [KEYS[4]]
    second.store.session_put(second.attach(NAMESPACE), put(8, 1, session_id="theirs"))
    second.settle(seconds=10 * LOOK_AFTER_S)
    assert asked == [KEYS[4]] and "s3_shared_blocks_lost" not in second.stats()["errors"]


def test_a_bucket_that_is_away_is_asked_again_later_and_by_few_at_once(make_rig: MakeRig, bucket: Bucket) -> None:
    first = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    turn(first, first.attach(NAMESPACE), 5)
    first.settle(seconds=1.0)
    second = make_rig("b", ssd=memory(TierKind.SSD), **bucket.options())
    asked = count_heads(bucket)
    for number in range(5):
        second.put(second.attach(NAMESPACE), NAMESPACE, KEYS[:8])
        second.store.session_put(second.attach(NAMESPACE), put(8, session_id=f"s{number}"))
    second.settle(seconds=1.0)
    link = second.links[TierKind.S3]
    link.is_tidying = False
    second.clock.now += LOOK_AFTER_S
    second.turn()
    assert sum(isinstance(op, ops.Discover) for op in link.wire.sent) == 2
    link.die()
    second.settle(seconds=3 * LOOK_AFTER_S)
    assert set(asked) == {KEYS[4]} and second.store._borrowed.among(list(range(20))) == []
    second.check()


def test_what_is_borrowed_is_bounded() -> None:
    borrowed = Borrowed()
    for block in range(100_000):
        borrowed.add(block)
    assert len(borrowed.among(list(range(100_000)))) == 1 << 16
    borrowed.removed(99_999)
    borrowed.settle([99_998])
    assert borrowed.among([99_997, 99_998, 99_999]) == [99_997]


def hold_records(rig: Rig, bucket: Bucket) -> None:
    """From now on, session records of this daemon do not get through to the bucket."""

    class Held:
        def __getattr__(self, name: str) -> object:
            return getattr(bucket.records, name)

        def put(self, name: str, data: bytes, **conditions: object) -> str | None:
            if name.startswith("sessions/"):
                bucket.records.is_down = True
                try:
                    bucket.records.check()
                finally:
                    bucket.records.is_down = False
            return bucket.records.put(name, data, **conditions)  # type: ignore[arg-type]

    rig.links[TierKind.S3].worker._records = Held()  # type: ignore[assignment]


def count_heads(bucket: Bucket) -> list[BlockKey]:
    asked: list[BlockKey] = []
    contains = bucket.tier.contains

    def counted(keys: list[BlockKey]) -> list[Outcome]:
        asked.extend(keys)
        return contains(keys)

    bucket.tier.contains = counted  # type: ignore[method-assign, assignment]
    return asked
