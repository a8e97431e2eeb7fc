"""Sessions that were deleted at another daemon stay deleted, however they are numbered here and whatever comes late."""

from collections.abc import Callable
from functools import partial

from kvstore import session_record as records
from kvstore import wire
from kvstore.bucket.tombstone import TOMBSTONE_PREFIX, make_tombstone
from kvstore.bucket.tombstone import put as put_stone
from kvstore.core.outcome import TierKind
from tests.support.janitors import KEYS, in_bucket, together
from tests.support.rig import JANITOR, Rig, memory
from tests.support.sessions import NAME, NAMESPACE, Bucket, delete, ids, pin, turn, view

MakeRig = Callable[..., Rig]


def test_a_session_that_was_only_pinned_elsewhere_stays_deleted(make_rig: MakeRig, bucket: Bucket) -> None:
    """A pin changes the bucket's record and not its revision, so another daemon gave what it took over a number of its
    own, one higher. The deletion named the bucket's, and that daemon brought the session back as a newer one."""
    first = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    second = make_rig("b", ssd=memory(TierKind.SSD), **bucket.options())
    turn(first, first.attach(NAMESPACE), 4)
    together([first, second], 3)
    for pinned in (True, False):
        assert view(second).pinned != pinned
        pin(first, pinned)
        together([first, second], 3)
    assert view(second).revision == 3 and bucket.revision() == 1
    delete(first)
    together([first, second], JANITOR.tombstone_poll_s + 10)
    assert not ids(first) and not ids(second) and bucket.revision() is None and in_bucket(bucket) == 0
    second.check()


def test_a_deletion_names_the_buckets_number_and_spares_a_turn_that_came_since(
    make_rig: MakeRig, bucket: Bucket
) -> None:
    """The daemon that deleted knew the session by a higher number than the bucket, and so deleted the next turn."""
    first = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    second = make_rig("b", ssd=memory(TierKind.SSD), **bucket.options())
    engine = first.attach(NAMESPACE)
    turn(first, engine, 4)
    together([first, second], 3)
    view(second)
    pin(first, True)
    together([first, second], 3)
    assert view(second).revision == 2 and bucket.revision() == 1
    delete(second)
    second.settle()
    turn(first, engine, 8, 1)
    together([first, second], JANITOR.tombstone_poll_s + 10)
    assert view(first).num_blocks == 8 and view(first).durable == "s3" and in_bucket(bucket) == 8


def test_a_deletion_that_is_known_before_the_disk_is_read_ends_what_the_disk_kept(
    make_rig: MakeRig, bucket: Bucket
) -> None:
    """The bucket's worker is up first and tells of each tombstone once; sessions that came from the disk after that
    lived on."""
    disk = memory(TierKind.SSD)
    first = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    second = make_rig("b", ssd=disk, **bucket.options())
    turn(first, first.attach(NAMESPACE), 4)
    together([first, second], 3)
    view(second)
    second.fetch(second.attach(NAMESPACE), KEYS[:4])
    second.settle(seconds=1.0)
    assert NAME in second.ssd_records.records and disk.blocks
    delete(first)
    first.settle(seconds=3.0)
    after = make_rig("c", ssd=disk, ssd_records=second.ssd_records, is_started=False, **bucket.options())
    let_the_disk_come(after, after_s=5.0)
    assert not ids(after) and bucket.revision() is None
    assert not disk.blocks and NAME not in after.ssd_records.records
    after.check()


def test_a_session_that_the_bucket_told_of_before_the_disk_did_is_no_conflict(
    make_rig: MakeRig, bucket: Bucket
) -> None:
    disk = memory(TierKind.SSD)
    before = make_rig("a", ssd=disk, **bucket.options())
    turn(before, before.attach(NAMESPACE), 4)
    before.settle(seconds=3.0)
    after = make_rig("b", ssd=disk, ssd_records=before.ssd_records, is_started=False, **bucket.options())
    let_the_disk_come(after, after_s=1.0, meanwhile=view)
    assert ids(after) == {"chat"} and view(after).durable == "s3"
    after.check()


def let_the_disk_come(rig: Rig, after_s: float, meanwhile: Callable[[Rig], object] = lambda _: None) -> None:
    answers = rig.links[TierKind.SSD].wire.answers
    ready = list(answers)
    answers.clear()
    rig.settle(seconds=after_s)
    meanwhile(rig)
    answers.extend(ready)
    rig.settle(seconds=5.0)


