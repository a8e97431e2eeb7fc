"""Carries boto3's requests over connections of our own, so that one deadline bounds every byte of a request.

boto3 builds, signs and parses each request; this only moves its bytes (botocore's `before-send` event lets a handler
answer in the place of its HTTP session). A clock is looked at before every system call, while boto3's own timeouts are
about single calls, so that a byte now and then kept a request going for hours. And bodies go out as they lie in memory,
in pieces, and come in straight to their places: boto3 takes one piece, sends what is like a file 16 KiB at a time, and
gives back copies.

Covers: requests and answers, connections that serve again. Does not cover: opening them (`tiers/s3connect.py`), what is
asked (`tiers/s3boto.py`).
"""

import contextlib
import http.client
import io
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

from botocore.awsrequest import AWSPreparedRequest, AWSResponse

from tiers.objects import DeadlinePassed, Piece
from tiers.s3connect import Connection, Connector, Origin

_BUFFER_BYTES = 64 << 10
# What goes into the same packet as the head of a request: a block's header does, its payload does not.
_SMALL_BYTES = 16 << 10
# Far beyond any answer that is not an object of ours: an error, a listing.
_MAX_TEXT_BYTES = 16 << 20


class Body:
    """Pieces in memory as one body, in the form that boto3 hands on untouched: it has a length, and is no file."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = [memoryview(piece) for piece in pieces]
        self._num_bytes = sum(piece.nbytes for piece in self.pieces)

    def __len__(self) -> int:
        return self._num_bytes


class Exchange:
    """One request and its answer. Belongs to one thread."""

    def __init__(self, deadline: float, clock: Callable[[], float]) -> None:
        self._deadline = deadline
        self._clock = clock
        # A server that says nothing for half of the time leaves the other half for another try.
        self._patience_s = (deadline - clock()) / 2
        self.connection: Connection | None = None
        self.answer: http.client.HTTPResponse | None = None

    def left_s(self) -> float:
        """Return how long the next system call may take. Raises DeadlinePassed."""
        left_s = self._deadline - self._clock()
        if left_s <= 0:
            raise DeadlinePassed
        return min(left_s, self._patience_s)

    @property
    def body_bytes(self) -> int:
        """How many bytes of the answer are still to come. Raises ConnectionError where it does not say."""
        if self.answer is None or self.answer.length is None:
            raise ConnectionError("the answer does not say how long its body is")
        return self.answer.length

    def receive(self, places: Iterable[memoryview]) -> None:
        """Fill the places with the answer's body."""
        assert self.answer is not None
        for place in places:
            filled = 0
            while filled < place.nbytes:
                num_bytes = self.answer.readinto(place[filled:])
                if not num_bytes:
                    raise ConnectionError("the body ended early")
                filled += num_bytes

    def is_over(self) -> bool:
        """Whether all of the answer was received, and the connection may serve another request."""
        answer = self.answer
        return answer is not None and answer.isclosed() and not answer.will_close


