"""The link to a worker: what waits and what goes out, and what becomes of it when the worker dies."""

from collections.abc import Callable

import pytest

from kvstore.core.outcome import Outcome, TierKind
from kvstore.store import link as module
from kvstore.store.read_pace import ReadPace
from kvstore.worker import ops
from tests.support.chats import Prefix, namespace
from tests.support.rig import Rig, ThreadlessLink, memory

NAMESPACE = namespace()
MakeRig = Callable[..., Rig]


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig(ssd=memory(TierKind.SSD), s3=memory(TierKind.S3))


@pytest.fixture
def link(rig: Rig) -> ThreadlessLink:
    return rig.links[TierKind.SSD]


def packed(number: int, num_bytes: int = 8192) -> ops.PackedMeta:
    key = Prefix(NAMESPACE, number, 1).keys[0]
    return ops.PackedMeta(key, NAMESPACE.root(), NAMESPACE.digest(), 0, num_bytes)


def write(link: ThreadlessLink, number: int, results: list[ops.Result], num_bytes: int = 8192) -> None:
    link.store(ops.Write(link.next_op(), packed(number, num_bytes), 0), results.append)


def read(link: ThreadlessLink, number: int, results: list[ops.Result]) -> int:
    op = link.next_op()
    assert link.load(ops.Read(op, packed(number), 8192), results.append)
    return op


def kinds(link: ThreadlessLink) -> list[str]:
    return [type(op).__name__ for op in link.wire.sent]


def test_writes_go_out_together_as_far_as_the_window_allows(link: ThreadlessLink) -> None:
    """One write per turn went out, so each block had a sync of its own."""
    results: list[ops.Result] = []
    sent = 0
    while link.store_room():
        write(link, sent, results)
        sent += 1
    assert sent == 64
    link.pump()
    assert kinds(link) == ["Write"] * 64
    assert not link.store_room()
    link.work(10)
    link.receive()
    assert link.store_room() and len(results) == 10


def test_the_window_counts_bytes_too(link: ThreadlessLink) -> None:
    results: list[ops.Result] = []
    sent = 0
    while link.store_room():
        write(link, sent, results, num_bytes=300_000)
        sent += 1
    assert sent == 4


def test_loads_go_before_stores_but_stores_are_not_forgotten(link: ThreadlessLink, rig: Rig) -> None:
    results: list[ops.Result] = []
    for number in range(8):
        read(link, number, results)
    write(link, 20, results)
    link._last_store = rig.clock.now
    link.pump()
    assert kinds(link) == ["Read"] * 4
    rig.clock.now += 0.3
    link.pump()
    assert kinds(link) == ["Read"] * 4 + ["Write"]


def test_loads_that_nobody_wants_any_more_are_taken_back_before_they_are_sent(link: ThreadlessLink) -> None:
    results: list[ops.Result] = []
    numbers = [read(link, number, results) for number in range(6)]
    link.pump()
    link.cancel_loads(lambda op: op == numbers[5])
    assert [(result.op, result.outcome) for result in results] == [(numbers[4], Outcome.CANCELLED)]
    link.work()
    link.receive()
    link.pump()
    assert [op.op for op in link.wire.sent] == [numbers[5]]  # type: ignore[union-attr]


