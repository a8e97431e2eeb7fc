"""The link between real sockets, by a clock of the test's own: what passes, and how it stalls and is cut."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from kvstore.bench.plan.lane import Lane
from kvstore.bench.plan.link import Line, Link
from kvstore.bench.plan.linkprocess import LinkProcess
from kvstore.core.errors import TierUnavailable

MIB = 1 << 20
# Reads ahead of the line, see Lane.
SLACK_S = 0.004


class Bench:
    """A link to a server that the test drives: `far` is the server's end of the newest connection."""

    def __init__(self) -> None:
        self.now = 100.0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.link = Link(self._server.getsockname()[:2], clock=lambda: self.now)
        self._opened: list[socket.socket] = []

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """Return the client's end and the server's."""
        near = socket.create_connection(("127.0.0.1", self.link.status.port))
        self._opened.append(near)
        before = self.link.status.num_connections
        self.until(lambda: self.link.status.num_connections > before)
        far, _ = self._server.accept()
        self._opened.append(far)
        for sock in (near, far):
            sock.setblocking(False)
        return near, far

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(10_000):
            if condition():
                return
            self.link.turn(0.001)
        raise AssertionError("it does not come to that")

    def settle(self) -> None:
        """Whatever may pass now has passed."""
        for _ in range(200):
            self.link.turn(0.0)

    def close(self) -> None:
        self.link.close()
        for sock in [*self._opened, self._server]:
            sock.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    with contextlib.closing(bench):
        yield bench


def receive(sock: socket.socket) -> bytes:
    """What is there by now."""
    received = bytearray()
    with contextlib.suppress(BlockingIOError):
        while data := sock.recv(1 << 20):
            received += data
    return bytes(received)


def test_bytes_pass_both_ways_and_so_does_the_end(bench: Bench) -> None:
    near, far = bench.connect()
    near.sendall(b"question")
    bench.until(lambda: bench.link.status.up_bytes == 8)
    assert receive(far) == b"question"
    far.sendall(b"answer")
    far.shutdown(socket.SHUT_WR)
    bench.until(lambda: bench.link.status.down_bytes == 6)
    bench.settle()
    assert near.recv(100) == b"answer"
    assert near.recv(100) == b""
    near.shutdown(socket.SHUT_WR)
    bench.until(lambda: bench.link.status.num_connections == 0)


def test_connections_share_the_bandwidth_of_a_direction(bench: Bench) -> None:
    first, second = bench.connect(), bench.connect()
    bench.link.change(Line(bytes_per_s=1e6))
    for _, far in (first, second):
        far.send(b"x" * 400_000)
    passed = [0, 0]
    for _ in range(100):
        bench.now += 0.001
        bench.settle()
        passed = [count + len(receive(near)) for count, (near, _) in zip(passed, (first, second), strict=True)]
    assert sum(passed) == bench.link.status.down_bytes
    # A tenth of a second, and a piece or two.
    assert 0.9 * 1e5 < sum(passed) <= 1e5 + SLACK_S * 1e6 + 2 * Lane(1e6).piece_bytes
    assert min(passed) > 0.4 * sum(passed)


def test_nothing_arrives_before_its_delay_and_a_new_connection_costs_a_round_trip(bench: Bench) -> None:
    bench.link.change(Line(round_trip_s=0.2))
    near, far = bench.connect()
    near.sendall(b"question")
    bench.settle()
    bench.now += 0.29
    bench.settle()
    assert receive(far) == b""
    bench.now += 0.02
    bench.settle()
    assert receive(far) == b"question"
    far.sendall(b"answer")
    bench.settle()
    bench.now += 0.09
    bench.settle()
    assert receive(near) == b""
    bench.now += 0.02
    bench.settle()
    assert receive(near) == b"answer"


def test_a_stalled_link_passes_nothing_until_it_is_open_again(bench: Bench) -> None:
    near, far = bench.connect()
    bench.link.change(Line(state="stalled"))
    far.sendall(b"answer")
    bench.now += 10.0
    bench.settle()
    assert receive(near) == b""
    bench.link.change(Line())
    bench.until(lambda: bench.link.status.down_bytes == 6)
    assert receive(near) == b"answer"


