"""Keeps a bucket in order, in the worker's process, beside the daemon's own traffic.

    every daemon            reads the tombstones, every `tombstone_poll` and after putting one, and tells the store
    the lease's holder      deletes what tombstones cover, at once; sweeps (`bucket/sweep.py`) every `sweep_every`

It makes one request at a time and only so many a second, through the same breaker as all others, and stops in the
middle when the lease is lost: whoever has it next begins anew. What fails is tried again at the next turn.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from kvstore.bucket.graves import Graves
from kvstore.bucket.index import BucketIndex
from kvstore.bucket.lease import LEASE_NAME, BucketLease
from kvstore.bucket.sweep import Limits, Sweep
from kvstore.core.counts import Counts
from kvstore.core.errors import TierUnavailable
from kvstore.worker import ops
from tiers.base import RecordStore
from tiers.inventory import Inventory

_log = logging.getLogger(__name__)
# A million blocks are listed in 50 s then, and the worker's other threads hardly notice.
REQUESTS_PER_S: Final = 20.0
_AGAIN_AFTER_S = 5.0
# The first one too: a daemon that restarts again and again must not list the bucket each time.
_SWEEP_AGAIN_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class JanitorSettings:
    """As in the configuration's `s3` and `sessions`."""

    tombstone_poll_s: float
    sweep_every_s: float
    orphan_grace_s: float
    max_bytes: int
    ttl_s: float
    write: Literal["sessions", "all"]


class LetGo(Exception):
    """The lease is lost and somebody else may be at it by now, or the worker stops."""


class Janitor:
    """`run` in a thread of its own, or `step` by hand; `wake` and `stop` from any thread."""

    def __init__(
        self,
        records: RecordStore,
        inventory: Inventory,
        settings: JanitorSettings,
        tell: Callable[[ops.Tombstones | ops.BucketLevel], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inventory = inventory
        self._settings = settings
        self._tell = tell
        self._clock = clock
        self._sleep = sleep
        self._records = records
        self._lease = BucketLease(records, clock)
        self._deleted = Counts()
        self._index = BucketIndex(records, inventory, self._go_on)
        self._graves = Graves(records, inventory, self._index, self._deleted, self._pace, self._go_on)
        self._level = ops.BucketLevel()
        self._waits = ""
        now = clock()
        self._next_poll = now
        self._next_bury = now
        self._next_sweep = now + min(_SWEEP_AGAIN_AFTER_S, settings.sweep_every_s)
        self._next_request = now
        self._woken = threading.Event()
        self._is_stopping = False

    def run(self) -> None:
        while not self._is_stopping:
            due = self.step()
            self._woken.wait(max(0.05, due - self._clock()))
            self._woken.clear()
        self._lease.release()

    def wake(self) -> None:
        """A tombstone has been put: look at once."""
        self._next_poll = 0.0
        self._woken.set()

    def stop(self) -> None:
        self._is_stopping = True
        self._woken.set()

    def step(self) -> float:
        """Do what is due; return when something will be. Raises nothing that the bucket could bring about."""
        try:
            self._lease.tick()
            if self._do_what_is_due(self._clock()):
                self._waits = "" if self._index.is_complete else "records_unreadable"
        except TierUnavailable:
            self._waits = "bucket_unavailable"
        except LetGo:
            self._waits = "lease_lost"
        except Exception:
            # The root of this thread.
            _log.exception("keeping the bucket in order failed")
            self._waits = "failed"
        self._report()
        due = [self._lease.next_look, self._next_poll]
        if self._lease.is_held:
            due += [self._next_sweep, *([self._next_bury] if self._graves.has_open else [])]
        return max(min(due), self._clock())

    # ------------------------------------------------------------ private

    def _do_what_is_due(self, now: float) -> bool:
        """Return whether that was anything."""
        was_polled = now >= self._next_poll
        if was_polled:
            self._poll(now)
        if not self._lease.is_held:
            return was_polled
        must_bury, must_sweep = self._graves.has_open and now >= self._next_bury, now >= self._next_sweep
        if must_bury:
            self._next_bury = now + _AGAIN_AFTER_S
            self._graves.bury(self._server_now_s())
        if must_sweep:
            self._next_sweep = now + min(_SWEEP_AGAIN_AFTER_S, self._settings.sweep_every_s)
            self._sweep()
            self._next_sweep = self._clock() + self._settings.sweep_every_s
        return was_polled or must_bury or must_sweep

    def _poll(self, now: float) -> None:
        self._next_poll = now + min(_AGAIN_AFTER_S, self._settings.tombstone_poll_s)
        new = self._graves.poll()
        self._next_poll = now + self._settings.tombstone_poll_s
        if new:
            self._next_bury = now
            self._tell(ops.Tombstones(new))

    def _sweep(self) -> None:
        began = self._clock()
        limits = Limits(
            self._settings.max_bytes, self._settings.ttl_s, self._settings.orphan_grace_s, self._settings.write
        )
        sweep = Sweep(self._records, self._inventory, self._index, self._graves, limits, self._deleted, self._go_on)
        now_s = self._server_now_s()
        sweep.run(now_s)
        self._level = ops.BucketLevel(
            num_blocks=sweep.num_blocks,
            num_bytes=sweep.num_bytes,
            swept_s=now_s,
            sweep_took_s=self._clock() - began,
        )
        self._next_poll = self._clock()  # sessions that have just been found to be over are ours too

    def _go_on(self) -> None:
        """Before each request under the lease."""
        self._pace()
        if not self._lease.is_held:
            raise LetGo

    def _pace(self) -> None:
        """Before each request: keep the lease, if we have it, and to so many a second."""
        if self._is_stopping:
            raise LetGo
        self._lease.tick()
        now = self._clock()
        if self._next_request > now:
            self._sleep(self._next_request - now)
        self._next_request = max(now, self._next_request) + 1.0 / REQUESTS_PER_S

    def _server_now_s(self) -> float:
        """The bucket's clock, by the lease that we have put there lately: ages of objects are told by it, and a clock
        of ours that is wrong by years must not delete a bucket."""
        listed = [record for record in self._inventory.records(LEASE_NAME).records if record.name == LEASE_NAME]
        if not listed:
            raise LetGo
        return listed[0].modified_s

    def _report(self) -> None:
        level = ops.BucketLevel(
            has_lease=self._lease.is_held,
            num_blocks=self._level.num_blocks,
            num_bytes=self._level.num_bytes,
            num_sessions=len(self._index.sessions),
            swept_s=self._level.swept_s,
            sweep_took_s=self._level.sweep_took_s,
            deleted=self._deleted.snapshot(),
            waits=self._waits,
        )
        if level != self._level:
            self._level = level
            self._tell(level)
