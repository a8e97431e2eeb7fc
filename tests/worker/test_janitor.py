"""Deletion, expiry and size in a bucket that several daemons share."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvstore import session_record as records
from kvstore import wire
from kvstore.bucket import tombstone
from kvstore.bucket.lease import LEASE_S
from kvstore.bucket.tombstone import TOMBSTONE_PREFIX
from kvstore.config import SessionsConfig
from kvstore.core.key import BlockKey, join_keys
from kvstore.core.outcome import Outcome, TierKind
from kvstore.worker import ops
from tests.support.chats import Prefix
from tests.support.janitors import KEYS, in_bucket, stones, together
from tests.support.memory import MemoryInventory
from tests.support.rig import JANITOR, Rig, memory
from tests.support.sessions import NAME, NAMESPACE, Bucket, delete, get, ids, put, turn, view

MakeRig = Callable[..., Rig]


# ---------------------------------------------------------------- deletion


def test_what_another_daemons_session_uses_outlives_a_deletion(make_rig: MakeRig, bucket: Bucket) -> None:
    """Only what this daemon knew was asked, so deleting a session took blocks from those of other daemons."""
    first = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    second = make_rig("b", ssd=memory(TierKind.SSD), **bucket.options())
    turn(first, first.attach(NAMESPACE), 10)
    engine = second.attach(NAMESPACE)
    second.put(engine, NAMESPACE, KEYS[:6])
    second.store.session_put(engine, put(6, session_id="theirs"))
    together([first, second], 3)
    assert in_bucket(bucket) == 10 and ids(first) == {"chat"}
    assert delete(first) == []
    together([first, second], 3)
    assert in_bucket(bucket) == 6 and bucket.revision() is None
    second.store.evict(wire.Evict(["ram", "ssd"]), lambda _: None)
    second.settle()
    assert set(second.fetch(engine, KEYS[:6]).outcomes) == {Outcome.OK}
    first.check()
    second.check()


def test_a_session_that_is_deleted_at_one_daemon_is_gone_at_all_within_the_poll(
    make_rig: MakeRig, bucket: Bucket
) -> None:
    disk = memory(TierKind.SSD)
    first = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    second = make_rig("b", ssd=disk, **bucket.options())
    turn(first, first.attach(NAMESPACE), 10)
    first.settle(seconds=2.0)
    assert view(second).num_blocks == 10
    second.fetch(second.attach(NAMESPACE), KEYS)
    second.settle(seconds=1.0)
    assert len(disk.blocks) == 10
    delete(first)
    together([first, second], JANITOR.tombstone_poll_s + 2)
    assert not ids(first) and not ids(second)
    assert not disk.blocks and NAME not in second.ssd_records.records and not bucket.tier.blocks
    assert isinstance(get(second), wire.Error)
    second.check()


def test_a_dead_record_that_is_read_from_the_bucket_is_no_session(make_rig: MakeRig, bucket: Bucket) -> None:
    """The tombstone is there and known, the record not yet deleted: whoever should do that is away."""
    rig = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    turn(rig, rig.attach(NAMESPACE), 3)
    rig.settle(seconds=1.0)
    record = bucket.records.records[NAME]
    delete(rig)
    rig.settle(seconds=2.0)
    bucket.records.records[NAME] = record
    other = make_rig("b", ssd=memory(TierKind.SSD), **bucket.options())
    assert isinstance(get(other), wire.Error) and not ids(other)
    rig.settle(seconds=JANITOR.sweep_every_s + 60)
    assert bucket.revision() is None


def test_a_turn_that_is_newer_than_the_deletion_is_a_session_of_its_own(make_rig: MakeRig, bucket: Bucket) -> None:
    first = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    second = make_rig("b", ssd=memory(TierKind.SSD), **bucket.options())
    turn(first, first.attach(NAMESPACE), 4)
    first.settle(seconds=1.0)
    view(second)
    engine = second.attach(NAMESPACE)
    second.fetch(engine, KEYS[:4])
    turn(second, engine, 8, 1)
    delete(first)
    first.settle(seconds=2.0)
    together([first, second], JANITOR.tombstone_poll_s + 5)
    assert view(second).messages == put(8).messages and view(second).durable == "s3"
    assert in_bucket(bucket) == 8
    assert view(first).num_blocks == 8
    second.check()


def test_a_session_begun_anew_under_the_name_of_a_deleted_one_stays(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 5)
    rig.settle(seconds=1.0)
    delete(rig)
    rig.settle(seconds=1.0)
    turn(rig, engine, 3)
    rig.settle(seconds=JANITOR.sweep_every_s)
    assert view(rig).durable == "s3" and in_bucket(bucket) == 3
    other = make_rig("b", ssd=memory(TierKind.SSD), **bucket.options())
    assert view(other).num_blocks == 3
    rig.check()


@pytest.mark.parametrize("is_away", [False, True], ids=["bucket_answers", "bucket_is_away"])
def test_a_deletion_outlives_the_daemon_that_is_killed_in_the_middle_of_it(
    make_rig: MakeRig, bucket: Bucket, is_away: bool
) -> None:
    disk = memory(TierKind.SSD)
    rig = make_rig("a", ssd=disk, **bucket.options())
    turn(rig, rig.attach(NAMESPACE), 6)
    rig.settle(seconds=1.0)
    bucket.records.is_down = is_away
    rig.links[TierKind.S3].is_tidying = False
    answers = delete(rig)
    while not answers:
        rig.turn()
        rig.links[TierKind.SSD].work(1)
        rig.links[TierKind.S3].work(0 if is_away else 1)
        rig.clock.now += 0.02
    assert len(stones(bucket)) == (not is_away) and in_bucket(bucket) == 6
    bucket.records.is_down = False
    after = make_rig("b", ssd=disk, ssd_records=rig.ssd_records, clock=rig.clock, **bucket.options())
    after.settle(seconds=2 * LEASE_S + 10)
    assert not ids(after) and bucket.revision() is None and in_bucket(bucket) == 0
    assert not after.ssd_records.records, "the tombstone on the disk has done its work"
    after.check()


def test_a_kill_between_any_two_requests_of_a_deletion_leaves_it_to_the_next(make_rig: MakeRig, bucket: Bucket) -> None:
    """Whoever has the lease is cut off after n requests; blocks are deleted from the end of the prefix to its head."""
    for num_requests in range(12):
        rig = make_rig(f"a{num_requests}", **bucket.options())
        turn(rig, rig.attach(NAMESPACE), 10)
        rig.settle(seconds=5 * LEASE_S)
        assert in_bucket(bucket) == 10
        link = rig.links[TierKind.S3]
        assert link.worker.janitor is not None
        cut_off_after(link.worker.janitor, num_requests)
        delete(rig)
        rig.settle(seconds=1.0)
        in_bucket(bucket)
        other = make_rig(f"b{num_requests}", **bucket.options())
        other.settle(seconds=2 * LEASE_S + 30)
        assert in_bucket(bucket) == 0 and bucket.revision() is None
        assert all(not stone.keys for stone in stones(bucket))


def cut_off_after(janitor: object, num_requests: int) -> None:
    left = num_requests
    before = janitor._pace  # type: ignore[attr-defined]

    def pace() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("killed")
        before()

    for part in (janitor._graves, janitor):  # type: ignore[attr-defined]
        part._pace = pace


def test_tombstones_are_taken_away_after_their_time(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD), **bucket.options(), sessions=SessionsConfig(ttl_s=3 * 86400.0))
    turn(rig, rig.attach(NAMESPACE), 3)
    rig.settle(seconds=1.0)
    delete(rig)
    rig.settle(seconds=JANITOR.tombstone_poll_s + 1.0)
    rig.clock.now += 2.9 * 86400.0
    rig.settle(seconds=1000.0)
    assert [stone.keep_s for stone in stones(bucket)] == [3 * 86400.0]
    rig.clock.now += 0.2 * 86400.0
    rig.settle(seconds=1000.0)
    assert not stones(bucket)
    rig.check()


# ---------------------------------------------------------------- expiry and size


def test_a_session_that_no_daemon_knows_any_more_expires_in_the_bucket(make_rig: MakeRig, bucket: Bucket) -> None:
    config = SessionsConfig(ttl_s=100.0)
    before = make_rig("a", ssd=memory(TierKind.SSD), sessions=config, **bucket.options())
    turn(before, before.attach(NAMESPACE), 5)
    before.store.session_put(before.attach(NAMESPACE), put(2, session_id="pinned", pin=True))
    before.settle(seconds=1.0)
    rig = make_rig("b", ssd=memory(TierKind.SSD), clock=before.clock, **bucket.options())
    rig.settle(seconds=90.0)
    assert in_bucket(bucket) == 5
    rig.settle(seconds=1000.0)
    assert bucket.revision() is None and in_bucket(bucket) == 2
    assert view(rig, "pinned").num_blocks == 2
    deleted = rig.stats()["tiers"]["s3"]["bucket"]["deleted"]
    assert deleted["expired_sessions"] == 1 and deleted["deleted_blocks"] == 3
    rig.check()


def test_blocks_that_no_session_names_go_once_they_are_older_than_an_upload_may_take(
    make_rig: MakeRig, bucket: Bucket
) -> None:
    other = make_rig("a", **bucket.options())
    turn(other, other.attach(NAMESPACE), 4)
    other.settle(seconds=1.0)
    orphans = Prefix(NAMESPACE, 9, 7).keys
    for key in orphans:
        bucket.tier.blocks[key] = next(iter(bucket.tier.blocks.values()))
    rig = make_rig("b", ssd=memory(TierKind.SSD), **bucket.options())
    rig.settle(seconds=3000.0)
    assert len(bucket.tier.blocks) == 11
    rig.settle(seconds=2500.0)
    assert in_bucket(bucket) == len(bucket.tier.blocks) == 4
    level = rig.stats()["tiers"]["s3"]["bucket"]
    assert level["deleted"] == {"orphan_blocks": 7} and level["blocks"] == 4 and level["has_lease"]
    assert level["bytes"] == 4 * 8192 and level["sessions"] == 1


def test_an_orphan_that_a_session_has_come_to_name_meanwhile_stays(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(**bucket.options(), janitor=replace(JANITOR, orphan_grace_s=10.0))
    turn(rig, rig.attach(NAMESPACE), 4)
    rig.settle(seconds=1.0)
    record = bucket.records.records.pop(NAME)
    janitor = rig.links[TierKind.S3].worker.janitor
    assert janitor is not None
    list_blocks = janitor._inventory.blocks

    def session_comes_back(following: str | None = None) -> object:
        bucket.records.records[NAME] = record
        return list_blocks(following)

    janitor._inventory.blocks = session_comes_back  # type: ignore[method-assign, assignment]
    rig.settle(seconds=2000.0)
    assert in_bucket(bucket) == 4


def test_above_the_limit_the_sessions_used_longest_ago_give_their_own_blocks_from_the_end(
    make_rig: MakeRig, bucket: Bucket
) -> None:
    limit = replace(JANITOR, max_bytes=20 * 8192)
    rig = make_rig(ram_bytes=80 * 8192, ssd=memory(TierKind.SSD), **bucket.options(), janitor=limit)
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 10)
    rig.store.session_put(engine, put(4, session_id="shares"))
    rig.settle(seconds=10.0)
    for number in range(2, 5):
        rig.put(engine, NAMESPACE, Prefix(NAMESPACE, number, 4).keys)
        rig.store.session_put(engine, put(4, session_id=f"later-{number}", seed=number))
        rig.settle(seconds=10.0)
    assert len(bucket.tier.blocks) == 22
    rig.settle(seconds=1000.0)
    assert len(bucket.tier.blocks) == 19 and in_bucket(bucket) == 7, "down to 95% of the limit"
    record = records.decode(bucket.records.records[NAME].data)
    assert record is not None and record.s3_blocks == 7
    for number in range(5, 9):
        rig.put(engine, NAMESPACE, Prefix(NAMESPACE, number, 4).keys)
        rig.store.session_put(engine, put(4, session_id=f"later-{number}", seed=number))
        rig.settle(seconds=10.0)
    rig.settle(seconds=1000.0)
    assert len(bucket.tier.blocks) == 19 and in_bucket(bucket) == 0
    assert rig.stats()["tiers"]["s3"]["bucket"]["deleted"] == {"size_blocks": 19}
    for number in range(6, 9):
        assert set(Prefix(NAMESPACE, number, 4).keys) <= bucket.tier.blocks.keys()
    other = make_rig("b", **bucket.options())
    assert view(other).messages == put(10).messages
    assert other.fetch(other.attach(NAMESPACE), KEYS).outcomes == [Outcome.MISS] * 10
    rig.check()


def test_a_session_that_goes_on_while_its_blocks_are_to_go_keeps_them(make_rig: MakeRig, bucket: Bucket) -> None:
    limit = replace(JANITOR, max_bytes=8192)
    rig = make_rig(**bucket.options(), janitor=limit)
    turn(rig, rig.attach(NAMESPACE), 4)
    rig.settle(seconds=1.0)
    janitor = rig.links[TierKind.S3].worker.janitor
    assert janitor is not None
    read = janitor._index.read

    def goes_on(name: str) -> object:
        bucket.records.put(NAME, bucket.records.records[NAME].data)
        return read(name)

    rig.settle(seconds=10.0)
    janitor._index.read = goes_on  # type: ignore[method-assign, assignment]
    rig.settle(seconds=500.0)
    assert in_bucket(bucket) == 4


def test_what_a_session_in_use_shares_is_not_taken_through_another(make_rig: MakeRig, bucket: Bucket) -> None:
    """The session that was in use had given up its claim by then, so the next one took the shared head for its own."""
    rig = make_rig(**bucket.options(), janitor=replace(JANITOR, max_bytes=8192))
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 10)
    rig.settle(seconds=2.0)
    rig.store.session_put(engine, put(4, session_id="shares"))
    rig.settle(seconds=10.0)
    janitor = rig.links[TierKind.S3].worker.janitor
    assert janitor is not None
    read = janitor._index.read

    def goes_on(name: str) -> object:
        if name == NAME:
            bucket.records.put(NAME, bucket.records.records[NAME].data)
        return read(name)

    janitor._index.read = goes_on  # type: ignore[method-assign, assignment]
    rig.settle(seconds=500.0)
    assert in_bucket(bucket) == 10


def test_what_a_session_shares_that_came_during_the_sweep_is_not_taken(make_rig: MakeRig, bucket: Bucket) -> None:
    """How many sessions name a block was counted before a million blocks were listed, and not looked at again."""
    rig = make_rig(**bucket.options(), janitor=replace(JANITOR, max_bytes=7 * 8192))
    engine = rig.attach(NAMESPACE)
    turn(rig, engine, 10)
    rig.settle(seconds=2.0)
    rig.put(engine, NAMESPACE, Prefix(NAMESPACE, 2, 4).keys)
    rig.store.session_put(engine, put(4, session_id="later", seed=2))
    rig.settle(seconds=2.0)
    rig.store.session_put(engine, put(4, session_id="newest"))
    rig.settle(seconds=2.0)
    name = records.record_name(("", NAMESPACE.digest(), "newest"))
    record = bucket.records.records.pop(name)
    assert len(bucket.tier.blocks) == 14
    janitor = rig.links[TierKind.S3].worker.janitor
    assert janitor is not None
    list_blocks = janitor._inventory.blocks

    def newest_comes(following: str | None = None) -> object:
        bucket.records.records[name] = record
        return list_blocks(following)

    janitor._inventory.blocks = newest_comes  # type: ignore[method-assign, assignment]
    rig.settle(seconds=500.0)
    assert len(bucket.tier.blocks) == 6 and in_bucket(bucket) == 4


def test_where_many_records_cannot_be_read_nothing_counts_as_nobodys(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(**bucket.options(), janitor=replace(JANITOR, orphan_grace_s=10.0))
    turn(rig, rig.attach(NAMESPACE), 4)
    rig.settle(seconds=1.0)
    bucket.records.put(NAME, b"encrypted with another key")
    rig.settle(seconds=2000.0)
    assert in_bucket(bucket) == 4
    assert rig.stats()["tiers"]["s3"]["bucket"]["waits"] == "records_unreadable"


def test_only_who_has_the_lease_deletes_and_another_takes_over(make_rig: MakeRig, bucket: Bucket) -> None:
    first = make_rig("a", **bucket.options())
    second = make_rig("b", **bucket.options())
    together([first, second], 3)
    assert first.stats()["tiers"]["s3"]["bucket"]["has_lease"]
    assert not second.stats()["tiers"]["s3"]["bucket"]["has_lease"]
    orphan = BlockKey(b"x" * 32)
    turn(first, first.attach(NAMESPACE), 1)
    first.settle(seconds=1.0)
    bucket.tier.blocks[orphan] = next(iter(bucket.tier.blocks.values()))
    bucket.tier.modified_s[orphan] = -1e6
    second.settle(seconds=LEASE_S - 10)
    assert orphan in bucket.tier.blocks
    second.settle(seconds=1000.0)
    assert second.stats()["tiers"]["s3"]["bucket"]["has_lease"] and orphan not in bucket.tier.blocks


def test_a_bucket_that_is_away_is_tried_again(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(**bucket.options())
    bucket.records.is_down = True
    rig.settle(seconds=200.0)
    level = rig.stats()["tiers"]["s3"]["bucket"]
    assert level["waits"] == "bucket_unavailable" and not level["has_lease"]
    bucket.records.is_down = False
    rig.settle(seconds=2000.0)
    level = rig.stats()["tiers"]["s3"]["bucket"]
    assert level["waits"] == "" and level["has_lease"] and level["swept_s"] > 0


def test_uploads_in_parts_that_nobody_ended_are_aborted_once_they_are_old(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(**bucket.options(), janitor=replace(JANITOR, sweep_every_s=100.0))
    janitor = rig.links[TierKind.S3].worker.janitor
    assert janitor is not None
    inventory = janitor._inventory
    assert isinstance(inventory, MemoryInventory)
    began = rig.clock.now
    inventory.uploads = [began, began + 300.0]
    rig.settle(seconds=JANITOR.orphan_grace_s - 100.0)
    assert len(inventory.uploads) == 2
    rig.settle(seconds=300.0)
    assert inventory.uploads == [began + 300.0]
    assert rig.stats()["tiers"]["s3"]["bucket"]["deleted"] == {"aborted_uploads": 1}


# ---------------------------------------------------------------- one GET


def test_a_daemon_with_an_empty_disk_finds_a_session_in_one_request(make_rig: MakeRig, bucket: Bucket) -> None:
    first = make_rig("a", ssd=memory(TierKind.SSD), **bucket.options())
    turn(first, first.attach(NAMESPACE), 6)
    first.settle(seconds=1.0)
    second = make_rig("b", ssd=memory(TierKind.SSD), **bucket.options())
    link = second.links[TierKind.S3]
    replies: list[wire.Message] = []
    second.store.sessions.get(wire.SessionGet("chat", "", NAMESPACE.digest()), replies.append)
    sent = list(link.wire.sent)
    second.turn()
    assert [type(op) for op in sent] == [ops.RecordGet] and list(link.wire.sent) == sent
    second.settle()
    assert isinstance(replies[0], wire.SessionFound)
    found = second.store.lookup(second.attach(NAMESPACE), wire.Lookup(join_keys(KEYS[:6])))
    assert list(found.tiers) == [TierKind.S3] * 6


def test_names_of_tombstones_tell_sessions_apart() -> None:
    key = ("tenant", NAMESPACE.digest(), "chat")
    names = {
        tombstone.tombstone_name(key, 1.0),
        tombstone.tombstone_name(key, 2.0),
        tombstone.tombstone_name(("", *key[1:]), 1.0),
    }
    assert len(names) == 3 and all(name.startswith(TOMBSTONE_PREFIX) for name in names)


def test_a_bucket_that_is_not_there_is_told_of_before_anybody_stores_to_it(make_rig: MakeRig, bucket: Bucket) -> None:
    """Only the janitor had met it, and `kvstore stats` said that all was well."""
    bucket.records.is_down = True
    bucket.tier.trouble = "there is no bucket"
    rig = make_rig(**bucket.options())
    rig.settle(seconds=1.0)
    tier = rig.stats()["tiers"]["s3"]
    assert (tier["state"], tier["reason"]) == ("degraded", "there is no bucket")
    bucket.records.is_down, bucket.tier.trouble = False, ""
    rig.settle(seconds=2 * LEASE_S)
    tier = rig.stats()["tiers"]["s3"]
    assert (tier["state"], tier["reason"]) == ("ok", "")
