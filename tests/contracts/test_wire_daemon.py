"""A daemon is sent every message, well formed and not: each gets its one answer, and the daemon goes on."""

import contextlib
import math
import os
import random
import resource
import select
import socket
import struct
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvstore import wire
from kvstore.client import Client
from kvstore.connection import lock
from kvstore.control_socket import MAX_PEERS
from kvstore.frames import Inbox
from kvstore.wire import ErrorCode
from tests.support.daemons import DaemonProcess
from tests.support.decisions import decision
from tests.support.messages import KEYS, MESSAGE, NAMESPACE, REQUESTS, SPEC, mutate, name
from tests.support.waiting import PATIENCE_S, until


class Raw:
    """A peer that sends what it likes."""

    def __init__(self, run_dir: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(run_dir / "control.sock"))
        self._socket.settimeout(PATIENCE_S)
        self._inbox = Inbox(wire.MAX_REPLY_BYTES)
        self._sequence = 0

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self) -> tuple[wire.Header, wire.Message]:
        """The next message. Raises EOFError where the daemon has hung up."""
        while True:
            message = self._inbox.next()
            if message is not None:
                return message[0], wire.decode_reply(message[1])
            data = self._socket.recv(1 << 20)
            if not data:
                raise EOFError
            self._inbox.add(data)

    def send_some(self, data: bytes) -> int:
        """Send as much as is taken at once; return how much."""
        return self._socket.send(data) if select.select([], [self._socket], [], 0)[1] else 0

    def is_hung_up(self) -> bool:
        """Whether the daemon ends the connection; what it still says before that is taken in."""
        with contextlib.suppress(ConnectionError, EOFError):
            while True:
                self.receive()
        return True

    def ask(self, body: bytes | wire.Message, epoch: int = 0, incarnation: int = 0) -> wire.Message:
        self._sequence += 1
        frame = body if isinstance(body, bytes) else wire.encode(body)
        self.send(wire.pack(wire.Header(epoch, incarnation, self._sequence), frame))
        while True:
            header, answer = self.receive()
            if header.sequence == self._sequence:
                return answer

    def refused(self, *args: typing.Any) -> str:
        answer = self.ask(*args)
        assert isinstance(answer, wire.Error), answer
        assert answer.message
        return answer.code

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    made = DaemonProcess(tmp_path_factory.mktemp("wire"), {})
    made.start()
    yield made
    errors = made.errors()
    assert "internal" not in errors, made.log.read_text()
    assert made.stop() == 0
    made.close()


@pytest.fixture
def peer(daemon: DaemonProcess) -> Iterator[Raw]:
    made = Raw(daemon.run_dir)
    yield made
    assert isinstance(made.ask(wire.Ping()), wire.Pong), "the daemon does not go on"
    made.close()


@pytest.fixture
def engine(daemon: DaemonProcess) -> Iterator[tuple[int, int]]:
    """An attached engine: epoch and incarnation."""
    with contextlib.closing(Client(daemon.run_dir, namespace=NAMESPACE, deadline_s=PATIENCE_S)) as client:
        client.ping()
        attached = client.attach(PATIENCE_S)
        yield attached.epoch, attached.incarnation


def test_every_request_of_an_attached_engine_gets_its_reply(peer: Raw, engine: tuple[int, int]) -> None:
    expected = {
        "Ping": wire.Pong,
        "Detach": wire.Done,
        "Lookup": wire.Found,
        "Fetch": wire.Landed,
        "Release": wire.Done,
        "Store": wire.Granted,
        "Commit": wire.Committed,
        "Report": wire.Done,
        "Observe": wire.Done,
        "DecisionGet": wire.Decisions,
        "DecisionList": wire.Decisions,
        "SessionGet": wire.SessionFound,
        "SessionPut": wire.SessionSaved,
        "SessionList": wire.Sessions,
        "SessionPin": wire.Done,
        "SessionDelete": wire.SessionDeleted,
        "Evict": wire.Evicted,
        "Verify": wire.VerifyReport,
        "VerifyStatus": wire.VerifyReport,
        "VerifyCancel": wire.VerifyReport,
        "Stats": wire.StatsReply,
    }
    samples = {name(message): message for message in reversed(REQUESTS)}
    order = ["SessionPut", *(kind for kind in expected if kind not in ("SessionPut", "Detach")), "Detach"]
    for kind in order:
        assert isinstance(peer.ask(samples[kind], *engine), expected[kind]), kind
    assert isinstance(peer.ask(samples["Attach"]), wire.Error)  # nobody holds the lock on "file"


