"""A link with a latency and a bandwidth of its own: a TCP proxy on loopback, in a process of its own.

    client ──► up lane ──► server          each direction: bytes_per_s shared by all connections, half of the
    client ◄── down lane ◄── server        round trip as delay; a new connection costs one round trip more

Run as `python -m kvstore.bench.plan.link HOST PORT`: it prints `Status` as a JSON line, and again for each line of
standard input, which is the `Line` to be from then on; it ends with standard input. One thread, edge-triggered epoll,
pieces of up to 256 KiB: 3% of a core at 60 MB/s, 10% at 300 MB/s.

Timers tick in milliseconds, so a delay may come out up to one longer.

Covers: pace, delay, stalls, cuts. Does not cover: lost packets, jitter, congestion.
"""

import contextlib
import math
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from kvstore.bench.plan.lane import Lane

State = Literal["open", "stalled", "cut"]
# Of bytes that a receiver does not take: then the sender waits, as it would at any full pipe.
_MAX_UNSENT_BYTES: Final = 1 << 20
_MAX_WAIT_S: Final = 0.5
_READ, _WRITE, _GONE = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP | select.EPOLLERR


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the link is: `bytes_per_s` in each direction (0: no limit), `round_trip_s` added to every exchange.

    open     bytes pass
    stalled  nothing passes, connections stay open
    cut      connections are reset, new ones too

    With `after_bytes` it is open until so many more bytes came down, and only then as `state` says.
    """

    round_trip_s: float = 0.0
    bytes_per_s: float = 0.0
    state: State = "open"
    after_bytes: int | None = None


class Status(msgspec.Struct, frozen=True):
    """`up_bytes` went to the server, `down_bytes` to clients, since the start."""

    port: int
    up_bytes: int
    down_bytes: int
    num_connections: int
    state: State


@dataclass(eq=False, slots=True)
class _Flow:
    """One direction of one connection."""

    source: socket.socket
    sink: socket.socket
    is_down: bool
    # Handshake: nothing of this connection arrives earlier.
    last_due_s: float
    unsent: deque[memoryview] = field(default_factory=deque)
    unsent_bytes: int = 0
    has_ended: bool = False
    # The end of the stream has been passed on.
    is_closed: bool = False


_Piece = tuple[_Flow, bytes]


class Link:
    """The proxy; `turn` does what is due and returns."""

    def __init__(self, target: tuple[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        self._target = target
        self._clock = clock
        self._line = Line()
        self._state: State = "open"
        self._lanes: dict[bool, Lane[_Piece]] = {False: Lane(), True: Lane()}
        self._passed = {False: 0, True: 0}
        # Came down or is on its way.
        self._down_taken = 0
        self._limit_bytes: int | None = None
        # Flows whose source had something to read when it was last looked at.
        self._readable: dict[bool, deque[_Flow]] = {False: deque(), True: deque()}
        self._flows: dict[int, tuple[_Flow, _Flow]] = {}
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.setblocking(False)
        self._poll = select.epoll()
        self._poll.register(self._listener, _READ)
        self._is_closed = False

    @property
    def status(self) -> Status:
        port = self._listener.getsockname()[1]
        return Status(port, self._passed[False], self._passed[True], len(self._flows) // 2, self._state)

    def watch(self, fd: int) -> None:
        """End waits when `fd` has something to read."""
        self._poll.register(fd, _READ)

    def change(self, line: Line) -> None:
        """Be as `line` says from now on."""
        self._line = line
        now = self._clock()
        for lane in self._lanes.values():
            lane.change(now, line.bytes_per_s, line.round_trip_s / 2)
        self._limit_bytes = self._down_taken + line.after_bytes if line.after_bytes else None
        self._become("open" if line.after_bytes else line.state)

    def turn(self, wait_s: float = _MAX_WAIT_S) -> list[int]:
        """Move what may move now, after waiting up to `wait_s` for something to do. Return the watched descriptors that
        have something to read."""
        watched = []
        for fd, events in self._poll.poll(self._wait_s(wait_s)):
            if fd == self._listener.fileno():
                self._accept()
            elif fd in self._flows:
                self._note(fd, events)
            else:
                watched.append(fd)
        if self._state != "stalled":
            self._read()
            self._deliver()
        return watched

    def close(self) -> None:
        """Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._reset_all()
            self._poll.close()
            self._listener.close()

    # ------------------------------------------------------------ connections

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                client, _ = self._listener.accept()
                if self._state == "cut":
                    _reset(client)
                    continue
                try:
                    server = socket.create_connection(self._target)
                except OSError:
                    _reset(client)
                    continue
                self._join(client, server)

    def _join(self, client: socket.socket, server: socket.socket) -> None:
        # A round trip for the handshake, then half of one for the first byte.
        ready_s = self._clock() + 1.5 * self._line.round_trip_s
        up, down = _Flow(client, server, False, ready_s), _Flow(server, client, True, 0.0)
        for sock, flows in ((client, (up, down)), (server, (down, up))):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._flows[sock.fileno()] = flows
            self._poll.register(sock, _READ | _WRITE | select.EPOLLRDHUP | select.EPOLLET)

    def _note(self, fd: int, events: int) -> None:
        # `reads` has this socket as its source, `writes` as its sink.
        reads, writes = self._flows[fd]
        if events & (_READ | select.EPOLLRDHUP | _GONE):
            self._may_read(reads)
        if events & _WRITE and writes.unsent and self._state != "stalled":
            self._flush(writes)

    def _may_read(self, flow: _Flow) -> None:
        if not flow.has_ended and flow not in self._readable[flow.is_down]:
            self._readable[flow.is_down].append(flow)

    def _end(self, flow: _Flow) -> None:
        """Reset both sides: one of them is broken, or both have ended."""
        for fd in (flow.source.fileno(), flow.sink.fileno()):
            for one in self._flows.pop(fd, ()):
                self._lose(one, one.unsent_bytes)
                one.unsent.clear()
                one.unsent_bytes = 0
        for queue in self._readable.values():
            for other in [other for other in queue if other.source in (flow.source, flow.sink)]:
                queue.remove(other)
        _reset(flow.source)
        _reset(flow.sink)

    def _reset_all(self) -> None:
        for flow in {id(flow.source): flow for flow, _ in self._flows.values()}.values():
            if flow.source.fileno() >= 0:
                self._end(flow)
        for lane in self._lanes.values():
            for flow, data in lane.arrived(math.inf):
                self._lose(flow, len(data))

    def _lose(self, flow: _Flow, num_bytes: int) -> None:
        if flow.is_down:
            self._down_taken -= num_bytes

    def _become(self, state: State) -> None:
        self._state = state
        if state == "cut":
            self._reset_all()
        elif state == "open":
            for fd in list(self._flows):
                # Edges that came while nothing was looked at are gone.
                if fd in self._flows:
                    self._note(fd, _READ | _WRITE)

    # ------------------------------------------------------------ bytes

    def _wait_s(self, longest_s: float) -> float:
        if self._state == "stalled":
            return longest_s
        now = self._clock()
        times = [lane.next_due_s() for lane in self._lanes.values()]
        times += [self._lanes[is_down].free_at_s() for is_down, flows in self._readable.items() if flows]
        return min([longest_s, *(max(0.0, at_s - now) for at_s in times if at_s is not None)])

    def _read(self) -> None:
        for is_down, flows in self._readable.items():
            lane = self._lanes[is_down]
            for _ in range(2 * len(flows)):
                now = self._clock()
                if not flows or lane.free_at_s() > now:
                    break
                flow = flows.popleft()
                if self._read_one(flow, lane, now):
                    flows.append(flow)

    def _read_one(self, flow: _Flow, lane: Lane[_Piece], now: float) -> bool:
        """Return whether there may be more to read."""
        if flow.unsent_bytes > _MAX_UNSENT_BYTES:
            return False
        num_bytes = lane.piece_bytes
        if flow.is_down and self._limit_bytes is not None:
            num_bytes = min(num_bytes, self._limit_bytes - self._down_taken)
            if not num_bytes:
                return False
        try:
            data = flow.source.recv(num_bytes)
        except BlockingIOError:
            return False
        except OSError:
            self._end(flow)
            return False
        flow.last_due_s = lane.take(now, len(data), (flow, data), flow.last_due_s)
        if not data:
            flow.has_ended = True
            return False
        if flow.is_down:
            self._down_taken += len(data)
        return True

    def _deliver(self) -> None:
        for lane in self._lanes.values():
            for flow, data in lane.arrived(self._clock()):
                if flow.sink.fileno() < 0:
                    self._lose(flow, len(data))
                    continue
                flow.unsent.append(memoryview(data))
                flow.unsent_bytes += len(data)
                if len(flow.unsent) == 1 and self._state == "open":
                    self._flush(flow)

    def _flush(self, flow: _Flow) -> None:
        """Send what has arrived, as far as the receiver takes it."""
        was_full = flow.unsent_bytes > _MAX_UNSENT_BYTES
        while flow.unsent:
            data = flow.unsent[0]
            try:
                # An empty piece is the end of the stream.
                sent = flow.sink.send(data) if data else _close_writing(flow)
            except BlockingIOError:
                break
            except OSError:
                self._end(flow)
                return
            self._passed[flow.is_down] += sent
            flow.unsent_bytes -= sent
            if sent == len(data):
                flow.unsent.popleft()
            else:
                flow.unsent[0] = data[sent:]
            if self._limit_bytes is not None and self._passed[True] >= self._limit_bytes:
                self._limit_bytes = None
                self._become(self._line.state)
                return
        if was_full and flow.unsent_bytes <= _MAX_UNSENT_BYTES:
            self._may_read(flow)
        if flow.is_closed:
            self._end_if_over(flow)

    def _end_if_over(self, flow: _Flow) -> None:
        back = self._flows.get(flow.sink.fileno())
        if back is not None and back[0].is_closed:
            self._end(flow)


def _close_writing(flow: _Flow) -> int:
    flow.is_closed = True
    flow.sink.shutdown(socket.SHUT_WR)
    return 0


def _reset(sock: socket.socket) -> None:
    # Closing with a linger time of 0 sends RST, where the stream has not ended in good order before.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def main() -> None:
    link = Link((sys.argv[1], int(sys.argv[2])))
    orders = sys.stdin.fileno()
    os.set_blocking(orders, False)
    link.watch(orders)
    _say(link.status)
    text = b""
    try:
        while True:
            if orders not in link.turn():
                continue
            more = os.read(orders, 1 << 16)
            if not more:
                return
            *lines, text = (text + more).split(b"\n")
            for line in lines:
                link.change(msgspec.json.decode(line, type=Line))
                _say(link.status)
    finally:
        link.close()


def _say(status: Status) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(status) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
