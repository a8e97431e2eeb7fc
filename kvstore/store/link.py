"""The control thread's end of one worker process: bounded queues in front of it, loads before stores.

Operations wait here, not in the worker, so that they can be taken back; only a window of them is out at a time.
A worker that dies fails what was out (after the process is certainly gone, so no slot has a late writer) and
is started again, less and less often.
"""

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from kvstore.core.outcome import Outcome, TierKind
from kvstore.store.read_pace import ReadPace
from kvstore.worker import ops
from kvstore.worker.opening import WorkerSettings

_log = logging.getLogger(__name__)
_RESTART_AFTER_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
# While loads keep coming, a batch of stores still goes out this often, so that blocks become durable.
_STORE_AT_LEAST_EVERY_S = 0.25
MAX_WAITING_LOADS = 65_536
# Of records, which go out at once, no more than this many are under way.
MAX_RECORDS = 1024
# What a tier holds comes in many messages after a start, and others wait for the control thread meanwhile.
_RECEIVE_S = 0.02
# What a process said last is on its way for a moment after its end.
_LAST_WORDS_S = 0.05
# A worker that lived so long did not die of how it was started.
_LONG_LIFE_S = 60.0

OnResult = Callable[[ops.Result], None]
SmallOp = ops.RecordPut | ops.RecordGet | ops.RecordDelete | ops.Discover | ops.Recover
SubmitOp = ops.Read | ops.Write | ops.Delete | ops.Scrub | SmallOp


@dataclass(slots=True)
class _Out:
    """An operation that the worker has and has not answered."""

    on_result: OnResult
    num_bytes: int
    is_load: bool = False
    is_store: bool = False
    is_record: bool = False


