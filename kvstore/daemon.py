"""The daemon: the control socket, the loop of the control thread, starting and stopping everything.

    recover ──► serve ──SIGTERM──► drain (refuse stores, write down what is only in RAM) ──► stop

Does not cover: what requests mean (store/store.py), who carries them out (store/link.py and its workers).
"""

import contextlib
import logging
import os
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import zmq

from kvstore import wire
from kvstore.config import Config
from kvstore.connection import LOCK_NAME, SOCKET_NAME, lock
from kvstore.control_socket import ControlSocket, Peer
from kvstore.core.errors import ConfigError, ProtocolError
from kvstore.core.outcome import Outcome, TierKind
from kvstore.cpu import current_cpu
from kvstore.eager_poll import EagerPoll
from kvstore.events_process import EventsProcess
from kvstore.http_process import HttpProcess
from kvstore.process import go_first, keep_pauses_short
from kvstore.record_file import RecordFile
from kvstore.region_file import create_region
from kvstore.store.engines import Engine, EngineTable
from kvstore.store.link import WorkerLink
from kvstore.store.recording import Recording
from kvstore.store.store import Store
from kvstore.wire import ErrorCode, Header
from kvstore.worker.opening import WorkerSettings
from tiers.ram import RamTier
from tiers.region import Region

_log = logging.getLogger(__name__)
# What has landed meanwhile is told after so many messages, or so long.
_MESSAGES_PER_TURN = 64
_MESSAGES_S = 0.01
_START_DEADLINE_S = 120.0
_WORKER_DEADLINE_S = 15.0
_STOP_DEADLINE_S = 10.0
_STORE_WINDOW_BYTES = 64 << 20
# Two of the worker's batches, but no more than this share of the region above the other window: it cannot be evicted.
_SSD_STORE_WINDOW_BYTES = 128 << 20
_SSD_STORE_WINDOW_SHARE = 0.25
_SSD_STORE_WINDOW_OPS = 4096


