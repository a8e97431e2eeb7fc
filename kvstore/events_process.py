"""The daemon's end of the process that publishes KV events: start it, hand it batches, never wait for it.

What it has not answered yet is bounded in bytes; a batch beyond that is not taken, and its sequence is missing from
what routers get. One that dies is started again, less and less often.
"""

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import msgspec
import zmq

from kvstore.config import EventsConfig
from kvstore.events import changes
from kvstore.events.changes import Batch
from kvstore.events.publisher import BAD_SETTINGS, PublisherSettings
from kvstore.worker.encryption import without_key

_log = logging.getLogger(__name__)
_RESTART_AFTER_S = (0.5, 1.0, 5.0, 30.0)
_STOP_DEADLINE_S = 2.0


class EventsProcess:
    """Owned by the daemon's main thread; an Outlet of `kvstore/store/announcing.py`."""

    def __init__(
        self, events: EventsConfig, run_dir: Path, log_level: str, context: "zmq.Context[zmq.Socket[bytes]]"
    ) -> None:
        self._settings = PublisherSettings(f"ipc://{run_dir}/events.sock", os.getpid(), log_level, events)
        self._max_bytes = events.queue_bytes
        self._context = context
        self._socket: zmq.Socket[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        # What the process has and did not answer yet: sequence and bytes.
        self._out: deque[tuple[int, int]] = deque()
        self._out_bytes = 0
        self._deaths = 0
        self._start_at: float | None = None
        self._is_refused = False
        self.num_starts = 0

    def start(self) -> None:
        """One that cannot be started now counts as one that died."""
        self.num_starts += 1
        self._start_at = None
        try:
            self._open()
        except (OSError, zmq.ZMQError) as error:
            self._died(time.monotonic(), str(error))

    def send(self, batch: Batch) -> bool:
        """Hand a batch over; False where it was not taken: the process is gone or does not keep up. Never blocks."""
        self._take_answers()
        if self._socket is None or self._out_bytes >= self._max_bytes:
            return False
        frame = changes.encoder.encode(batch)
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:  # no peer: it is still starting, or it died
            return False
        self._out.append((batch.sequence, len(frame)))
        self._out_bytes += len(frame)
        return True

    @property
    def state(self) -> str:
        """`ok` also while it is starting."""
        return "off" if self._is_refused else "down" if self._process is None else "ok"

    @property
    def is_ready(self) -> bool:
        """Whether the process is there to be handed something, and less than half of the room is taken."""
        self._take_answers()
        has_peer = self._socket is not None and bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)
        return has_peer and 2 * self._out_bytes < self._max_bytes

    def supervise(self, now: float) -> None:
        """Start the process again if it died; never blocks."""
        if self._process is None:
            if self._start_at is not None and now >= self._start_at:
                self.start()
            return
        status = self._process.poll()
        if status is None:
            return
        if status == BAD_SETTINGS:
            self._is_refused = True
            self._close()
            _log.error("KV events cannot be published with these settings; the daemon goes on without them")
            return
        self._died(now, f"it ended with status {status}")

    def stop(self) -> None:
        """Idempotent. What was handed over and not published yet is lost."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout=_STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._close()

    def _open(self) -> None:
        socket_path = Path(self._settings.socket.removeprefix("ipc://"))
        socket_path.unlink(missing_ok=True)
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(self._settings.socket)
        # -P: with -m alone Python would import from the current folder first, and anybody may have put files there.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvstore.events.publisher"], stdin=subprocess.PIPE, env=without_key(os.environ)
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(msgspec.json.encode(self._settings))

    def _died(self, now: float, why: str) -> None:
        self._close()
        delay_s = _RESTART_AFTER_S[min(self._deaths, len(_RESTART_AFTER_S) - 1)]
        self._deaths += 1
        self._start_at = now + delay_s
        _log.warning("the publisher of KV events is gone, another starts in %.1f s: %s", delay_s, why)

    def _take_answers(self) -> None:
        if self._socket is None:
            return
        last = -1
        with contextlib.suppress(zmq.Again):
            while True:
                last = changes.published_decoder.decode(self._socket.recv(zmq.NOBLOCK)).sequence
        while self._out and self._out[0][0] <= last:
            self._out_bytes -= self._out.popleft()[1]

    def _close(self) -> None:
        self._process = None
        self._out.clear()
        self._out_bytes = 0
        if self._socket is not None:
            self._socket.close()
            self._socket = None
