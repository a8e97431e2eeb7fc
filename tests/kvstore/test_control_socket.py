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


def send_unfinished(rig: Rig, clients: list[socket.socket], num_bytes: int) -> None:
    """Each sends so many bytes of the longest message, as long as it is connected."""
    rests = {client: Header(0, 0, 1).encode(wire.MAX_BODY_BYTES) + bytes(num_bytes) for client in clients}
    while rests:
        for client, rest in list(rests.items()):
            client.settimeout(0.0)
            try:
                rests[client] = rest[client.send(rest[: MIB // 32]) :]
            except BlockingIOError:
                continue
            except ConnectionError:
                rests[client] = b""
            if not rests[client]:
                del rests[client]
        rig.turn()
        assert rig.control.next_message() is None
    rig.turn()
    while rig.control.next_message() or rig.control.has_messages:
        rig.turn()


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
    monkeypatch.setattr(control_socket, "_MAX_ABOVE_SHARE_BYTES", 8 * MIB)
    greedy = [rig.client() for _ in range(4)]
    send_unfinished(rig, greedy, MIB * 3)
    assert rig.faults["lost_connection"] >= 1 and len(rig.control) >= 1


def test_many_peers_that_hold_a_little_each_are_counted_too(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand of them, each with just under one MiB of a message, once held four times the limit."""
    monkeypatch.setattr(control_socket, "_MAX_ABOVE_SHARE_BYTES", 4 * MIB)
    send_unfinished(rig, [rig.client() for _ in range(16)], MIB - 100)
    held = [peer.held_bytes for peer in rig.control._peers.values()]
    assert sum(held) <= 4 * MIB + 16 * control_socket._SHARE_BYTES
    assert rig.faults["lost_connection"] == 16 - len(held)


def test_the_one_that_holds_most_is_given_up_and_not_who_comes_last(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "_MAX_ABOVE_SHARE_BYTES", 4 * MIB)
    greedy, modest = rig.client(), rig.client()
    send_unfinished(rig, [greedy], 4 * MIB - 100)
    body = b"x" * (MIB // 2)
    modest.settimeout(0.0)
    rest, received = message(1, body), None
    while received is None:
        with contextlib.suppress(BlockingIOError):
            rest = rest[modest.send(rest) :]
        received = rig.receive()
    assert received[2] == body
    assert rig.faults == {"lost_connection": 1}
    assert greedy.recv(1) == b"", "it was hung up on"


def test_a_connection_that_has_ended_holds_nothing_while_its_fetch_goes_on(rig: Rig) -> None:
    """Whoever is to answer it later keeps the peer, with what it had sent of its next message, for up to ten
    minutes."""
    client = rig.client()
    peer = rig.met(client)
    send_unfinished(rig, [client], 4 * MIB)
    assert peer.held_bytes >= 4 * MIB
    client.close()
    rig.turn()
    assert not peer.is_open and peer.held_bytes == 0


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
