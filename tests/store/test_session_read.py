"""Who asks for a session is answered in time, and told no more than is known."""

from collections.abc import Callable

import pytest

from kvstore import wire
from kvstore.core.outcome import TierKind
from kvstore.wire import ErrorCode
from tests.support.rig import Rig, memory
from tests.support.sessions import NAME, NAMESPACE, Bucket, get, ids, put, turn, turn_on_disk, view

MakeRig = Callable[..., Rig]


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
    rig = make_rig(ssd=memory(TierKind.SSD))
    turn_on_disk(rig, monkeypatch)
    rig.ssd_records.is_down = True
    answer = get(rig)
    assert isinstance(answer, wire.Error) and answer.code == ErrorCode.BUSY
    rig.ssd_records.is_down = False
    assert view(rig).revision == 1


def test_a_session_whose_record_is_gone_for_good_is_known_no_more(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD))
    turn_on_disk(rig, monkeypatch)
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
    rig = make_rig(ssd=memory(TierKind.SSD), **bucket.options())
    turn_on_disk(rig, monkeypatch)
    rig.ssd_records.delete(NAME)
    assert view(rig).messages == put(2).messages
    rig.settle()
    rig.check()