def run(config: Config, record: Path | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status. Raises ConfigError where it cannot start."""
    logging.basicConfig(
        level=config.daemon.log_level.upper(),
        format="%(asctime)s %(levelname)s kvstore: %(message)s",
        stream=sys.stderr,
    )
    run_dir = _private_folder(Path(config.daemon.run_dir))
    try:
        lock_descriptor = lock(run_dir / LOCK_NAME)
    except BlockingIOError:
        raise ConfigError(f"another daemon runs in {run_dir}: stop it, or choose another daemon.run_dir") from None
    try:
        with contextlib.ExitStack() as stack:
            epoch = time.time_ns()
            go_first()
            region = create_region(config.ram, run_dir, epoch)
            stack.callback(region.close)
            stack.callback(region.unlink)
            Daemon(config, run_dir, epoch, region, record).run()
    finally:
        os.close(lock_descriptor)
    return 0


class Daemon:
    """One boot of the daemon. Everything in it belongs to the thread that calls `run`."""

    def __init__(self, config: Config, run_dir: Path, epoch: int, region: Region, record: Path | None = None) -> None:
        self._config = config
        self._run_dir = run_dir
        self._epoch = epoch
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links = {kind: self._link(kind, region) for kind in _slow_tiers(config)}
        self._engines = EngineTable(run_dir)
        self._store = Store(config, epoch, RamTier(region), self._links, self._engines)
        self._record = None if record is None else RecordFile(record)
        if self._record is not None:
            self._store.recording = Recording(self._record.write, time.monotonic)
            self._record.on_full = self._store.recording.file_is_full
        self._http = HttpProcess(config, run_dir) if config.http.enabled else None
        self._events: EventsProcess | None = None
        if config.events.endpoint:
            self._events = EventsProcess(config.events, run_dir, config.daemon.log_level, self._context)
            self._store.announce(self._events)
        self._epoll = select.epoll()
        self._wait = EagerPoll(self._epoll)
        self._control = ControlSocket(run_dir / SOCKET_NAME, self._epoll, self._store.count_error)
        self._watched: list[int] = []
        self._workers_epoll = select.epoll()
        self._epoll.register(self._workers_epoll, select.EPOLLIN)
        self._is_draining = False
        self._signals = 0

    def run(self) -> None:
        try:
            with self._wakeup() as wakeup:
                self._start(wakeup)
                self._serve(wakeup)
        finally:
            self._stop()

    # ------------------------------------------------------------ start and stop

    def _start(self, wakeup: socket.socket) -> None:
        for link in self._links.values():
            link.start()
        if TierKind.S3 not in self._links:
            _log.info("no bucket is configured (s3.bucket): serving with %d tiers", 2 + len(self._links))
        self._recover(wakeup)
        keep_pauses_short()
        self._control.open()
        if self._http is not None:
            self._http.start()
        if self._events is not None:
            self._events.start()
        tiers = ", ".join(["hbm (in the engines)", "ram", *(kind.label for kind in self._links)])
        _log.info("ready in %s, tiers: %s", self._run_dir, tiers)

    def _recover(self, wakeup: socket.socket) -> None:
        """Wait for the SSD tier, take over what it kept, and wait for the other workers to be there.

        A worker that is still starting would make the first sessions asked for look unknown. The bucket's opens no
        connection before it says that it is ready, so a bucket that does not answer costs no time here.
        """
        began = time.monotonic()
        while not self._signals and time.monotonic() < began + _START_DEADLINE_S:
            for link in self._links.values():
                if link.failure and link.is_fatal:
                    raise ConfigError(f"{link.kind.label}: {link.failure}")
            self._store.turn()
            has_failed = {kind for kind, link in self._links.items() if link.failure}
            is_recovered = self._store.recovery.is_done or TierKind.SSD in has_failed
            are_there = all(link.ready or link.kind in has_failed for link in self._links.values())
            if is_recovered and (are_there or time.monotonic() > began + _WORKER_DEADLINE_S):
                break
            self._poll(wakeup, 0.05)
        for kind, link in self._links.items():
            if not link.ready and not self._signals:
                _log.error("serving without the %s tier until it can be opened", kind.label)

    def _stop(self) -> None:
        # First, so that nobody waits for an answer that does not come.
        self._control.close()
        for link in self._links.values():
            link.request_stop()
        if self._http is not None:
            self._http.stop()
        if self._events is not None:
            self._events.stop()
        if self._record is not None and self._store.recording is not None:
            self._store.recording.close()
            self._record.close()
        deadline = time.monotonic() + _STOP_DEADLINE_S
        for link in self._links.values():
            link.join(deadline - time.monotonic())
        self._engines.close()
        self._context.term()
        self._workers_epoll.close()
        self._epoll.close()

    @contextlib.contextmanager
    def _wakeup(self) -> Iterator[socket.socket]:
        """Turn signals into bytes on a socket, so that the poll ends; Python's handler alone would not end it."""
        readable, writable = socket.socketpair()
        readable.setblocking(False)
        writable.setblocking(False)
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        previous = signal.set_wakeup_fd(writable.fileno())
        self._epoll.register(readable, select.EPOLLIN)
        try:
            yield readable
        finally:
            signal.set_wakeup_fd(previous)
            for number, handler in before.items():
                signal.signal(number, handler)
            readable.close()
            writable.close()

    def _on_signal(self, number: int, _: object) -> None:
        self._signals += 1

    def _link(self, kind: TierKind, region: Region) -> WorkerLink:
        config = self._config
        is_ssd = kind == TierKind.SSD
        settings = WorkerSettings(
            tier="ssd" if is_ssd else "s3",
            socket=f"ipc://{self._run_dir}/{kind.label}.sock",
            parent=os.getpid(),
            log_level=config.daemon.log_level,
            region_path=str(region.path),
            epoch=self._epoch,
            ssd=config.ssd if is_ssd else None,
            s3=None if is_ssd else config.s3,
            ttl_s=config.sessions.ttl_s,
            encryption=config.encryption,
        )
        store_window_bytes = _STORE_WINDOW_BYTES
        if is_ssd:
            share_bytes = int(_SSD_STORE_WINDOW_SHARE * region.data_bytes)
            store_window_bytes = max(store_window_bytes, min(_SSD_STORE_WINDOW_BYTES, share_bytes))
        return WorkerLink(
            kind,
            settings,
            self._context,
            load_window=2 * (config.ssd.threads if is_ssd else config.s3.threads),
            store_window_bytes=store_window_bytes,
            store_window_ops=_SSD_STORE_WINDOW_OPS if is_ssd else config.s3.threads,
            on_recovered=lambda reply: self._store.recovery.take_in(reply),
            paces_loads=not is_ssd,
        )

    # ------------------------------------------------------------ the loop

    def _serve(self, wakeup: socket.socket) -> None:
        drain_until: float | None = None
        while True:
            self._store.turn()
            now = time.monotonic()
            if self._signals and drain_until is None:
                _log.info("draining, for at most %.0f s", self._config.daemon.drain_deadline_s)
                drain_until = now + self._config.daemon.drain_deadline_s
                self._is_draining = True
                self._store.drain()
            if drain_until is not None:
                if self._store.is_drained():
                    return
                if now >= drain_until or self._signals > 1:
                    _log.warning("stopped before everything was written down")
                    return
            if self._http is not None:
                self._http.supervise(now)
            if self._events is not None:
                self._events.supervise(now)
            self._poll(wakeup, max(0.0, self._store.next_deadline() - now))

    def _poll(self, wakeup: socket.socket, timeout_s: float) -> None:
        """Wait for what the store's turn has to see: messages of clients, answers of workers, signals; take it in.

        Questions that begin nothing are answered without ending the wait. For whoever asked often runs on the same
        core, and gets to read the answer only when we sleep again.
        """
        self._watch_workers()
        # A worker's answers that were there before are not told of by the poll (ZMQ tells once).
        if self._control.has_messages or any(link.has_answers() for link in self._links.values()):
            timeout_s = 0.0
        until = time.monotonic() + timeout_s
        while True:
            ready = self._wait.poll(timeout_s)
            self._control.take_in(ready)
            has_begun = self._receive()
            fds = [fd for fd, _ in ready]
            if has_begun or not fds or wakeup.fileno() in fds or self._workers_epoll.fileno() in fds:
                break
            timeout_s = until - time.monotonic()
            if timeout_s <= 0.0 or self._control.has_messages:
                break
        if wakeup.fileno() in fds:
            with contextlib.suppress(BlockingIOError):
                wakeup.recv(64)
        has_worker_ended = self._workers_epoll.fileno() in fds
        for link in self._links.values():
            if has_worker_ended or link.has_answers():
                link.receive()

    def _watch_workers(self) -> None:
        """A poll of their own, made anew when one starts or ends: a number in a shared one might be somebody else's by
        then."""
        sources = [source for link in self._links.values() for source in (link.num_starts, *link.sources())]
        if sources == self._watched:
            return
        self._watched = sources
        self._epoll.unregister(self._workers_epoll)
        self._workers_epoll.close()
        self._workers_epoll = select.epoll()
        self._epoll.register(self._workers_epoll, select.EPOLLIN)
        for link in self._links.values():
            for descriptor in link.sources():
                self._workers_epoll.register(descriptor, select.EPOLLIN)

    def _receive(self) -> bool:
        """Answer what has come, for a while at most; return whether that began anything for the next turn."""
        until = time.monotonic() + _MESSAGES_S
        has_begun = False
        for _ in range(_MESSAGES_PER_TURN):
            message = self._control.next_message()
            if message is None:
                break
            peer, header, body = message
            try:
                has_begun |= self._handle(header, body, partial(self._reply, peer, header.sequence))
            except ProtocolError as error:
                if error.code not in (ErrorCode.NOT_FOUND, ErrorCode.STALE_EPOCH, ErrorCode.NOT_ATTACHED):
                    self._store.count_error(f"refused_{error.code}")
                self._reply(peer, header.sequence, wire.Error(error.code, str(error)))
            except Exception:
                # The root of every request: a fault of ours costs its sender an error, not everybody the daemon.
                _log.exception("a request failed")
                self._store.count_error("internal")
                self._reply(
                    peer, header.sequence, wire.Error(ErrorCode.INTERNAL, "the daemon met a fault; see its log")
                )
            if time.monotonic() > until:
                break
        return has_begun

    def _handle(self, header: Header, body: bytes, reply: Callable[[wire.Message], None]) -> bool:
        """Answer one message; return whether that may have begun something."""
        if header.version != wire.PROTOCOL_VERSION:
            raise ProtocolError(
                ErrorCode.VERSION,
                f"this daemon speaks version {wire.PROTOCOL_VERSION} of the protocol, the client {header.version}: "
                "install the same release on both sides",
            )
        request = wire.decode_request(body)
        answer = self._answer(header, request, reply)
        if answer is not None:
            reply(answer)
        if isinstance(request, wire.Lookup) and isinstance(answer, wire.Found):
            self._store.asked(self._engine(header), request, answer)
        return not _is_only_an_answer(answer)

    def _answer(
        self, header: Header, request: wire.Request, reply: Callable[[wire.Message], None]
    ) -> wire.Message | None:
        """Return the answer, or None where it comes later."""
        store = self._store
        match request:
            case wire.Ping():
                return wire.Pong(self._epoch)
            case wire.Attach():
                return store.attach(request)
            case wire.Stats():
                return store.stats()
            case wire.DecisionGet():
                return store.decisions.get(request)
            case wire.DecisionList():
                return store.decisions.list(request)
            case wire.Evict():
                store.evict(request, reply)
                return None
            case wire.Verify() | wire.VerifyStatus() | wire.VerifyCancel():
                return store.verify(request)
            case wire.SessionGet():
                store.sessions.get(request, reply)
                return None
            case wire.SessionList():
                return store.sessions.list(request)
            case wire.SessionPin():
                store.sessions.pin(request, reply)
                return None
            case wire.SessionPrefetch():
                store.sessions.prefetch(request, reply)
                return None
            case wire.SessionHint():
                store.sessions.hint(request, reply)
                return None
            case wire.SessionDelete():
                store.sessions.delete(request, reply)
                return None
        engine = self._engine(header)
        match request:
            case wire.Detach():
                store.detach(engine)
            case wire.Lookup():
                return store.lookup(engine, request)
            case wire.Fetch():
                store.fetch(engine, request, reply)
                return None
            case wire.Release():
                store.release(engine, request)
            case wire.Store():
                if self._is_draining:
                    raise ProtocolError(ErrorCode.BUSY, "the daemon is stopping")
                return store.store(engine, request)
            case wire.Commit():
                return store.commit(engine, request)
            case wire.SessionPut():
                return store.session_put(engine, request)
            case wire.Report():
                store.report(engine, request)
            case wire.Observe():
                store.observe(request)
            case wire.Hint():
                store.hint(engine, request)
            case wire.Damaged():
                store.damaged(engine, request)
        return wire.Done()

    def _engine(self, header: Header) -> Engine:
        if header.epoch == 0:
            raise ProtocolError(ErrorCode.NOT_ATTACHED, "this request needs an attached engine")
        if header.epoch != self._epoch:
            raise ProtocolError(ErrorCode.STALE_EPOCH, "the daemon was restarted since; attach again")
        engine = self._engines.get(header.incarnation)
        if engine is None:
            raise ProtocolError(ErrorCode.NOT_ATTACHED, "this engine is not attached (any more); attach again")
        return engine

    def _reply(self, peer: Peer, sequence: int, body: wire.Message) -> None:
        try:
            frame = wire.encode(body)
        except ProtocolError as error:
            frame = wire.encode(wire.Error(error.code, str(error)))
        self._control.send(peer, Header(self._epoch, current_cpu() + 1, sequence), frame)


def _is_only_an_answer(answer: wire.Message | None) -> bool:
    """Whether nothing is left to be done. Unknown in the bucket: it is being asked now."""
    return isinstance(answer, wire.Pong) or (isinstance(answer, wire.Found) and answer.s3 == Outcome.MISS)


def _slow_tiers(config: Config) -> list[TierKind]:
    wanted = {TierKind.SSD: config.ssd.enabled, TierKind.S3: config.s3.enabled}
    return [kind for kind, is_wanted in wanted.items() if is_wanted]


def _private_folder(path: Path) -> Path:
    """Make the run folder, for this user alone. Raises ConfigError where it is somebody else's or open to others."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(f"cannot make daemon.run_dir {path}: {error.strerror}") from None
    if stat.S_ISLNK(status.st_mode):
        # Whoever may change the link, which need not be who owns the folder, could put another in its place.
        raise ConfigError(f"daemon.run_dir {path} is a symbolic link: name the folder itself, {path.resolve()}")
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(f"daemon.run_dir {path} belongs to another user: choose a folder of your own")
    if status.st_mode & 0o077:
        raise ConfigError(f"daemon.run_dir {path} is open to other users: chmod 700 {path}")
    return path
