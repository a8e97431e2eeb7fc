"""A TCP proxy on loopback that can be told to misbehave: what networks and sick servers do to a client."""

import contextlib
import select
import socket
import struct
import threading
from typing import Literal, Self

Mode = Literal["pass", "refuse", "stall", "reset", "cut", "crawl"]
_POLL_S = 0.05


class Proxy:
    """Passes bytes between clients and `target` (host, port).

    pass     all is well
    refuse   a connection is closed at once
    stall    answers stop after `answer_bytes`, the connection stays open
    reset    the connection is reset after `answer_bytes` of an answer
    cut      the connection is closed in good order after `answer_bytes` of an answer
    crawl    about a megabyte a second, either way
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.mode: Mode = "pass"
        self.answer_bytes = 0
        self.num_connections = 0
        self._target = target
        self._is_closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_POLL_S)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def misbehave(self, mode: Mode, answer_bytes: int = 0) -> None:
        """From now on, for what is sent next."""
        self.mode, self.answer_bytes = mode, answer_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        while self._threads:
            self._threads.pop().join()
        self._listener.close()

    def _start(self, run: object, *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                self.num_connections += 1
                if self.mode == "refuse":
                    client.close()
                else:
                    self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        answered = 0
        with client, socket.create_connection(self._target) as server:
            while not self._is_closed.is_set():
                if self.mode == "crawl":
                    self._is_closed.wait(_POLL_S)
                readable, _, _ = select.select([client, server], [], [], _POLL_S)
                if client in readable:
                    request = _receive(client)
                    if not request:
                        return
                    answered = 0
                    server.sendall(request)
                if server in readable:
                    answer = _receive(server)
                    allowed = len(answer) if self.mode in ("pass", "crawl") else max(0, self.answer_bytes - answered)
                    _send(client, answer[:allowed])
                    answered += len(answer)
                    if not answer or allowed < len(answer):
                        self._misbehave(client)
                        return

    def _misbehave(self, client: socket.socket) -> None:
        if self.mode == "stall":
            self._is_closed.wait()
        elif self.mode == "reset":
            # Closing with a linger time of 0 sends RST.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _receive(side: socket.socket) -> bytes:
    """Return what has come, b"" at the end."""
    try:
        return side.recv(1 << 16)
    except ConnectionError:
        return b""


def _send(side: socket.socket, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        side.sendall(data)