@pytest.mark.parametrize("state", ["stalled", "cut"])
def test_a_link_breaks_after_exactly_so_many_bytes_in_the_middle_of_an_answer(bench: Bench, state: str) -> None:
    near, far = bench.connect()
    bench.link.change(Line(bytes_per_s=1e6, state=state, after_bytes=50_000))  # type: ignore[arg-type]
    far.send(b"x" * 200_000)
    received = 0
    with contextlib.suppress(ConnectionResetError):
        for _ in range(300):
            bench.now += 0.001
            bench.settle()
            received += len(receive(near))
    assert bench.link.status.down_bytes == 50_000
    assert bench.link.status.state == state
    assert bench.link.status.num_connections == (1 if state == "stalled" else 0)
    assert received <= 50_000


def test_a_cut_link_resets_what_there_is_and_what_comes(bench: Bench) -> None:
    near, far = bench.connect()
    bench.link.change(Line(state="cut"))
    for sock in (near, far):
        sock.settimeout(5.0)
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    with socket.create_connection(("127.0.0.1", bench.link.status.port), timeout=5.0) as late:
        bench.settle()
        with pytest.raises(ConnectionResetError):
            late.recv(1)
    bench.link.change(Line())
    near, far = bench.connect()
    near.sendall(b"again")
    bench.until(lambda: bench.link.status.up_bytes == 5)


def test_a_receiver_that_takes_nothing_makes_the_sender_wait_and_loses_nothing(bench: Bench) -> None:
    near, far = bench.connect()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    sent, body = 0, bytes(range(256)) * (MIB >> 8)
    for _ in range(2000):
        with contextlib.suppress(BlockingIOError):
            sent += far.send(body[sent % MIB :])
        bench.link.turn(0.0)
    # The socket's own buffers take some megabytes; without an end to it all would have gone.
    assert sent < 64 * MIB
    received = bytearray()
    for _ in range(100_000):
        if len(received) == sent:
            break
        received += receive(near)
        bench.link.turn(0.0)
    assert bytes(received) == (body * (sent // MIB + 1))[:sent]


def test_a_process_is_told_how_to_be_and_says_what_has_passed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        with LinkProcess(host, port) as link:
            answering = threading.Thread(target=_answer, args=(server, b"y" * 1000))
            answering.start()
            here = int(link.endpoint.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", here), timeout=10.0) as client:
                client.sendall(b"x")
                received = b""
                while data := client.recv(4096):
                    received += data
            answering.join()
            assert received == b"y" * 1000
            status = link.be(Line(round_trip_s=0.001, bytes_per_s=1e6))
            assert (status.up_bytes, status.down_bytes, status.state) == (1, 1000, "open")
            assert link.be(Line(state="cut")).state == "cut"
            client = socket.create_connection(("127.0.0.1", here), timeout=10.0)
            with client, pytest.raises(ConnectionResetError):
                client.recv(1)
        with pytest.raises((TierUnavailable, ValueError)):
            link.be(Line())


def _answer(server: socket.socket, body: bytes) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(1)
        connection.sendall(body)


def test_bytes_that_a_cut_lost_do_not_count_when_the_link_breaks_again(bench: Bench) -> None:
    near, far = bench.connect()
    bench.link.change(Line(bytes_per_s=1e6, round_trip_s=0.02, state="cut", after_bytes=50_000))
    far.send(b"x" * 200_000)
    for _ in range(300):
        bench.now += 0.001
        bench.settle()
    assert bench.link.status.down_bytes == 50_000
    bench.link.change(Line())
    near, far = bench.connect()
    bench.link.change(Line(bytes_per_s=1e6, state="stalled", after_bytes=30_000))
    far.send(b"x" * 200_000)
    for _ in range(300):
        bench.now += 0.001
        bench.settle()
    assert bench.link.status.down_bytes == 80_000
    assert len(receive(near)) == 30_000