ATTACHED_ONLY = {
    *("Detach", "Hint", "Lookup", "Fetch", "Release", "Store", "Commit", "SessionPut", "Report", "Observe"),
    "Damaged",
}


@pytest.mark.parametrize("message", REQUESTS, ids=name)
def test_only_requests_that_touch_no_memory_may_come_from_anybody(
    peer: Raw, engine: tuple[int, int], message: wire.Message
) -> None:
    epoch, incarnation = engine
    for claimed, code in (
        ((0, 0), ErrorCode.NOT_ATTACHED),
        ((0, incarnation), ErrorCode.NOT_ATTACHED),
        ((epoch - 1, incarnation), ErrorCode.STALE_EPOCH),
        ((epoch, incarnation + 1000), ErrorCode.NOT_ATTACHED),
        ((epoch, (1 << 64) - 1), ErrorCode.NOT_ATTACHED),
    ):
        if name(message) in ATTACHED_ONLY:
            assert peer.refused(message, *claimed) == code
        else:
            answer = peer.ask(message, *claimed)
            # Busy: of verifications there is one at a time.
            allowed = (ErrorCode.NOT_FOUND, ErrorCode.BAD_REQUEST, ErrorCode.BUSY)
            assert not isinstance(answer, wire.Error) or answer.code in allowed


BAD_REQUESTS: list[wire.Message] = [
    wire.Attach(SPEC, "../daemon.lock"),
    wire.Attach(SPEC, ""),
    wire.Attach(SPEC, "nul\0"),
    wire.Attach(msgspec.structs.replace(SPEC, digest=b"short"), "file"),
    wire.Attach(msgspec.structs.replace(SPEC, root=b""), "file"),
    wire.Attach(msgspec.structs.replace(SPEC, block_bytes=0), "file"),
    wire.Attach(msgspec.structs.replace(SPEC, block_bytes=-1), "file"),
    wire.Attach(msgspec.structs.replace(SPEC, block_bytes=1 << 60), "file"),
    wire.Attach(msgspec.structs.replace(SPEC, block_tokens=0), "file"),
    wire.Lookup(b""),
    wire.Lookup(b"x" * 31),
    wire.Lookup(b"x" * 32 * (wire.MAX_KEYS + 1)),
    wire.Fetch(b"", 1.0),
    wire.Fetch(KEYS, 0.0),
    wire.Fetch(KEYS, -1.0),
    wire.Fetch(KEYS, math.nan),
    wire.Fetch(KEYS, math.inf),
    wire.Store(b"", NAMESPACE.root(), 0),
    wire.Store(KEYS, b"", 0),
    wire.Store(KEYS, NAMESPACE.root(), -1),
    wire.Store(KEYS, NAMESPACE.root(), 1 << 62),
    wire.Commit(b"", [], []),
    wire.Commit(KEYS, [1], [True]),
    wire.Report("r", 100, -1, 101, 0, 0, 0, {}, "p", 0.5),
    wire.Report("r", 100, 0, 0, 0, 0, 100, {}, "p", math.nan),
    wire.Report("r", 200, 48, 48, 0, 16, 88, {}, "p", 0.5, decision=decision("another")),
    wire.Report("r", 200, 48, 48, 0, 16, 88, {}, "p", 0.5, decision=decision("r", regret_s=math.nan)),
    wire.Report("r", 100, 0, 0, 0, 0, 100, {}, "p", 0.5, tenant="t" * 1_000_000),
    wire.DecisionList(None, -1),
    wire.SessionGet("chat", "", NAMESPACE.digest(), math.nan),
    wire.SessionGet("chat", "", NAMESPACE.digest(), 1e9),
    wire.SessionPut("", "", NAMESPACE.digest(), 0, [MESSAGE], KEYS),
    wire.SessionPut("a" * 201, "", NAMESPACE.digest(), 0, [MESSAGE], KEYS),
    wire.SessionPut("a\0", "", NAMESPACE.digest(), 0, [MESSAGE], KEYS),
    wire.SessionPut("a", "t" * 999, NAMESPACE.digest(), 0, [MESSAGE], KEYS),
    wire.SessionPut("a", "", b"", 0, [MESSAGE], KEYS),
    wire.SessionPut("a", "", NAMESPACE.digest(), -7, [MESSAGE], KEYS),
    wire.SessionPut("a", "", NAMESPACE.digest(), 0, [MESSAGE], KEYS + b"x"),
    wire.SessionPut("a", "", NAMESPACE.digest(), 0, [], KEYS),
    wire.SessionPut("a", "", NAMESPACE.digest(), 0, [MESSAGE], KEYS, ttl_s=math.nan),
    wire.Damaged(KEYS + b"x", 2),
    wire.Damaged(KEYS, 0),
    wire.Damaged(KEYS, 99),
    wire.Evict([]),
    wire.Evict(["hbm"]),
    wire.Evict(["s3"]),
    wire.Evict(["ram", "\U0001f642"]),
    wire.Verify(["ram"]),
    wire.Verify(["ssd", "\U0001f642"]),
]


