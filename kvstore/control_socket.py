"""The daemon's end of the control socket: connections, their messages in turn, answers that never wait for a reader.

Covers: who may connect and how much of one's bytes is held. Does not cover: what messages mean (daemon.py).

One listening unix socket and one connection per client thread. Whoever sends what is no message is told so and loses
the connection; whoever does not read its answers is not listened to until it does, and loses the connection, too,
where too much has gathered. Whoever closes its sending half has left: what was not sent to it yet is lost, and the
pins of its fetches last (`store/fetch.py`).
"""

import contextlib
import os
import resource
import select
import socket
import stat
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from kvstore import wire
from kvstore.core.errors import ProtocolError
from kvstore.frames import Inbox
from kvstore.wire import Header

MAX_PEERS: Final = 1024
_BACKLOG: Final = MAX_PEERS
_READ_BYTES: Final = 64 << 10
_READ_MORE_BYTES: Final = 1 << 20
# With so much unsent a peer is not listened to, and with so much it is given up: two of the longest answers.
_SLOW_BYTES: Final = 256 << 10
_MAX_UNSENT_BYTES: Final = 2 * wire.MAX_REPLY_BYTES
# All peers together hold 256 MiB: each may have its share of one half, which nobody counts, and more of the other.
_SHARE_BYTES: Final = (128 << 20) // MAX_PEERS
_MAX_ABOVE_SHARE_BYTES: Final = 128 << 20
_GONE: Final = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR


class Peer:
    """One connection."""

    __slots__ = ("fd", "inbox", "is_heard", "is_lost", "is_waiting", "socket", "unsent")

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.fd = connection.fileno()
        self.inbox = Inbox(wire.MAX_BODY_BYTES)
        self.unsent = bytearray()
        self.is_waiting = False
        """In line, with bytes that may be a whole message."""
        self.is_heard = True
        """We listen to it: it is connected, reads its answers, and has not sent what is no message."""
        self.is_lost = False
        """What it sent is no message: it is closed once it has been told so."""

    @property
    def is_open(self) -> bool:
        return self.fd >= 0

    @property
    def held_bytes(self) -> int:
        return self.inbox.held_bytes + len(self.unsent)


