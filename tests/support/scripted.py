"""An HTTP server on loopback that answers what a test tells it to, connection by connection."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

Answer = Callable[[socket.socket, bytes], None]


class ScriptedServer:
    """Takes one request after the other: `answer(connection, head)` is called for each, `head` with its headers and
    without its body, which is received by who wants it. `heads` are those of all requests so far."""

    def __init__(self, answer: Answer, tls: ssl.SSLContext | None = None) -> None:
        self.answer = answer
        self.heads: list[bytes] = []
        self.num_connections = 0
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        # Wakes who waits in accept and recv; closing alone does not.
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        while self._threads:
            self._threads.pop().join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            self._open.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            if self._tls is not None:
                connection = stack.enter_context(self._tls.wrap_socket(connection, server_side=True))
                self._open.append(connection)
            while head := receive_head(connection):
                self.heads.append(head)
                self.answer(connection, head)


@contextlib.contextmanager
def scripted(answer: Answer, tls: ssl.SSLContext | None = None) -> Iterator[ScriptedServer]:
    server = ScriptedServer(answer, tls)
    try:
        yield server
    finally:
        server.close()


def receive_head(connection: socket.socket) -> bytes:
    """Return what comes up to the empty line, b"" at the end."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        if not byte:
            return b""
        head += byte
    return head


def length_of(head: bytes) -> int:
    """Return how long the body of the request is."""
    lines = head.lower().split(b"\r\n")
    return next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")), 0)


def receive_body(connection: socket.socket, head: bytes) -> bytes:
    body = bytearray()
    while len(body) < length_of(head):
        body += connection.recv(1 << 16)
    return bytes(body)


def respond(connection: socket.socket, status: str, body: bytes = b"", headers: str = "") -> None:
    connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body)


def fault(code: str) -> bytes:
    """Return S3's body for an error."""
    return f"<Error><Code>{code}</Code><Message>in a test</Message></Error>".encode()
