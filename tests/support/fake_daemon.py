"""A daemon that answers as the test tells it, for what a client does with answers that a real one would hardly give."""

import fcntl
import os
import select
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from kvstore import wire
from kvstore.connection import LOCK_NAME, SOCKET_NAME
from kvstore.control_socket import ControlSocket
from tiers.region import Region

# None: the connection ends.
Answer = Callable[[wire.Request], Sequence[wire.Message | None]]


class FakeDaemon:
    """Attaches everybody; all other requests are answered by `answer`, whose messages are all sent, in order."""

    def __init__(self, run_dir: Path, epoch: int = 1) -> None:
        self.epoch = epoch
        self.answer: Answer = lambda request: [wire.Done()]
        self.requests: list[wire.Request] = []
        (run_dir / "clients").mkdir(parents=True, exist_ok=True)
        self.region = Region.create(run_dir / f"region-{epoch}", 16 * 8192, epoch)
        self._lock = os.open(run_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._epoll = select.epoll()
        self.faults: list[str] = []
        # The CPU that its answers name.
        self.answered_on = -1
        self._socket = ControlSocket(run_dir / SOCKET_NAME, self._epoll, self.faults.append)
        self._socket.open()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._socket.close()
        self._epoll.close()
        os.close(self._lock)
        self.region.close()
        self.region.unlink()

    def asked(self, kind: type[wire.Message]) -> int:
        return sum(isinstance(request, kind) for request in self.requests)

    def _serve(self) -> None:
        while not self._is_over.is_set():
            self._socket.take_in(self._epoll.poll(0 if self._socket.has_messages else 0.01))
            message = self._socket.next_message()
            if message is None:
                continue
            peer, header, body = message
            request = wire.decode_request(body)
            self.requests.append(request)
            for reply in self._replies(header, request):
                if reply is None:
                    self._socket.hang_up(peer)
                else:
                    self._socket.send(
                        peer, wire.Header(self.epoch, self.answered_on + 1, header.sequence), wire.encode(reply)
                    )

    def _replies(self, header: wire.Header, request: wire.Request) -> Sequence[wire.Message | None]:
        if isinstance(request, wire.Attach):
            path, num_bytes = str(self.region.path), self.region.data_bytes
            return [wire.Attached(self.epoch, 5, path, num_bytes, ["ram"])]
        if header.epoch not in (0, self.epoch):
            return [wire.Error(wire.ErrorCode.STALE_EPOCH, "another boot")]
        return self.answer(request)
