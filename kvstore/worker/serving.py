"""Carries out operations on one slow tier, on threads of its own, and answers each.

main thread      receives operations, hands them out, sends results
reader threads   one block at a time, so that blocks land one by one
writer threads   batches where the tier syncs per batch (SSD: two threads), single blocks else (S3)
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast

import msgspec
import zmq

from kvstore.bucket import tombstone
from kvstore.bucket.prefix_search import PrefixSearch
from kvstore.bucket.tombstone import TOMBSTONE_PREFIX
from kvstore.core.errors import KVStoreError, TierUnavailable, WrongKey
from kvstore.core.key import BlockKey, split_keys
from kvstore.core.outcome import Outcome
from kvstore.worker import ops
from kvstore.worker.batches import Change, Changes
from kvstore.worker.janitor import Janitor
from kvstore.worker.scrubber import Scrubber
from tiers.base import Record, RecordStore, Tier, Usage
from tiers.region import Region
from tiers.scrub import ScrubbedTier

_log = logging.getLogger(__name__)
# What was recovered and the control thread has not taken in yet: a few MiB, however much the tier holds.
_RECOVERED_AHEAD = 4
_RECORD_BYTES_PER_MESSAGE = 256 << 10
_LOOK_EVERY_S = 0.5
# Whether the files of a tier are still there.
_LOOK_AT_TIER_EVERY_S = 5.0
# With half of it writes were up to a tenth slower on a disk of 7 GB/s, as far as the noise lets one see: each batch
# waits for its sync and the index.
SSD_BATCH_BYTES = 64 << 20
# One batch is written while the other is being synced.
SSD_WRITERS = 2
# Its last request may be under way; the daemon waits for all of a worker's end only so long.
_JANITOR_STOP_S = 2.0


class Worker:
    """Carries out operations until Stop; see the module for its threads."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        tier: Tier,
        records: RecordStore,
        region: Region,
        threads: int,
        *,
        batching: bool,
    ) -> None:
        self._socket = socket
        self._tier = tier
        self._records = records
        self._region = region
        self._answers: queue.SimpleQueue[ops.Reply] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="reader")
        # Questions leave half of the readers to those who wait for blocks.
        self._askers = max(1, threads // 2)
        self._level_sent = ops.Level(0, 0, None, {})
        # As many as there are kinds of faults.
        self._reasons_logged: set[str] = set()
        self._is_stopping = False
        self._next_look = time.monotonic() + _LOOK_AT_TIER_EVERY_S
        self._reads_lock = threading.Lock()
        self._num_reads = 0
        self._scrubber = Scrubber(cast(ScrubbedTier, tier), self.answer, lambda: self._num_reads > 0)
        self._recovery_room = threading.Semaphore(_RECOVERED_AHEAD)
        self._changes = Changes(SSD_BATCH_BYTES if batching else 0)
        writers = SSD_WRITERS if batching else threads
        # Keeps the bucket in order, where there is one.
        self.janitor: Janitor | None = None
        self._writers = [threading.Thread(target=self._write_loop, name=f"writer-{i}") for i in range(writers)]

    def run(self) -> None:
        for writer in self._writers:
            writer.start()
        tidying = None if self.janitor is None else threading.Thread(target=self.janitor.run, daemon=True)
        self.answer(ops.Ready())
        self.answer(self._level())
        if tidying is not None:
            tidying.start()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        going_on = True
        while going_on:
            ready = dict(poller.poll(int(1000 * _LOOK_AT_TIER_EVERY_S)))
            if (why := self._needs_reopening()) and going_on:
                # The next worker opens the tier anew, and what was lost with it is found out.
                self.answer(ops.Failed(f"{why}; the tier is opened anew", fatal=False))
                self._send_answers()
                break
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._socket in ready:
                going_on = self._accept(ops.op_decoder.decode(self._socket.recv()))
            self._send_answers()
        if self.janitor is not None and tidying is not None:
            self.janitor.stop()
            tidying.join(_JANITOR_STOP_S)
        self._finish()

    def _needs_reopening(self) -> str:
        """Say what is wrong with the tier that only opening it anew can put right; looks at it now and then, and when
        something was UNAVAILABLE."""
        now = time.monotonic()
        if now < self._next_look:
            return ""
        self._next_look = now + _LOOK_AT_TIER_EVERY_S
        look = getattr(self._tier, "needs_reopening", None)
        return str(look()) if callable(look) else ""

    def _accept(self, accepted: list[ops.Op]) -> bool:
        changes: list[Change] = []
        going_on = True
        for op in accepted:
            match op:
                case ops.Stop():
                    going_on = False
                    break
                case ops.Read():
                    self._count_reads(1)
                    self._readers.submit(self._run, op.op, partial(self._read, op))
                case ops.RecordGet():
                    self._readers.submit(self._run, op.op, partial(self._record_get, op))
                case ops.Discover():
                    self._discover(op)
                case ops.Recover():
                    self._readers.submit(self._recover, op)
                case ops.Continue():
                    self._recovery_room.release()
                case ops.Scrub():
                    self._scrubber.start(op)
                case ops.CancelScrub():
                    self._scrubber.cancel()
                case _:
                    changes.append(op)
        # At once, so that the first thread that is free finds a batch and not a single operation.
        self._changes.put(changes)
        return going_on

    def _finish(self) -> None:
        self._is_stopping = True
        self._scrubber.cancel()
        self._changes.close()
        for writer in self._writers:
            writer.join()
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._scrubber.close()
        self._send_answers()
        os.close(self._wake)

    def _send_answers(self) -> None:
        batch: list[ops.Reply] = []
        while not self._answers.empty():
            batch.append(self._answers.get())
            if isinstance(batch[-1], ops.Recovered):
                # The end of a message, so that the control thread takes in one of these at a time.
                self._socket.send(ops.encoder.encode(batch))
                batch = []
        if batch:
            self._socket.send(ops.encoder.encode(batch))

    def answer(self, reply: ops.Reply) -> None:
        """Send this to the control thread; from any thread."""
        self._answers.put(reply)
        os.eventfd_write(self._wake, 1)

    def report(self, reply: ops.Reply) -> None:
        """As `answer`, for what the janitor has found; what its requests met is told with it, or a bucket that is not
        there would look well until somebody stores to it."""
        if self._has_news():
            self.answer(self._level())
        self.answer(reply)

    # ------------------------------------------------------------ reading

    def _run(self, op: int, action: Callable[[], ops.Result]) -> None:
        """The root of every single operation: whatever happens, it is answered."""
        started = time.monotonic()
        try:
            result = action()
        except (TierUnavailable, WrongKey):
            result = ops.Result(op, Outcome.UNAVAILABLE)
        except Exception:
            _log.exception("an operation failed")
            result = ops.Result(op, Outcome.UNAVAILABLE)
        seconds = time.monotonic() - started
        # First, so that whoever is told of a fault finds it counted.
        if result.outcome == Outcome.UNAVAILABLE:
            self._next_look = 0.0
        if result.outcome == Outcome.UNAVAILABLE or self._has_news():
            self.answer(self._level())
        self.answer(msgspec.structs.replace(result, seconds=seconds))

    def _read(self, op: ops.Read) -> ops.Result:
        try:
            with self._region.view(op.offset, op.meta.payload_bytes) as view:
                (outcome,) = self._tier.read([op.meta.unpack()], [view])
        finally:
            self._count_reads(-1)
        return ops.Result(op.op, outcome)

    def _count_reads(self, number: int) -> None:
        with self._reads_lock:
            self._num_reads += number

    def _record_get(self, op: ops.RecordGet) -> ops.Result:
        record = self._records.get(op.name)
        if record is None:
            return ops.Result(op.op, Outcome.MISS)
        return ops.Result(op.op, Outcome.OK, record.data, record.etag)

    def _discover(self, op: ops.Discover) -> None:
        def done(count: int | None) -> None:
            outcome = Outcome.UNAVAILABLE if count is None else Outcome.OK
            self.answer(ops.Result(op.op, outcome, count=count or 0))

        PrefixSearch(split_keys(op.keys), self._tier.contains, self._readers.submit, self._askers, done).start()

    def _recover(self, op: ops.Recover) -> None:
        try:
            for batch in self._tier.recover_batches():
                if not self._tell(ops.Recovered(op.op, blocks=ops.PackedBatch.pack(batch))):
                    return
            records: list[bytes] = []
            for name in self._records.names(op.prefix):
                record = self._readable(name)
                if record is not None:
                    records.append(record.data)
                if sum(map(len, records)) >= _RECORD_BYTES_PER_MESSAGE:
                    if not self._tell(ops.Recovered(op.op, records=records)):
                        return
                    records = []
            self.answer(ops.Recovered(op.op, records=records, done=True))
        except Exception:
            # The root of what runs for this question; who asked waits for its end.
            _log.exception("recovery ended early; what was not read counts as missing")
            self.answer(ops.Recovered(op.op, done=True))

    def _readable(self, name: str) -> Record | None:
        try:
            return self._records.get(name)
        except WrongKey:
            return None

    def _tell(self, reply: ops.Recovered) -> bool:
        """Answer once there is room for it; False where the worker stops first."""
        while not self._recovery_room.acquire(timeout=_LOOK_EVERY_S):
            if self._is_stopping:
                return False
        self.answer(reply)
        return True

    # ------------------------------------------------------------ writing

    def _write_loop(self) -> None:
        while batch := self._changes.take():
            try:
                if isinstance(batch[0], ops.Write | ops.Delete):
                    self._run_batch(batch)
                else:
                    for op in batch:
                        self._run(op.op, partial(self._record, op))
            finally:
                self._changes.done(batch)
            if self._changes.is_empty:
                self.answer(self._level())

    def _run_batch(self, batch: list[Change]) -> None:
        started = time.monotonic()
        try:
            outcomes = self._write_batch(batch) if isinstance(batch[0], ops.Write) else self._delete_batch(batch)
        except Exception:
            # The root of every batch: each of its operations is answered, and the thread goes on.
            _log.exception("a batch of %d writes failed", len(batch))
            outcomes = [Outcome.UNAVAILABLE] * len(batch)
        if Outcome.UNAVAILABLE in outcomes:
            self._next_look = 0.0
        seconds = (time.monotonic() - started) / len(batch)
        for op, outcome in zip(batch, outcomes, strict=True):
            self.answer(ops.Result(op.op, outcome, seconds=seconds))

    def _write_batch(self, batch: list[Change]) -> list[Outcome]:
        writes = [op for op in batch if isinstance(op, ops.Write)]
        if len(writes) == 1 and writes[0].may_exist:
            known = self._tier.contains([writes[0].meta.unpack().key])
            if known == [Outcome.OK]:
                return [Outcome.EXISTS]
        views = [self._region.view(op.offset, op.meta.payload_bytes) for op in writes]
        try:
            return self._tier.write([op.meta.unpack() for op in writes], views)
        finally:
            for view in views:
                view.release()

    def _delete_batch(self, batch: list[Change]) -> list[Outcome]:
        return self._tier.delete([BlockKey(op.key) for op in batch if isinstance(op, ops.Delete)])

    def _record(self, op: Change) -> ops.Result:
        if isinstance(op, ops.RecordPut):
            stone = tombstone.decode(op.data) if op.name.startswith(TOMBSTONE_PREFIX) else None
            if stone is not None:
                _, put_etag = tombstone.put(self._records, stone)
                if self.janitor is not None:
                    self.janitor.wake()
                return ops.Result(op.op, Outcome.OK, etag=put_etag)
            etag = self._records.put(op.name, op.data, if_match=op.if_match, if_absent=op.if_absent)
            return ops.Result(op.op, Outcome.EXISTS) if etag is None else ops.Result(op.op, Outcome.OK, etag=etag)
        assert isinstance(op, ops.RecordDelete)
        return ops.Result(op.op, Outcome.OK if self._records.delete(op.name) else Outcome.MISS)

    def _level(self) -> ops.Level:
        usage = Usage(0, 0, None)
        reason = str(getattr(self._tier, "trouble", ""))
        state = "degraded" if reason or getattr(self._tier, "is_left_alone", False) else "ok"
        try:
            usage = self._tier.usage()
        except (OSError, KVStoreError) as error:
            # Never the end of the thread that asks: what else was asked of it must be answered.
            _log.warning("the tier cannot say how full it is: %s", error)
            state = "degraded"
        level = ops.Level(usage.blocks, usage.used_bytes, usage.capacity_bytes, _faults(self._tier), state, reason)
        if reason and reason not in self._reasons_logged:
            self._reasons_logged.add(reason)
            _log.warning("the tier is degraded: %s", reason)
        self._level_sent = level
        return level

    def _has_news(self) -> bool:
        return self._level_sent.state != "ok" or _faults(self._tier) != self._level_sent.faults


def _faults(tier: Tier) -> dict[str, int]:
    faults = getattr(tier, "faults", None)
    return dict(faults()) if callable(faults) else {}
