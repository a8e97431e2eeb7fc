"""The client against a daemon that answers as it is told: late, odd, or not at all."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore import wire
from kvstore.client import Client
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.outcome import Outcome, TierKind
from kvstore.wire import ErrorCode, Slot
from tests.support.chats import Prefix, namespace
from tests.support.fake_daemon import FakeDaemon
from tests.support.waiting import PATIENCE_S, until

NAMESPACE = namespace()
KEYS = Prefix(NAMESPACE, 1, 4).keys


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path) as made:
        yield made


@pytest.fixture
def client(daemon: FakeDaemon, tmp_path: Path) -> Iterator[Client]:
    with contextlib.closing(Client(tmp_path, namespace=NAMESPACE, deadline_s=1.0)) as made:
        yield made


def landed(*indexes: int, done: bool = False) -> wire.Landed:
    return wire.Landed(9, [Slot(i, Outcome.OK, i * 8192, 0, TierKind.SSD) for i in indexes], done)


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one(daemon: FakeDaemon, client: Client) -> None:
    go_on = threading.Event()

    def answer(request: wire.Request) -> Sequence[wire.Message]:
        if isinstance(request, wire.Lookup) and daemon.asked(wire.Lookup) == 1:
            go_on.wait(PATIENCE_S)
            return [wire.Found(b"\1\1\1\1", Outcome.OK)]
        return [wire.Found(b"", Outcome.MISS, "never_stored")]

    daemon.answer = answer
    with pytest.raises(TierUnavailable):
        client.lookup(KEYS, deadline_s=0.1)
    go_on.set()
    assert until(lambda: client.lookup(KEYS)).tiers == []


@pytest.mark.parametrize("tiers", [[], [TierKind.SSD], [TierKind.RAM] * 3, [TierKind.RAM, TierKind.S3, TierKind.RAM]])
def test_a_lookup_tells_the_tier_of_each_block(daemon: FakeDaemon, client: Client, tiers: list[TierKind]) -> None:
    daemon.answer = lambda request: [wire.Found(bytes(tiers), Outcome.MISS)]
    assert client.lookup(KEYS).tiers == tiers


def test_a_daemon_that_ends_while_it_is_asked_is_not_waited_for(tmp_path: Path) -> None:
    """It was noticed by looking at its lock from time to time, and not at all where only the connection ended."""
    with contextlib.closing(Client(tmp_path, namespace=NAMESPACE)) as client, FakeDaemon(tmp_path) as daemon:
        daemon.answer = lambda request: [None] if isinstance(request, wire.Lookup) else [wire.Pong(1)]
        client.ping()
        with pytest.raises(TierUnavailable, match="is gone"):
            client.lookup(KEYS, deadline_s=600.0)
        assert client.ping() > 0, "it does not connect again"


def test_a_message_that_nobody_takes_is_given_up_at_the_deadline(daemon: FakeDaemon, client: Client) -> None:
    """One that is longer than what the system holds goes out in pieces, as the daemon reads it."""
    put = wire.SessionPut("a", "", b"", 0, [wire.ChatMessage("user", "x" * (4 << 20), [])], b"")
    daemon.answer = lambda request: [wire.SessionSaved("a", 1, False)]
    assert client.session_put(put).id == "a" and put in daemon.requests
    go_on = threading.Event()

    def answer(request: wire.Request) -> Sequence[wire.Message]:
        go_on.wait(PATIENCE_S)
        return [wire.SessionSaved("a", 1, False)]

    daemon.answer = answer
    client.post(client.attach(1.0), wire.Observe({}))
    with pytest.raises(TierUnavailable, match="takes no more"):
        client.session_put(put, deadline_s=0.05)
    go_on.set()
    assert until(lambda: client.session_put(put)).id == "a"


def test_a_daemon_that_was_silent_a_moment_ago_is_not_asked_again_at_once(daemon: FakeDaemon, client: Client) -> None:
    daemon.answer = lambda request: []
    with pytest.raises(TierUnavailable):
        client.lookup(KEYS, deadline_s=0.1)
    started = time.monotonic()
    for _ in range(10):
        with pytest.raises(TierUnavailable):
            client.lookup(KEYS)
    assert time.monotonic() - started < 5.0, "each of them waited its second"
    daemon.answer = lambda request: [wire.Found(b"\1", Outcome.MISS)]
    assert until(lambda: client.lookup(KEYS)).tiers == [TierKind.RAM]


def test_waiting_for_blocks_is_not_cut_short_by_other_messages(daemon: FakeDaemon, client: Client) -> None:
    """The answer to a release ended the wait at once, and a load that was only slow was taken for a silent one."""
    daemon.answer = lambda request: [wire.Done()] if isinstance(request, wire.Release) else [landed(), landed(0)]
    with client.fetch(KEYS, 5.0) as stream:
        assert [block.index for block in stream.landed(PATIENCE_S)] == [0]
        stream.release_blocks([0])
        until(lambda: daemon.asked(wire.Release) == 1)
        started = time.monotonic()
        assert stream.landed(0.2) == [] and time.monotonic() - started >= 0.2
        assert not stream.done
    until(lambda: daemon.asked(wire.Release) == 2)


def test_a_fetch_whose_connection_ended_fails_at_once_though_there_is_a_new_one(
    daemon: FakeDaemon, client: Client
) -> None:
    """Another message made the new connection, unnoticed, and the stream waited there for answers to its deadline."""
    daemon.answer = lambda request: [wire.Done()] if isinstance(request, wire.Release) else [landed(), landed(0)]
    with client.fetch(KEYS, 600.0) as stream:
        assert [block.index for block in stream.landed(PATIENCE_S)] == [0]
        client._connection._drop()
        stream.release_blocks([0])
        with pytest.raises(TierUnavailable, match="connection has ended"):
            stream.landed(600.0)
    until(lambda: daemon.asked(wire.Release) == 2)
    assert daemon.requests[-1] == wire.Release(9, None, 0), "its pins are released by the new one"
    with client.fetch(KEYS, 5.0) as stream:
        assert [block.index for block in stream.landed(PATIENCE_S)] == [0]


def test_leaving_a_fetch_before_anything_has_landed_gives_it_up(daemon: FakeDaemon, client: Client) -> None:
    daemon.answer = lambda request: [] if isinstance(request, wire.Release) else [landed()]
    with client.fetch(KEYS, 5.0):
        pass
    until(lambda: daemon.asked(wire.Release) == 1)
    assert daemon.requests[-1] == wire.Release(9, None, 0)


def test_no_blocks_are_fetched_and_stored_without_asking(daemon: FakeDaemon, client: Client) -> None:
    """A prompt of which nothing is cached yet ended the README's example with a ProtocolError."""
    daemon.answer = lambda request: [wire.Error(ErrorCode.BAD_REQUEST, "no keys")]
    with client.fetch([], 5.0) as stream:
        assert stream.done and stream.landed(PATIENCE_S) == []
    assert client.store([], NAMESPACE.root(), 0).blocks == []
    assert client.commit([], [], []) == []
    assert not [request for request in daemon.requests if isinstance(request, wire.Fetch | wire.Store | wire.Commit)]


