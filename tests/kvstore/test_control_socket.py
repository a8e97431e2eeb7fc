"""The daemon's end of the control socket, without a daemon: turns, slow readers, and what has a limit."""

import contextlib
import os
import resource
import select
import socket
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import control_socket, wire
from kvstore.control_socket import ControlSocket, Peer
from kvstore.frames import Inbox
from kvstore.wire import Header

MIB = 1 << 20


class Rig:
    """The socket, and clients of it."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.path = folder / "socket"
        self.faults: Counter[str] = Counter()
        self._stack = stack
        self._epoll = stack.enter_context(contextlib.closing(select.epoll()))
        self.control = stack.enter_context(
            contextlib.closing(ControlSocket(self.path, self._epoll, lambda fault: self.faults.update([fault])))
        )
        self.control.open()

    def client(self) -> socket.socket:
        made = self._stack.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
        made.connect(str(self.path))
        made.settimeout(5.0)
        return made

    def turn(self) -> None:
        self.control.take_in(self._epoll.poll(0))

    def receive(self) -> tuple[Peer, Header, bytes] | None:
        self.turn()
        return self.control.next_message()

    def met(self, client: socket.socket) -> Peer:
        """The daemon's end of that client's connection."""
        client.sendall(message(0))
        received = self.receive() or self.receive()
        assert received is not None
        return received[0]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with contextlib.ExitStack() as stack:
        yield Rig(tmp_path, stack)


def message(sequence: int, body: bytes = b"body") -> bytes:
    return wire.pack(Header(0, 0, sequence), body)


def answers(rig: Rig, client: socket.socket, count: int) -> list[int]:
    """The sequence numbers of the next messages, read while the daemon goes on."""
    inbox = Inbox(wire.MAX_REPLY_BYTES)
    found: list[int] = []
    while len(found) < count:
        while received := inbox.next():
            found.append(received[0].sequence)
        if len(found) < count:
            inbox.add(client.recv(MIB))
            rig.turn()
    return found


def test_the_socket_is_for_its_user_alone(rig: Rig) -> None:
    assert stat.S_IMODE(os.stat(rig.path).st_mode) == 0o600
    rig.control.close()
    assert not rig.path.exists()


def test_peers_get_their_turns_one_message_each(rig: Rig) -> None:
    many, one = rig.client(), rig.client()
    many.sendall(b"".join(message(number) for number in range(5)))
    one.sendall(message(100))
    rig.turn()
    order = []
    while received := rig.receive():
        order.append(received[1].sequence)
    assert sorted(order) == [0, 1, 2, 3, 4, 100] and order.index(100) <= 2


def test_what_a_slow_reader_is_owed_follows_in_order_as_it_reads(rig: Rig) -> None:
    client = rig.client()
    peer = rig.met(client)
    for number in range(30):
        rig.control.send(peer, Header(0, 0, number), b"x" * (MIB // 4))
    # Meanwhile nothing more is read from it.
    client.sendall(message(7))
    assert rig.receive() is None and rig.receive() is None
    assert answers(rig, client, 30) == list(range(30))
    received = rig.receive()
    assert received is not None and received[1].sequence == 7
    assert not rig.faults


def test_a_peer_that_never_reads_is_given_up(rig: Rig) -> None:
    client = rig.client()
    peer = rig.met(client)
    for number in range(30):
        rig.control.send(peer, Header(0, 0, number), b"x" * MIB)
    assert rig.faults == {"lost_connection": 1} and len(rig.control) == 0
    rig.control.send(peer, Header(0, 0, 99), b"too late")


def test_all_peers_together_hold_no_more_than_a_share_of_the_memory(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sends most of a long message and never its end."""
    monkeypatch.setattr(control_socket, "_MAX_HELD_BYTES", 8 * MIB)
    greedy = [rig.client() for _ in range(4)]
    beginning = Header(0, 0, 1).encode(wire.MAX_BODY_BYTES)
    for client in greedy:
        client.settimeout(0.0)
        client.sendall(beginning)
    for _ in range(1000):
        for client in greedy:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                client.send(b"x" * (MIB // 32))
        rig.turn()
        assert rig.control.next_message() is None
        if rig.faults["lost_connection"]:
            break
    assert rig.faults["lost_connection"] >= 1 and len(rig.control) >= 1


def test_who_connects_while_no_descriptor_is_free_is_let_in_later(rig: Rig) -> None:
    client = rig.client()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(client.fileno()))
        rig.turn()
        assert rig.faults == {"refused_connection": 1} and len(rig.control) == 0
        assert rig.receive() is None, "the poll must not say it again at once"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)
    rig.turn()
    assert rig.met(client).is_open


def test_a_client_that_ends_is_forgotten_after_its_last_message(rig: Rig) -> None:
    client = rig.client()
    rig.met(client)
    client.sendall(message(5))
    client.close()
    received = rig.receive()
    assert received is not None and received[1].sequence == 5
    rig.turn()
    assert len(rig.control) == 0 and not received[0].is_open
    rig.control.send(received[0], Header(), b"nobody")