class ControlSocket:
    """Owned by the control thread. `epoll` is the caller's, who polls it and passes what it says to `take_in`."""

    def __init__(self, path: Path, epoll: select.epoll, on_fault: Callable[[str], None]) -> None:
        """`on_fault` counts connections that are refused ("refused_connection") or given up ("lost_connection")."""
        self._path = path
        self._epoll = epoll
        self._on_fault = on_fault
        # Half of the descriptors are left to everything else.
        max_descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        is_limited = max_descriptors != resource.RLIM_INFINITY
        self._max_peers = min(MAX_PEERS, max_descriptors // 2) if is_limited else MAX_PEERS
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._is_paused = False
        self._peers: dict[int, Peer] = {}
        self._waiting: deque[Peer] = deque()

    def __len__(self) -> int:
        """How many are connected."""
        return len(self._peers)

    def open(self) -> None:
        """Answer under `path`, which is for this user alone. Raises OSError."""
        self._path.unlink(missing_ok=True)
        self._listener.bind(str(self._path))
        # Nobody can connect before `listen`.
        os.chmod(self._path, stat.S_IRUSR | stat.S_IWUSR)
        self._listener.listen(_BACKLOG)
        self._epoll.register(self._listener, select.EPOLLIN)

    def close(self) -> None:
        """Idempotent."""
        for peer in list(self._peers.values()):
            self.hang_up(peer)
        self._path.unlink(missing_ok=True)
        self._is_paused = False
        self._listener.close()

    @property
    def has_messages(self) -> bool:
        """Whether `next_message` may have one without waiting."""
        return bool(self._waiting)

    def take_in(self, ready: Iterable[tuple[int, int]]) -> None:
        """Read from, write to and accept those that the poll names; other descriptors are passed over."""
        if self._is_paused:
            self._is_paused = False
            self._epoll.register(self._listener, select.EPOLLIN)
        for fd, events in ready:
            peer = self._peers.get(fd)
            if peer is None:
                if fd == self._listener.fileno():
                    self._accept()
                continue
            if peer.unsent and events & ~select.EPOLLIN:
                self._flush(peer)
            if events & _GONE and peer.is_heard and not peer.is_waiting:
                self._read(peer)

    def next_message(self) -> tuple[Peer, Header, bytes] | None:
        """Return one message, of each peer that has some in turn; None: nobody has."""
        while self._waiting:
            peer = self._waiting.popleft()
            peer.is_waiting = False
            if not peer.is_heard:
                continue
            try:
                message = peer.inbox.next()
            except ProtocolError as error:
                self._refuse(peer, error)
                continue
            if message is None:
                continue
            if len(peer.inbox):
                self._line_up(peer)
            return peer, *message
        return None

    def send(self, peer: Peer, header: Header, body: bytes) -> None:
        """Send as much as goes without waiting, and the rest when the peer reads. A peer that is gone loses it."""
        if not peer.is_open:
            return
        message = wire.pack(header, body)
        if peer.unsent:
            peer.unsent += message
        else:
            try:
                sent = peer.socket.send(message, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.hang_up(peer)
                return
            if sent == len(message):
                return
            peer.unsent += message[sent:]
        if len(peer.unsent) > _MAX_UNSENT_BYTES:
            self._give_up(peer)
        self._make_room_for(peer)
        if peer.is_open:
            self._await(peer)

    def hang_up(self, peer: Peer) -> None:
        """End the connection; what was not sent is lost. Idempotent."""
        if not peer.is_open:
            return
        del self._peers[peer.fd]
        with contextlib.suppress(OSError):
            self._epoll.unregister(peer.fd)
        peer.fd = -1
        peer.is_heard = False
        # Who is still to answer it holds the peer, for as long as a fetch may take.
        peer.unsent = bytearray()
        peer.inbox = Inbox(wire.MAX_BODY_BYTES)
        peer.socket.close()

    # ------------------------------------------------------------ private

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # No descriptor is free, which the poll would say again and again: not before the next turn.
                self._epoll.unregister(self._listener)
                self._is_paused = True
                self._on_fault("refused_connection")
                return
            if len(self._peers) >= self._max_peers:
                connection.close()
                self._on_fault("refused_connection")
                continue
            connection.setblocking(False)
            peer = Peer(connection)
            self._peers[peer.fd] = peer
            self._epoll.register(peer.fd, select.EPOLLIN)

    def _read(self, peer: Peer) -> None:
        # A long message comes in large pieces; for the usual ones a buffer of that size would only cost time.
        wanted = _READ_BYTES if len(peer.inbox) < _READ_BYTES else _READ_MORE_BYTES
        try:
            data = peer.socket.recv(wanted)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.hang_up(peer)
            return
        peer.inbox.add(data)
        self._make_room_for(peer)
        if peer.is_open:
            self._line_up(peer)

    def _line_up(self, peer: Peer) -> None:
        if not peer.is_waiting:
            peer.is_waiting = True
            self._waiting.append(peer)

    def _flush(self, peer: Peer) -> None:
        try:
            sent = peer.socket.send(peer.unsent, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        except OSError:
            self.hang_up(peer)
            return
        del peer.unsent[:sent]
        if peer.is_lost and not peer.unsent:
            self.hang_up(peer)
            return
        self._await(peer)
        if len(peer.inbox) and peer.is_heard:
            self._line_up(peer)

    def _await(self, peer: Peer) -> None:
        """Have the poll tell of that peer what we can do with it now."""
        peer.is_heard = not (len(peer.unsent) > _SLOW_BYTES or peer.is_lost)
        events = select.EPOLLIN if peer.is_heard else 0
        if peer.unsent:
            events |= select.EPOLLOUT
        self._epoll.modify(peer.fd, events)

    def _refuse(self, peer: Peer, error: ProtocolError) -> None:
        """Say what is wrong, then hang up."""
        self._on_fault(f"refused_{error.code}")
        peer.is_lost = True
        peer.is_heard = False
        self.send(peer, Header(), wire.encode(wire.Error(error.code, str(error))))
        if peer.is_open and not peer.unsent:
            self.hang_up(peer)

    def _make_room_for(self, peer: Peer) -> None:
        """Give up whoever holds most, as long as all together hold too much; only `peer` holds more than before."""
        while peer.held_bytes > _SHARE_BYTES:
            above = [one for one in self._peers.values() if one.held_bytes > _SHARE_BYTES]
            if sum(one.held_bytes for one in above) <= _MAX_ABOVE_SHARE_BYTES:
                return
            self._give_up(max(above, key=lambda one: one.held_bytes))

    def _give_up(self, peer: Peer) -> None:
        self._on_fault("lost_connection")
        self.hang_up(peer)