class Transport:
    """Connections to a bucket's servers. Thread-safe."""

    def __init__(self, connector: Connector, max_idle: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._connector = connector
        self._max_idle = max_idle
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._is_closed = False
        self._current = threading.local()

    @contextlib.contextmanager
    def exchange(self, deadline: float) -> Iterator[Exchange]:
        """What this thread asks boto3 inside of the block is one exchange."""
        exchange = Exchange(deadline, self._clock)
        self._current.exchange = exchange
        try:
            yield exchange
        finally:
            self._current.exchange = None
            self._end(exchange)

    def send(self, request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        """A handler for `before-send`. Raises OSError, http.client.HTTPException."""
        exchange: Exchange = self._current.exchange
        if exchange.connection is not None:
            # boto3 was sent elsewhere, to the bucket's own region.
            self._end(exchange)
        url = urlsplit(request.url)
        connection = exchange.connection = self._connect(Origin.of(url), exchange)
        try:
            _send(connection.sock, _pieces(request, url, connection), exchange)
        except (BrokenPipeError, ConnectionResetError):
            # It may have said why before it hung up.
            with contextlib.suppress(OSError, http.client.HTTPException):
                return _receive(request, connection.sock, exchange)
            raise
        return _receive(request, connection.sock, exchange)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.sock.close()

    def _connect(self, origin: Origin, exchange: Exchange) -> Connection:
        while True:
            with self._lock:
                # The last one that came back: the others may fall silent and be closed by the server.
                found = next((other for other in reversed(self._idle) if other.origin == origin), None)
                if found is not None:
                    self._idle.remove(found)
            if found is None:
                return self._connector.open(origin, exchange.left_s)
            if not _has_ended(found.sock):
                return found
            found.sock.close()

    def _end(self, exchange: Exchange) -> None:
        connection, exchange.connection = exchange.connection, None
        is_over = exchange.is_over()
        if exchange.answer is not None:
            exchange.answer.close()
        if connection is None:
            return
        with self._lock:
            if is_over and not self._is_closed and len(self._idle) < self._max_idle:
                self._idle.append(connection)
                return
        connection.sock.close()


class _Incoming(io.RawIOBase):
    def __init__(self, sock: socket.socket, exchange: Exchange) -> None:
        self._sock = sock
        self._exchange = exchange

    def readable(self) -> bool:
        return True

    def readinto(self, place: Any) -> int:
        self._sock.settimeout(self._exchange.left_s())
        return self._sock.recv_into(place)


class _Source:
    """What http.client wants of a socket."""

    def __init__(self, sock: socket.socket, exchange: Exchange) -> None:
        self._incoming = _Incoming(sock, exchange)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self._incoming, _BUFFER_BYTES)


class _Text:
    """An answer's body as botocore reads it where it is no object but an error or a listing."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer

    def stream(self) -> Iterator[bytes]:
        text = self._answer.read(_MAX_TEXT_BYTES)
        if not self._answer.isclosed() or self._answer.length:
            raise ConnectionError("the answer ends early, or not at all")
        yield text


def _pieces(request: AWSPreparedRequest, url: SplitResult, connection: Connection) -> list[memoryview]:
    """Return the whole request."""
    target = request.url if connection.for_proxy is not None else url._replace(scheme="", netloc="").geturl()
    lines = [f"{request.method} {target} HTTP/1.1", f"Host: {url.netloc}", "Accept-Encoding: identity"]
    lines += connection.for_proxy or []
    headers = cast("Mapping[str, str | bytes]", request.headers)
    for name, value in headers.items():
        lines.append(f"{name}: {value.decode('latin-1') if isinstance(value, bytes) else value}")
    if any("\n" in line or "\r" in line for line in lines):
        raise ValueError("a header has more than one line")
    head = bytearray("\r\n".join([*lines, "", ""]).encode("latin-1"))
    body: Any = request.body
    pieces = body.pieces if isinstance(body, Body) else [memoryview(body or b"")]
    large = 0
    while large < len(pieces) and pieces[large].nbytes <= _SMALL_BYTES:
        head += pieces[large]
        large += 1
    return [memoryview(head), *pieces[large:]]


def _send(sock: socket.socket, pieces: Iterable[memoryview], exchange: Exchange) -> None:
    for piece in pieces:
        sent = 0
        while sent < piece.nbytes:
            sock.settimeout(exchange.left_s())
            sent += sock.send(piece[sent:])


def _receive(request: AWSPreparedRequest, sock: socket.socket, exchange: Exchange) -> AWSResponse:
    answer = http.client.HTTPResponse(_Source(sock, exchange), method=request.method)  # type: ignore[arg-type]
    exchange.answer = answer
    answer.begin()
    response = AWSResponse(request.url, answer.status, cast("Any", answer.headers), _Text(answer))
    if not request.stream_output:
        # Received at once, as botocore's own session does, and kept by `response`.
        _ = response.content
    return response


def _has_ended(sock: socket.socket) -> bool:
    """Whether the server has closed an idle connection, or says something unasked."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))
