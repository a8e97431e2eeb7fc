"""One blocking connection to the daemon: a request, its reply, and never longer than the deadline.

Covers: the socket, sequence numbers, noticing at once that the daemon's process is gone (its lock file is free
then), not asking a dead one again and again. Does not cover: what messages mean, attaching (client.py).
"""

import fcntl
import os
import time
from pathlib import Path

import zmq

from kvstore import wire
from kvstore.core.errors import ProtocolError, TierUnavailable

SOCKET_NAME = "control.sock"
LOCK_NAME = "daemon.lock"
# How often a wait looks whether the daemon still lives, and how long a silent one is left alone.
_LOOK_EVERY_S = 0.02
_LEAVE_ALONE_S = 0.5
_MAX_UNSENT = 64


class Connection:
    """Thread-confined. Replies that nobody waits for any more are dropped by their sequence number."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._address = str(run_dir / SOCKET_NAME)
        self._socket: zmq.Socket[bytes] | None = None
        self._poller = zmq.Poller()
        self._sequence = 0
        self._silent_until = 0.0
        self._boot: tuple[int, int] | None = None

    def request(self, epoch: int, incarnation: int, body: wire.Message, deadline_s: float) -> wire.Reply:
        """Return the one reply. Raises TierUnavailable (no daemon, or it did not answer in time) and ProtocolError
        (refused)."""
        sequence = self.send(epoch, incarnation, body)
        deadline = time.monotonic() + deadline_s
        while True:
            received = self.receive(deadline - time.monotonic())
            if received is None:
                self._silent_until = time.monotonic() + _LEAVE_ALONE_S
                self._drop()
                raise TierUnavailable(f"the daemon did not answer within {deadline_s:g} s")
            answered, reply = received
            if answered == sequence:
                return refused_raises(reply)

    def send(self, epoch: int, incarnation: int, body: wire.Message) -> int:
        """Send without waiting; return the sequence number that the replies will carry. Raises TierUnavailable."""
        frame = wire.encode(body)
        if time.monotonic() < self._silent_until:
            raise TierUnavailable("the daemon did not answer a moment ago")
        boot = self._present_boot()
        if boot != self._boot or boot is None:
            # The daemon was restarted. What is sent over the old connection before its end is noticed would be lost,
            # and waiting for the answer would take the whole deadline.
            self._drop()
        if self._socket is None:
            # A daemon that died since the last message is noticed while waiting for its answer: asking for its lock
            # before each message would cost a tenth of the round trip.
            if not daemon_lives(self._run_dir):
                raise TierUnavailable(f"no daemon runs in {self._run_dir}")
            self._boot = boot
            self._socket = zmq.Context.instance().socket(zmq.DEALER)
            self._poller = zmq.Poller()
            self._poller.register(self._socket, zmq.POLLIN)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.SNDHWM, _MAX_UNSENT)
            self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
            self._socket.connect(f"ipc://{self._address}")
        self._sequence += 1
        header = wire.Header(epoch, incarnation, self._sequence).encode()
        try:
            self._socket.send_multipart([header, frame], zmq.NOBLOCK)
        except zmq.Again:
            raise TierUnavailable("the daemon takes no more messages") from None
        return self._sequence

    def receive(self, timeout_s: float) -> tuple[int, wire.Reply] | None:
        """Return (sequence, reply) of the next message, or None at the timeout. Raises TierUnavailable where the daemon
        is gone."""
        deadline = time.monotonic() + timeout_s
        while self._socket is not None:
            wait_s = max(0.0, min(deadline - time.monotonic(), _LOOK_EVERY_S))
            if self._poller.poll(int(1000 * wait_s) + 1 if wait_s else 0):
                frames = self._socket.recv_multipart()
                if len(frames) != 2:
                    raise ProtocolError(wire.ErrorCode.MALFORMED, f"a reply of {len(frames)} frames")
                return wire.decode_header(frames[0]).sequence, wire.decode_reply(frames[1])
            if time.monotonic() >= deadline:
                return None
            restarted = self._boot is not None and self._present_boot() != self._boot
            if restarted or not daemon_lives(self._run_dir):
                self._drop()
        raise TierUnavailable(f"the daemon in {self._run_dir} is gone")

    def close(self) -> None:
        self._drop()

    def _present_boot(self) -> tuple[int, int] | None:
        """What tells one start of the daemon from the next: each makes its socket anew. None: it has not yet."""
        try:
            status = os.stat(self._address)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _drop(self) -> None:
        """A new socket next time, so that no late reply and no queued request of a dead daemon comes through."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def refused_raises(reply: wire.Reply) -> wire.Reply:
    """Return the reply, or raise the ProtocolError it stands for."""
    if isinstance(reply, wire.Error):
        raise ProtocolError(reply.code, reply.message)
    return reply


def daemon_lives(run_dir: Path) -> bool:
    """Whether a process holds the daemon's lock; true from before it answers until the moment it dies.

    Raises TierUnavailable where the folder belongs to another user: who made it first (the default lies in /tmp) could
    play the daemon and read what engines say to it. Root trusts any, as users may be mapped in containers.
    """
    try:
        owner = run_dir.stat().st_uid
        if os.geteuid() not in (owner, 0) and owner != 0:
            raise TierUnavailable(f"{run_dir} belongs to another user (id {owner}): choose a run folder of your own")
        descriptor = os.open(run_dir / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def lock(path: Path, deadline_s: float = 2.0) -> int:
    """Return the descriptor that holds the exclusive lock; it falls when that is closed, or with the process.

    Tries for a while, since those who look whether it is held take it for a moment.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise
            time.sleep(0.01)
        else:
            return descriptor