@pytest.mark.parametrize("message", BAD_REQUESTS, ids=lambda m: f"{name(m)}-{BAD_REQUESTS.index(m)}")
def test_a_request_that_makes_no_sense_is_refused_with_a_reason(
    peer: Raw, engine: tuple[int, int], message: wire.Message
) -> None:
    assert peer.refused(message, *engine) == ErrorCode.BAD_REQUEST


@pytest.mark.parametrize(
    "message",
    [
        wire.SessionGet("unknown", "", NAMESPACE.digest()),
        wire.SessionGet("unknown"),
        wire.SessionPin("unknown", True),
        wire.SessionDelete("unknown"),
        wire.SessionDelete("unknown", "t", b"short"),
    ],
    ids=name,
)
def test_an_unknown_session_is_told_to_be_unknown(peer: Raw, message: wire.Message) -> None:
    assert peer.refused(message) == ErrorCode.NOT_FOUND


def test_a_lease_that_is_not_there_may_be_released(peer: Raw, engine: tuple[int, int]) -> None:
    for lease in (0, -5, 1 << 62):
        assert peer.ask(wire.Release(lease, None, 1 << 62), *engine) == wire.Done()
        assert peer.ask(wire.Release(lease, [-1, 1 << 62], -4), *engine) == wire.Done()


def test_many_messages_in_one_piece_and_one_in_many_pieces_are_each_answered(peer: Raw) -> None:
    messages = [wire.pack(wire.Header(0, 0, number), wire.encode(wire.Ping())) for number in range(100)]
    peer.send(b"".join(messages))
    assert [peer.receive()[0].sequence for _ in messages] == list(range(100))
    for byte in messages[7]:
        peer.send(bytes([byte]))
    assert peer.receive()[0].sequence == 7


def test_a_reply_names_the_cpu_that_the_daemon_ran_on(daemon: DaemonProcess, peer: Raw) -> None:
    allowed = os.sched_getaffinity(daemon.process.pid)
    try:
        for cpu in allowed:
            os.sched_setaffinity(daemon.process.pid, {cpu})
            peer.send(wire.pack(wire.Header(0, 0, 1), wire.encode(wire.Ping())))
            assert peer.receive()[0].incarnation == cpu + 1
    finally:
        os.sched_setaffinity(daemon.process.pid, allowed)


def test_what_is_no_message_is_refused_and_costs_its_sender_the_connection(daemon: DaemonProcess, peer: Raw) -> None:
    with contextlib.closing(Raw(daemon.run_dir)) as reckless:
        reckless.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        _, answer = reckless.receive()
        assert isinstance(answer, wire.Error) and answer.code == ErrorCode.MALFORMED
        assert reckless.is_hung_up()


def test_a_client_of_another_protocol_version_is_told_what_to_install(peer: Raw) -> None:
    body = b"whatever that version says"
    frame = wire.Header(0, 0, 5).encode(len(body))
    for version in (0, 2, 65_535):
        peer.send(frame[:2] + struct.pack("<H", version) + frame[4:] + body)
        header, answer = peer.receive()
        assert header.sequence == 5 and isinstance(answer, wire.Error)
        assert answer.code == ErrorCode.VERSION and "same release" in answer.message