def test_a_slot_outside_of_the_region_is_a_miss_and_never_read(daemon: FakeDaemon, client: Client) -> None:
    daemon.answer = lambda request: [wire.Landed(9, [Slot(0, Outcome.OK, 1 << 40, 0, 1)], True)]
    with client.fetch(KEYS, 5.0) as stream:
        (block,) = stream.landed(PATIENCE_S)
        assert block.outcome == Outcome.STALE and block.view is None


def test_a_changed_generation_is_found_out_and_told(daemon: FakeDaemon, client: Client) -> None:
    daemon.answer = lambda request: [] if isinstance(request, wire.Release) else [landed(0, 1, done=True)]
    with client.fetch(KEYS, 5.0) as stream:
        first, second = stream.landed(PATIENCE_S)
        daemon.region.bump(second.offset)
        assert stream.still_valid(first) and not stream.still_valid(second)
    until(lambda: daemon.asked(wire.Release) == 1)
    assert daemon.requests[-1] == wire.Release(9, None, 1)


def test_a_fetch_that_is_refused_says_why(daemon: FakeDaemon, client: Client) -> None:
    daemon.answer = lambda request: [wire.Error(ErrorCode.BUSY, "too many")]
    with client.fetch(KEYS, 5.0) as stream, pytest.raises(ProtocolError, match="too many"):
        stream.landed(PATIENCE_S)
    assert stream.done and stream.landed(PATIENCE_S) == []


def test_a_grant_that_does_not_match_the_request_is_refused(daemon: FakeDaemon, client: Client) -> None:
    daemon.answer = lambda request: [wire.Granted([Slot(0, Outcome.OK)])]
    with pytest.raises(ProtocolError, match="1 answers to 4 keys"):
        client.store(KEYS, NAMESPACE.root(), 0)


def test_an_answer_of_another_kind_is_refused(daemon: FakeDaemon, client: Client) -> None:
    daemon.answer = lambda request: [wire.Done()]
    with pytest.raises(ProtocolError, match="expected Found"):
        client.lookup(KEYS)


