"""One blocking connection to the daemon: a request, its reply, and never longer than the deadline.

Covers: the socket, sequence numbers, noticing at once that the daemon is gone (the connection ends with its process),
not asking a silent one again and again. Does not cover: what messages mean, attaching (client.py).
"""

import fcntl
import os
import select
import socket
import time
from pathlib import Path

from kvstore import forking, wire
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.cpu import current_cpu
from kvstore.frames import Inbox

SOCKET_NAME = "control.sock"
LOCK_NAME = "daemon.lock"
# sockaddr_un.sun_path holds 108 bytes with its closing zero.
_MAX_SOCKET_PATH_BYTES = 107
# How long a silent daemon is left alone, and how long a message may take to go out whose answer nobody waits for.
_LEAVE_ALONE_S = 0.5
_SEND_DEADLINE_S = 0.2
# For so long we look again and again whether the answer is there, before we sleep: to be woken on an idle core takes
# about as long as most questions. On two cores a round trip took 21 us instead of 55, a lookup of 512 keys 73 instead
# of 105. A question after a pause takes longer than those in a row: with 100 us every other lookup of a process that
# had just woken up slept all the same, 0.59 instead of 0.54 ms in all.
_LOOK_S = 300e-6
# Where the daemon ran on our own CPU it may well be waiting there for us to sleep: one of the first lookups after a
# pause took 0.87 instead of 0.6 ms; with 200 us some lookups took 1.2 instead of 0.83. Not at once, since where it has
# just moved to another CPU (eager_poll.py) its answer takes about a tenth of a millisecond, and to sleep would bring us
# to its side again. After some such answers in a row it evidently cannot move.
_LOOK_BESIDE_S = 120e-6
_LOOK_BESIDE_IN_VAIN_S = 40e-6
_MANY_BESIDE = 16
# Only where answers usually come within this, sleep included: else the daemon is busy, and may need this core for it.
_USUAL_S = 300e-6
_MOST_S = 1e-3
# Blocks that are on their way to somebody who waits for them take longer.
_LOOK_FOR_BLOCK_S = 100e-6
_READ_BYTES = 64 << 10
_READ_MORE_BYTES = 1 << 20