@pytest.mark.parametrize("surplus", [1, (1 << 32) - 1 - wire.MAX_BODY_BYTES])
def test_an_over_long_message_is_refused_before_it_is_sent(daemon: DaemonProcess, peer: Raw, surplus: int) -> None:
    with contextlib.closing(Raw(daemon.run_dir)) as reckless:
        reckless.send(wire.Header(0, 0, 1).encode(wire.MAX_BODY_BYTES + surplus))
        _, answer = reckless.receive()
        assert isinstance(answer, wire.Error) and answer.code == ErrorCode.TOO_LONG
        assert reckless.is_hung_up()


def test_the_longest_message_is_taken(peer: Raw) -> None:
    assert peer.refused(b"x" * wire.MAX_BODY_BYTES) == ErrorCode.MALFORMED


@pytest.mark.parametrize("seed", range(4))
def test_mutated_messages_are_answered_one_for_one(peer: Raw, engine: tuple[int, int], seed: int) -> None:
    choice = random.Random(seed)
    samples = [m for m in REQUESTS if name(m) not in ("Detach", "Evict")]
    for _ in range(150):
        frame = mutate(wire.encode(choice.choice(samples)), choice.randrange(1 << 32))
        assert peer.ask(frame, *engine) is not None


def test_random_bytes_do_no_harm(daemon: DaemonProcess, peer: Raw) -> None:
    choice = random.Random(5)
    for _ in range(300):
        with contextlib.closing(Raw(daemon.run_dir)) as noise:
            sound = wire.Header(0, 0, 1).encode(choice.randrange(200)) if choice.random() < 0.7 else b""
            # It may have hung up between the two.
            with contextlib.suppress(ConnectionError):
                noise.send(sound + choice.randbytes(choice.choice((1, 32, 36, 500))))
                noise.send(choice.randbytes(choice.randint(1, 500)))
    assert isinstance(peer.ask(wire.Ping()), wire.Pong)


def test_a_peer_that_never_reads_does_not_hold_up_the_others(daemon: DaemonProcess, peer: Raw) -> None:
    """It is not listened to any more, so that nothing gathers; and when it reads, it gets all its answers."""
    message = wire.encode(wire.Stats())
    with contextlib.closing(Raw(daemon.run_dir)) as deaf:
        requests = [wire.pack(wire.Header(0, 0, number), message) for number in range(100_000)]
        num_sent = num_refused = 0
        while num_refused < 50:
            taken = deaf.send_some(requests[num_sent])
            assert taken in (0, len(requests[num_sent]))
            num_sent += taken > 0
            num_refused = 0 if taken else num_refused + 1
            assert isinstance(peer.ask(wire.Ping()), wire.Pong)
        assert 100 < num_sent < len(requests)
        assert [deaf.receive()[0].sequence for _ in range(num_sent)] == list(range(num_sent))


def test_a_connection_that_ends_amid_a_message_leaves_nothing(daemon: DaemonProcess, peer: Raw) -> None:
    def num_files() -> int:
        return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))

    peer.ask(wire.Ping())  # its own connection has been accepted
    before = num_files()
    for _ in range(100):
        with contextlib.closing(Raw(daemon.run_dir)) as hasty:
            hasty.send(wire.Header(0, 0, 1).encode(1000) + b"x" * 10)
    until(lambda: num_files() <= before)


def test_beyond_the_most_connections_the_others_are_hung_up_on(daemon: DaemonProcess, peer: Raw) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(min(MAX_PEERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2) + 1):
            last = stack.enter_context(contextlib.closing(Raw(daemon.run_dir)))
            assert isinstance(peer.ask(wire.Ping()), wire.Pong)
        assert last.is_hung_up()
    assert daemon.errors()["refused_connection"] > 0


def test_questions_without_a_pause_do_not_hold_up_what_is_due(daemon: DaemonProcess, peer: Raw) -> None:
    """They are answered without ending the loop's wait, which must end all the same: that an engine has died is looked
    for from time to time."""
    path = daemon.run_dir / "clients" / "dying"
    held = lock(path)
    assert isinstance(peer.ask(wire.Attach(SPEC, path.name)), wire.Attached)
    os.close(held)

    def is_noticed() -> bool:
        for _ in range(100):
            assert isinstance(peer.ask(wire.Ping()), wire.Pong)
        return not path.exists()

    until(is_noticed)