def test_a_grant_of_another_boot_is_never_committed_to_this_one(tmp_path: Path) -> None:
    """Another thread of the same engine had been granted the same block by the new daemon, with the same generation:
    the commit of the old grant published its slot while it was still being written."""
    with contextlib.closing(Client(tmp_path, namespace=NAMESPACE, deadline_s=PATIENCE_S)) as client:
        with FakeDaemon(tmp_path, epoch=1) as daemon:
            daemon.answer = lambda request: [wire.Granted([Slot(0, Outcome.OK, 0, 7)])]
            grant = client.store(KEYS[:1], NAMESPACE.root(), 0)
        with FakeDaemon(tmp_path, epoch=2) as daemon, contextlib.closing(client.clone()) as other:
            daemon.answer = lambda request: [wire.Granted([Slot(0, Outcome.OK, 0, 7)])]
            other.store(KEYS[:1], NAMESPACE.root(), 0)
            assert client.commit(KEYS[:1], [7], [True]) == [Outcome.STALE]
            assert daemon.asked(wire.Commit) == 0
            daemon.answer = lambda request: [wire.Committed(bytes([Outcome.OK]))]
            assert other.commit(KEYS[:1], [7], [True]) == [Outcome.OK]
            view = grant.blocks[0].view
            assert view is not None
            view[:4] = b"late"
            assert bytes(daemon.region.view(0, 4)) != b"late"
            del view, grant


def test_what_was_granted_goes_to_the_region_of_the_boot_that_granted_it(tmp_path: Path) -> None:
    """Also: the first request after a restart went out over the connection to the daemon before, whose end had not been
    noticed yet, and took its whole deadline to be lost."""
    with contextlib.closing(Client(tmp_path, namespace=NAMESPACE, deadline_s=PATIENCE_S)) as client:
        with FakeDaemon(tmp_path, epoch=1):
            client.observe({"a": 1})
        with FakeDaemon(tmp_path, epoch=2) as daemon:
            daemon.answer = lambda request: [wire.Granted([Slot(0, Outcome.OK, 8192, 1)])]
            grant = client.store(KEYS[:1], NAMESPACE.root(), 0)
            assert grant.blocks[0].view is not None
            grant.blocks[0].view[:3] = b"new"
            assert bytes(daemon.region.view(8192, 3)) == b"new"
            del grant


def test_a_session_that_is_unknown_is_none_and_one_that_cannot_be_read_now_is_not(
    daemon: FakeDaemon, client: Client
) -> None:
    daemon.answer = lambda request: [wire.Error(ErrorCode.NOT_FOUND, "no session")]
    assert client.session_get("chat") is None
    daemon.answer = lambda request: [wire.Error(ErrorCode.BUSY, "try again")]
    with pytest.raises(ProtocolError, match="try again"):
        client.session_get("chat")


def test_reports_never_raise(daemon: FakeDaemon, client: Client, tmp_path: Path) -> None:
    report = wire.Report("r", 1, 0, 0, 0, 0, 1, {}, "p", 0.1)
    daemon.answer = lambda request: [wire.Error(ErrorCode.BAD_REQUEST, "no")]
    client.report(report)
    client.observe({"kind": 1})
    daemon.answer = lambda request: []
    client.report(report)
    with contextlib.closing(Client(tmp_path / "nowhere", namespace=NAMESPACE)) as lost:
        lost.report(report)
        lost.observe({"kind": 1})
        with pytest.raises(TierUnavailable, match="no daemon runs"):
            lost.ping()


def test_the_last_clone_detaches_before_it_lets_its_lock_go(daemon: FakeDaemon, tmp_path: Path) -> None:
    """The lock fell first, and the daemon counted an engine that had died."""
    seen: list[int] = []

    def answer(request: wire.Request) -> Sequence[wire.Message]:
        if isinstance(request, wire.Detach):
            seen.append(len(list((tmp_path / "clients").iterdir())))
        return [wire.Pong(1)] if isinstance(request, wire.Ping) else [wire.Done()]

    daemon.answer = answer
    root = Client(tmp_path, namespace=NAMESPACE)
    clone = root.clone()
    assert root.ping() > 0 and clone.ping() > 0
    root.close()
    assert clone.ping() > 0 and daemon.asked(wire.Detach) == 0
    clone.close()
    assert seen == [1] and list((tmp_path / "clients").iterdir()) == []
    assert daemon.asked(wire.Attach) == 1


def test_a_console_attaches_to_nothing(daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.answer = lambda request: [wire.StatsReply({"a": 1})]
    with contextlib.closing(Client(tmp_path)) as console:
        assert console.stats() == {"a": 1}
        assert console.region is None and console.tiers == []
    assert daemon.asked(wire.Attach) == daemon.asked(wire.Detach) == 0