def test_a_full_queue_refuses_loads(link: ThreadlessLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_LOADS", 3)
    results: list[ops.Result] = []
    for number in range(3):
        read(link, number, results)
    assert not link.load(ops.Read(link.next_op(), packed(9), 0), results.append)


def test_no_more_than_so_many_records_are_under_way(link: ThreadlessLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request for a session sent one, so a bucket that hung made the worker's queue grow without bound."""
    monkeypatch.setattr(module, "MAX_RECORDS", 2)
    results: list[ops.Result] = []
    for _ in range(3):
        link.record(ops.RecordGet(link.next_op(), "sessions/x"), results.append)
    assert [result.outcome for result in results] == [Outcome.BUSY]
    link.work()
    link.receive()
    assert [result.outcome for result in results] == [Outcome.BUSY, Outcome.MISS, Outcome.MISS]
    link.record(ops.RecordGet(link.next_op(), "sessions/x"), results.append)
    assert len(results) == 3


def test_what_a_dead_worker_had_fails_once_it_is_certainly_gone(link: ThreadlessLink, rig: Rig) -> None:
    results: list[ops.Result] = []
    for number in range(6):
        read(link, number, results)
    write(link, 20, results)
    link.pump()
    link.die()
    link.receive()
    assert results == []
    rig.clock.now += 0.06
    link.pump()
    assert len(results) == 7 and {result.outcome for result in results} == {Outcome.UNAVAILABLE}
    assert not link.ready and link.sources() == [] and not link.store_room()
    link.record(ops.RecordGet(link.next_op(), "x"), results.append)
    assert results[-1].outcome == Outcome.UNAVAILABLE
    assert not link.load(ops.Read(link.next_op(), packed(1), 0), results.append)


def test_a_worker_that_died_a_moment_ago_does_not_hold_up_whoever_sends_to_it(link: ThreadlessLink, rig: Rig) -> None:
    """A message to a peer that is gone waits for the next peer: the daemon stood still until it was killed."""
    results: list[ops.Result] = []
    link.die()
    link.record(ops.RecordGet(link.next_op(), "sessions/x"), results.append)
    read(link, 1, results)
    write(link, 2, results)
    link.pump()
    link.receive()
    rig.clock.now += 0.06
    link.pump()
    assert [result.outcome for result in results] == [Outcome.UNAVAILABLE] * 3


def test_a_worker_that_hung_up_is_ended(link: ThreadlessLink, rig: Rig) -> None:
    results: list[ops.Result] = []
    link.wire.has_peer = False
    link.record(ops.RecordGet(link.next_op(), "sessions/x"), results.append)
    rig.settle(seconds=1.0)
    assert [result.outcome for result in results] == [Outcome.UNAVAILABLE] and link.ready


def test_the_last_words_of_a_worker_are_heard(link: ThreadlessLink, rig: Rig) -> None:
    """Why a tier cannot be opened was often lost: the process had ended by the time the message was looked for."""
    link.die()
    link.receive()
    link._answer([ops.Failed("the disk is gone", fatal=False)])
    rig.clock.now += 0.06
    link.pump()
    assert link.failure == "the disk is gone" and not link.is_fatal


def test_a_worker_that_keeps_dying_is_started_less_and_less_often(link: ThreadlessLink, rig: Rig) -> None:
    pauses = []
    for _ in range(7):
        link.die()
        link.receive()
        rig.clock.now += 0.06
        link.pump()
        assert link._restart_at is not None
        pauses.append(round(link._restart_at - rig.clock.now, 3))
        rig.clock.now = link._restart_at
        link.pump()
        link.receive()
        assert link.ready
    assert pauses == [0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 30.0]
    rig.clock.now += 100.0
    link.die()
    link.receive()
    rig.clock.now += 0.06
    link.pump()
    assert link._restart_at == pytest.approx(rig.clock.now + 0.5)


def test_what_is_to_be_deleted_waits_for_a_tier_that_is_down(link: ThreadlessLink, rig: Rig) -> None:
    link.die()
    link.receive()
    rig.clock.now += 0.06
    link.pump()
    results: list[ops.Result] = []
    link.store(ops.Delete(link.next_op(), packed(1).key), results.append)
    rig.settle(seconds=1.0)
    assert [result.outcome for result in results] == [Outcome.MISS]


def test_a_load_that_waits_for_its_time_goes_out_then(rig: Rig) -> None:
    """Nothing but an answer let the next load go out, and a link with time between requests ran empty."""
    link = rig.links[TierKind.S3]
    link._pace = pace = ReadPace(4)
    pace.sent(0, 8192, rig.clock.now)
    rig.clock.now += 0.1
    pace.settled(0, True, rig.clock.now)
    results: list[ops.Result] = []
    for number in range(3):
        read(link, number, results)
    link.pump()
    assert kinds(link) == ["Read"]
    due = link.next_deadline()
    assert due is not None and rig.clock.now < due <= rig.clock.now + 0.1
    assert rig.store.next_deadline() <= due
    rig.clock.now = due
    link.pump()
    assert kinds(link) == ["Read"] * 2