def test_a_deletion_covers_the_turns_that_other_daemons_had_made_by_then(make_rig: MakeRig, bucket: Bucket) -> None:
    """The tombstone named the newest turn known to the daemon that was asked; one in the bucket that it had not seen
    counted as made since, and the session came back."""
    first = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    second = make_rig("b", ssd=memory(TierKind.SSD), **bucket.options())
    third = make_rig("c", ssd=memory(TierKind.SSD), **bucket.options())
    turn(first, first.attach(NAMESPACE), 4)
    together([first, second], 3)
    view(second)
    engine = second.attach(NAMESPACE)
    second.fetch(engine, KEYS[:4])
    turn(second, engine, 8, 1)
    together([first, second], 3)
    assert bucket.revision() == 2 and in_bucket(bucket) == 8
    known = first.store._session_table.get(("", NAMESPACE.digest(), "chat"))
    assert known is not None and known.revision == 1
    known.checked_at = first.clock.now  # the bucket was asked just before that
    assert delete(first) == []
    together([first, second, third], JANITOR.tombstone_poll_s + 10)
    assert not ids(first) and not ids(second) and bucket.revision() is None and in_bucket(bucket) == 0


def test_a_session_that_only_the_bucket_knows_can_be_deleted_at_any_daemon(make_rig: MakeRig, bucket: Bucket) -> None:
    first = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    second = make_rig("b", ssd=memory(TierKind.SSD), **bucket.options())
    turn(first, first.attach(NAMESPACE), 4)
    together([first, second], 3)
    answers = delete(second)
    together([first, second], JANITOR.tombstone_poll_s + 10)
    assert answers == [wire.SessionDeleted(blocks_deleted=4, blocks_shared=0)]
    assert not ids(first) and bucket.revision() is None and in_bucket(bucket) == 0
    answers = delete(second)
    second.settle()
    assert isinstance(answers[0], wire.Error) and answers[0].code == wire.ErrorCode.NOT_FOUND


def test_two_deletions_that_knew_different_turns_cover_both(make_rig: MakeRig, bucket: Bucket) -> None:
    """The second one's tombstone replaced the first one's, which covered more, and each daemon was told once of each
    name: whoever heard of the lesser alone brought the session back."""
    first = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    second = make_rig("b", ssd=memory(TierKind.SSD), **bucket.options())
    third = make_rig("c", ssd=memory(TierKind.SSD), **bucket.options())
    engine = first.attach(NAMESPACE)
    turn(first, engine, 4)
    together([first, second, third], 3)
    view(second)
    turn(first, engine, 8, 1)
    together([first, second, third], 3)
    assert view(third).revision == 2
    stone = partial(make_tombstone, ("", NAMESPACE.digest(), "chat"), created_s(bucket), ttl_s=86400.0, now_s=0.0)
    put_stone(bucket.records, stone(2, b"".join(KEYS[:8])))
    put_stone(bucket.records, stone(1, b"".join(KEYS[:4])))
    together([first, second, third], JANITOR.tombstone_poll_s + 10)
    assert not ids(first) and not ids(second) and not ids(third)
    assert bucket.revision() is None and in_bucket(bucket) == 0


def test_a_tombstone_that_covers_more_than_before_is_told_again(make_rig: MakeRig, bucket: Bucket) -> None:
    first = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    second = make_rig("b", ssd=memory(TierKind.SSD), **bucket.options())
    engine = first.attach(NAMESPACE)
    turn(first, engine, 4)
    turn(first, engine, 8, 1)
    together([first, second], 3)
    assert view(second).revision == 2
    stone = partial(make_tombstone, ("", NAMESPACE.digest(), "chat"), created_s(bucket), ttl_s=86400.0, now_s=0.0)
    put_stone(bucket.records, stone(1, b"".join(KEYS[:4])))
    together([first, second], JANITOR.tombstone_poll_s + 10)
    assert ids(first) == ids(second) == {"chat"}
    put_stone(bucket.records, stone(9, b"".join(KEYS[:8])))
    together([first, second], JANITOR.tombstone_poll_s + 10)
    assert not ids(first) and not ids(second) and bucket.revision() is None and in_bucket(bucket) == 0


def created_s(bucket: Bucket) -> float:
    record = records.decode(bucket.records.records[NAME].data)
    assert record is not None
    return record.created_s


def test_a_tombstone_that_cannot_be_read_is_not_read_at_every_poll(make_rig: MakeRig, bucket: Bucket) -> None:
    """Those of daemons with another key were, one request each, so that the poll of a shared bucket took minutes."""
    rig = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    name = TOMBSTONE_PREFIX + "0" * 64
    bucket.records.put(name, b"sealed with another key")
    read: list[str] = []
    get = bucket.records.get
    bucket.records.get = lambda name: [read.append(name), get(name)][1]  # type: ignore[method-assign, func-returns-value]
    rig.settle(seconds=10 * JANITOR.tombstone_poll_s)
    assert read.count(name) == 1
    bucket.records.put(name, b"and once more")
    rig.settle(seconds=10 * JANITOR.tombstone_poll_s)
    assert read.count(name) == 2