class Connection:
    """Thread-confined. Replies that nobody waits for any more are dropped by their sequence number."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._address = str(run_dir / SOCKET_NAME)
        self._socket: socket.socket | None = None
        self._readable = select.poll()
        self._inbox = Inbox(wire.MAX_REPLY_BYTES)
        self._sequence = 0
        # The first that went out on the present connection: older ones are answered no more.
        self._oldest = 0
        self._silent_until = 0.0
        # How long answers took of late.
        self._answer_s = 0.0
        # The CPU that the last answer came from, -1: unknown.
        self._answered_on = -1
        # So many questions in a row went out on the CPU that the last answer came from.
        self._beside = 0
        forking.watch(self)

    def request(self, epoch: int, incarnation: int, body: wire.Message, deadline_s: float) -> wire.Reply:
        """Return the one reply. Raises TierUnavailable (no daemon, or it did not answer in time) and ProtocolError
        (refused)."""
        if deadline_s <= 0.0:
            # Not the daemon's fault, which is not to be left alone for it.
            raise TierUnavailable("no time was left to ask the daemon")
        deadline = time.monotonic() + deadline_s
        sequence = self.send(epoch, incarnation, body, deadline_s)
        sent = time.monotonic()
        look_s = self._look_s()
        while True:
            received = self.receive(deadline - time.monotonic(), sequence, look_s)
            if received is None:
                self._leave_alone()
                raise TierUnavailable(f"the daemon did not answer within {deadline_s:g} s")
            answered, reply = received
            if answered == sequence:
                self._answer_s += (min(time.monotonic() - sent, _MOST_S) - self._answer_s) / 8
                return refused_raises(reply)

    def send(self, epoch: int, incarnation: int, body: wire.Message, deadline_s: float = _SEND_DEADLINE_S) -> int:
        """Send, waiting only where more is under way than the system holds; return the sequence number that the replies
        will carry. Raises TierUnavailable."""
        frame = wire.encode(body)
        if time.monotonic() < self._silent_until:
            raise TierUnavailable("the daemon did not answer a moment ago")
        self._sequence += 1
        message = wire.pack(wire.Header(epoch, incarnation, self._sequence), frame)
        is_new = self._socket is None
        if is_new:
            self._connect()
        try:
            self._push(message, deadline_s)
        except OSError:
            self._drop()
            if is_new:
                raise TierUnavailable(f"the daemon in {self._run_dir} is gone") from None
            # The connection was to a daemon that is no more, or it gave us up; nobody has got the message.
            self._connect()
            try:
                self._push(message, deadline_s)
            except OSError:
                self._drop()
                raise TierUnavailable(f"the daemon in {self._run_dir} is gone") from None
        return self._sequence

    def receive(self, timeout_s: float, asked: int, look_s: float = _LOOK_FOR_BLOCK_S) -> tuple[int, wire.Reply] | None:
        """Return (sequence, reply) of the next message, or None at the timeout; sleeps only after `look_s`. Raises
        TierUnavailable where the daemon is gone, or the connection on which `asked` (a sequence number) went out, and
        ProtocolError where the daemon sends what is no message."""
        deadline = time.monotonic() + timeout_s
        if self._socket is not None and asked < self._oldest:
            raise TierUnavailable("the connection has ended, and with it the answers; the daemon lives")
        while self._socket is not None:
            try:
                message = self._inbox.next()
                if message is not None:
                    self._answered_on = message[0].incarnation - 1
                    return message[0].sequence, wire.decode_reply(message[1])
            except ProtocolError:
                self._drop()
                raise
            data = self._read(self._socket, deadline, look_s)
            if data is None:
                return None
            if not data:
                self._drop()
                break
            self._inbox.add(data)
        raise TierUnavailable(f"the daemon in {self._run_dir} is gone")

    def _look_s(self) -> float:
        """How long to look for an answer before we sleep."""
        if self._answer_s >= _USUAL_S:
            return 0.0
        if not 0 <= self._answered_on == current_cpu():
            self._beside = 0
            return _LOOK_S
        self._beside += 1
        return _LOOK_BESIDE_S if self._beside <= _MANY_BESIDE else _LOOK_BESIDE_IN_VAIN_S

    def _read(self, connected: socket.socket, deadline: float, look_s: float) -> bytes | None:
        """Return what has come, b"" where the connection has ended, None at the deadline."""
        wanted = _READ_BYTES if len(self._inbox) < _READ_BYTES else _READ_MORE_BYTES
        sleep_from = min(deadline, time.monotonic() + look_s)
        while True:
            try:
                return connected.recv(wanted)
            except BlockingIOError:
                pass
            except OSError:
                return b""
            # Without yielding: whoever else is ready would have the core for a whole slice of some milliseconds.
            now = time.monotonic()
            if now >= sleep_from and not self._readable.poll(1000 * max(0.0, deadline - now)):
                return None

    def close(self) -> None:
        self._drop()

    def forked(self) -> None:
        """Both would go on from the same sequence number, and each take the other's answers for its own."""
        self._drop()

    def _connect(self) -> None:
        num_bytes = len(os.fsencode(self._address))
        if num_bytes > _MAX_SOCKET_PATH_BYTES:
            # The daemon may know its folder by a shorter name.
            raise TierUnavailable(
                f"the path of the daemon's socket has {num_bytes} bytes and may have {_MAX_SOCKET_PATH_BYTES}: "
                f"name the run folder in a shorter way than {self._run_dir}"
            )
        # The lock tells a daemon that is starting from none, and whose folder it is.
        if not daemon_lives(self._run_dir):
            raise TierUnavailable(f"no daemon runs in {self._run_dir}")
        try:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise TierUnavailable(f"cannot make a socket: {error.strerror}") from None
        made.setblocking(False)
        try:
            made.connect(self._address)
        except OSError as error:
            made.close()
            raise TierUnavailable(f"the daemon in {self._run_dir} {_why_not_connected(error)}") from None
        self._socket = made
        self._oldest = self._sequence
        self._inbox = Inbox(wire.MAX_REPLY_BYTES)
        self._readable = select.poll()
        self._readable.register(made, select.POLLIN)

    def _push(self, message: bytes, deadline_s: float) -> None:
        """Send all of it. Raises OSError where the connection has ended, TierUnavailable at the deadline."""
        assert self._socket is not None
        try:
            sent = self._socket.send(message, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        if sent == len(message):
            return
        deadline = time.monotonic() + deadline_s
        rest = memoryview(message)[sent:]
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        while rest:
            if not writable.poll(1000 * max(0.0, deadline - time.monotonic())):
                # Half of a message is out, so this connection can carry no other.
                self._leave_alone()
                raise TierUnavailable("the daemon takes no more messages")
            try:
                rest = rest[self._socket.send(rest, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                continue

    def _leave_alone(self) -> None:
        self._silent_until = time.monotonic() + _LEAVE_ALONE_S
        self._drop()

    def _drop(self) -> None:
        """A new connection next time, so that no late reply and no unread request comes through."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _why_not_connected(error: OSError) -> str:
    match error:
        case BlockingIOError():
            return "is too busy: as many as may wait for it to accept them do"
        case FileNotFoundError() | ConnectionRefusedError():
            return "is starting or stopping"
        case _:
            return f"cannot be reached: {error.strerror or error}"


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