class WorkerLink:
    """See the module. Callbacks run on the control thread, from `receive`, `pump` or `stop`."""

    def __init__(
        self,
        kind: TierKind,
        settings: WorkerSettings,
        context: "zmq.Context[zmq.Socket[bytes]]",
        *,
        load_window: int,
        store_window_bytes: int,
        store_window_ops: int,
        on_recovered: Callable[[ops.Recovered], None],
        paces_loads: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`paces_loads`: the tier lies behind a link, which loads fill and do not flood."""
        self.kind = kind
        self.ready = False
        self.failure = ""
        self.is_fatal = False
        self.level = ops.Level(0, 0, None, {})
        self.bucket = ops.BucketLevel()
        self.on_tombstones: Callable[[list[bytes]], None] = lambda _: None
        self.bytes_in = 0
        self.bytes_out = 0
        self._settings = settings
        self._context = context
        self._load_window = load_window
        self._pace = ReadPace(load_window) if paces_loads else None
        self._store_window_bytes = store_window_bytes
        self._store_window_ops = store_window_ops
        self._on_recovered = on_recovered
        self._on_scrubbed: Callable[[ops.Scrubbed], None] = lambda reply: None
        self._clock = clock
        self.num_starts = 0
        """Tells the descriptors of one start from those of another, which may have the same numbers."""
        self._socket: zmq.Socket[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._next_op = 1
        self._out: dict[int, _Out] = {}
        self._loads: deque[tuple[SubmitOp, _Out]] = deque()
        self._stores: deque[tuple[SubmitOp, _Out]] = deque()
        self._loads_out = 0
        self._stores_out = 0
        self._stores_out_bytes = 0
        self._stores_waiting_bytes = 0
        self._records_out = 0
        self._last_store = 0.0
        self._restarts = 0
        self._started_at = 0.0
        self._restart_at: float | None = None
        self._gone_at: float | None = None
        self._stopping = False

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Start the worker; one that cannot be started now counts as one that died."""
        self._started_at = self._clock()
        self._restart_at = None
        self.num_starts += 1
        self._socket = self._context.socket(zmq.PAIR)
        try:
            socket_path = Path(self._settings.socket.removeprefix("ipc://"))
            socket_path.unlink(missing_ok=True)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.SNDHWM, 0)
            self._socket.bind(self._settings.socket)
            self._process = subprocess.Popen(
                # -P: modules come from where we are installed, never from the folder the daemon was started in.
                [sys.executable, "-P", "-m", "kvstore.worker.main"],
                stdin=subprocess.PIPE,
                env=_worker_environment(),
            )
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
                pipe.write(msgspec.json.encode(self._settings))
            self._pidfd = os.pidfd_open(self._process.pid)
        except (OSError, zmq.ZMQError) as error:
            self.failure = f"the worker cannot be started: {error}"
            self._lost()

    def sources(self) -> list[int]:
        """The descriptors to poll for: call `receive` when one of them is readable, and whenever `has_answers`."""
        if self._socket is None:
            return []
        answers = int(self._socket.getsockopt(zmq.FD))
        return [answers] if self._gone_at is not None else [answers, self._pidfd]

    def has_answers(self) -> bool:
        """Whether there is something to `receive`. To be asked before each wait: the descriptor becomes readable once,
        however much comes, and not again before that was taken note of here."""
        return self._socket is not None and bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def request_stop(self) -> None:
        """Ask the worker to finish what it has begun and to leave; never blocks."""
        self._stopping = True
        self._restart_at = None
        if self._socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send(ops.encoder.encode([ops.Stop()]), zmq.NOBLOCK)

    def join(self, deadline_s: float) -> None:
        """Wait for the worker after `request_stop`, kill it at the deadline; idempotent."""
        self._stopping = True
        if self._process is not None:
            try:
                self._process.wait(timeout=max(0.0, deadline_s))
            except subprocess.TimeoutExpired:
                _log.warning("%s: the worker did not stop in time and was killed", self.kind.label)
                self._process.kill()
                self._process.wait()
        self._lost()

    # ------------------------------------------------------------ work

    def next_op(self) -> int:
        self._next_op += 1
        return self._next_op

    def load(self, op: ops.Read, on_result: OnResult) -> bool:
        """Queue a read; False where the queue is full (the answer is BUSY) or the tier is down."""
        if not self.ready or len(self._loads) >= MAX_WAITING_LOADS:
            return False
        self._loads.append((op, _Out(on_result, op.meta.payload_bytes, is_load=True)))
        return True

    def cancel_loads(self, wanted: Callable[[int], bool]) -> None:
        """Take back the reads that are still waiting here and whose number is not wanted; they answer CANCELLED."""
        kept: deque[tuple[SubmitOp, _Out]] = deque()
        cancelled: list[tuple[SubmitOp, _Out]] = []
        for op, out in self._loads:
            (kept if wanted(op.op) else cancelled).append((op, out))
        self._loads = kept
        for op, out in cancelled:
            out.on_result(ops.Result(op.op, Outcome.CANCELLED))

    def store(self, op: ops.Write | ops.Delete, on_result: OnResult) -> None:
        """Queue a write or delete, for later where the tier is down; the caller bounds how many (see `store_room`)."""
        num_bytes = op.meta.payload_bytes if isinstance(op, ops.Write) else 0
        self._stores_waiting_bytes += num_bytes
        self._stores.append((op, _Out(on_result, num_bytes, is_store=True)))

    def store_room(self) -> bool:
        """Whether another write would go out soon, with those that wait already, rather than wait here."""
        return (
            self.ready
            and self._stores_out + len(self._stores) < self._store_window_ops
            and self._stores_out_bytes + self._stores_waiting_bytes < self._store_window_bytes
        )

    def record(self, op: SmallOp, on_result: OnResult) -> None:
        """Send at once: records are small and somebody waits for them. UNAVAILABLE at once where the tier is down, BUSY
        where MAX_RECORDS are under way."""
        if not self.ready:
            on_result(ops.Result(op.op, Outcome.UNAVAILABLE))
        elif self._records_out >= MAX_RECORDS:
            on_result(ops.Result(op.op, Outcome.BUSY))
        else:
            self._records_out += 1
            self._send([(op, _Out(on_result, 0, is_record=True))])

    def scrub(self, op: ops.Scrub, on_step: Callable[[ops.Scrubbed], None], on_result: OnResult) -> None:
        """Begin a walk over the tier; the one before must have ended. UNAVAILABLE at once where the tier is down."""
        if not self.ready:
            on_result(ops.Result(op.op, Outcome.UNAVAILABLE))
            return
        self._on_scrubbed = on_step
        self._send([(op, _Out(on_result, 0))])

    def cancel_scrub(self) -> None:
        """Ask the worker to end the walk; its result is still to come."""
        self._tell(ops.CancelScrub())

    @property
    def is_loading(self) -> bool:
        """Whether somebody waits for a block from this tier."""
        return bool(self._loads_out or self._loads)

    def pump(self, loads_elsewhere: bool = False) -> None:
        """Send what the windows allow; start a dead worker again when it is time.

        `loads_elsewhere`: another tier is loading, with the same cores and often the same disk as our stores.
        """
        now = self._clock()
        if self._gone_at is not None and now >= self._gone_at + _LAST_WORDS_S:
            while self.receive():
                pass
            self._lost()
        if self._restart_at is not None and now >= self._restart_at:
            self.start()
        if not self.ready:
            return
        batch = []
        while self._loads and self._may_load(self._loads[0][1].num_bytes, now):
            batch.append(self._loads.popleft())
            self._loads_out += 1
            if self._pace is not None:
                self._pace.sent(batch[-1][0].op, batch[-1][1].num_bytes, now)
        stores_may_go = not (self._loads_out or loads_elsewhere) or now - self._last_store >= _STORE_AT_LEAST_EVERY_S
        while self._stores and stores_may_go and self._window_open():
            op, out = self._stores.popleft()
            self._stores_out += 1
            self._stores_out_bytes += out.num_bytes
            self._stores_waiting_bytes -= out.num_bytes
            self._last_store = now
            batch.append((op, out))
        if batch:
            self._send(batch)

    def next_deadline(self) -> float | None:
        """Return when `pump` may send a load that waits for its time only."""
        if self._pace is None or not self.ready or not self._loads or self._loads_out >= self._load_window:
            return None
        # In the past: the load waits for an answer.
        return self._pace.next_at_s if self._pace.next_at_s > self._clock() else None

    def receive(self) -> bool:
        """Take in the answers that are there, for a moment at most; return whether there may be more.

        Notices whether the process is gone.
        """
        if self._socket is None:
            return False
        until = self._clock() + _RECEIVE_S
        more = True
        while self._clock() < until:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                more = False
                break
            for reply in ops.reply_decoder.decode(frame):
                self._handle(reply)
        if self._gone_at is None and self._process is not None and self._process.poll() is not None:
            self._gone_at = self._clock()
            self.ready = False
        return more

    # ------------------------------------------------------------ private

    def _may_load(self, num_bytes: int, now: float) -> bool:
        return self._loads_out < self._load_window and (self._pace is None or self._pace.may_send(num_bytes, now))

    def _window_open(self) -> bool:
        return self._stores_out < self._store_window_ops and self._stores_out_bytes < self._store_window_bytes

    def _send(self, batch: list[tuple[SubmitOp, _Out]]) -> None:
        assert self._socket is not None
        for op, out in batch:
            self._out[op.op] = out
        # There is no high-water mark, and what is out is bounded by the windows. But a worker that died a moment ago is
        # no peer any more, and a plain send would wait for the next one, and all of the daemon with it.
        try:
            self._socket.send(ops.encoder.encode([op for op, _ in batch]), zmq.NOBLOCK)
        except zmq.Again:
            assert self._process is not None
            self._process.kill()  # what was sent fails once it is certainly gone

    def _handle(self, reply: ops.Reply) -> None:
        match reply:
            case ops.Ready():
                self.ready = True
                self.failure = ""
            case ops.Failed():
                self.failure = reply.message
                self.is_fatal = reply.fatal
                _log.error("%s: %s", self.kind.label, reply.message)
            case ops.Level():
                self.level = reply
            case ops.BucketLevel():
                self.bucket = reply
            case ops.Tombstones():
                self.on_tombstones(reply.records)
            case ops.Recovered():
                self._on_recovered(reply)
                if reply.done:
                    self._settle(ops.Result(reply.op, Outcome.OK))
                else:
                    self._tell(ops.Continue())
            case ops.Scrubbed():
                self._on_scrubbed(reply)
            case ops.Result():
                self._settle(reply)

    def _tell(self, op: ops.Continue | ops.CancelScrub) -> None:
        if self._socket is not None:
            with contextlib.suppress(zmq.Again):  # of a worker that is gone nothing more comes anyway
                self._socket.send(ops.encoder.encode([op]), zmq.NOBLOCK)

    def _settle(self, result: ops.Result) -> None:
        out = self._out.pop(result.op, None)
        if out is None:
            return
        if out.is_load:
            self._loads_out -= 1
            if self._pace is not None:
                self._pace.settled(result.op, result.outcome == Outcome.OK, self._clock())
            self.bytes_out += out.num_bytes if result.outcome == Outcome.OK else 0
        else:
            self._stores_out -= out.is_store
            self._records_out -= out.is_record
            self._stores_out_bytes -= out.num_bytes
            self.bytes_in += out.num_bytes if result.outcome == Outcome.OK else 0
        out.on_result(result)

    def _lost(self) -> None:
        """The process is gone: fail what it had, and what waits, then plan to start another."""
        if self._socket is None:
            return
        self.ready = False
        self._gone_at = None
        self._socket.close()
        self._socket = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        waiting = [(op.op, out) for op, out in (*self._loads, *self._stores)]
        failed = [*self._out.items(), *waiting]
        self._out, self._loads, self._stores = {}, deque(), deque()
        self._loads_out = self._stores_out = self._records_out = 0
        self._stores_out_bytes = self._stores_waiting_bytes = 0
        if self._pace is not None:
            self._pace.clear()
        if not self._stopping:
            now = self._clock()
            self._restarts = 0 if now - self._started_at > _LONG_LIFE_S else self._restarts
            delay = _RESTART_AFTER_S[min(self._restarts, len(_RESTART_AFTER_S) - 1)]
            self._restarts += 1
            self._restart_at = now + delay
            _log.warning("%s: the worker is gone (%s); another starts in %.1f s", self.kind.label, self.failure, delay)
        for op, out in failed:
            out.on_result(ops.Result(op, Outcome.UNAVAILABLE))


def _worker_environment() -> dict[str, str]:
    # Threads of numeric libraries would only fight for the cores that the engine needs.
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
