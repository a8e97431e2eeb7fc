"""The S3 tier: one object per block, header and payload, in a bucket that several daemons may share.

    {prefix}/blocks/...     blocks (`tiers/s3blocks.py`)
    {prefix}/records/...    session records (`tiers/s3records.py`)

Every request has a deadline and is verified; an object that is not the block is deleted, counted, and can be stored
again. A bucket that is missing, forbidden or silent answers UNAVAILABLE, and after some of that it is left
alone for a while (`tiers/s3calls.py`), so that it slows nobody down.

What a bucket holds is found through the session records in it, not by listing: a listing says nothing of parents and
namespaces, and of a bucket of millions of objects it takes minutes. So `recover` yields nothing.
"""

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Lock
from typing import TypeVar

from kvstore.core.block import BlockMeta
from kvstore.core.errors import TierUnavailable
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome, TierKind
from tiers.base import RecoveredBatch, Usage
from tiers.batch import check_lengths
from tiers.breaker import CircuitBreaker
from tiers.calls import RunningCalls
from tiers.codec import PLAIN, Codec
from tiers.faults import FaultCounter
from tiers.objects import DELETE_AT_ONCE, ObjectStore
from tiers.s3blocks import S3Blocks
from tiers.s3boto import BotoObjects
from tiers.s3calls import S3Calls
from tiers.s3client import S3Settings
from tiers.s3large import LargeObjects
from tiers.s3records import S3Records
from tiers.s3scrub import S3Scrub
from tiers.s3trouble import describe
from tiers.s3uploads import BotoUploads
from tiers.scrub import Orders, Step

__all__ = ["S3Settings", "S3Tier"]

_T = TypeVar("_T")
_CLOSE_WAIT_S = 30.0
_logger = logging.getLogger("kvstore.tiers.s3")


class S3Tier:
    """Implements `tiers.base.Tier`. Thread-safe; a batch goes one block after the other, so that the caller decides
    how many requests run at once by how many threads it calls from.

    `records` is a RecordStore in the same bucket, `objects` the bucket itself, for what else is kept there: see `run`.
    """

    def __init__(
        self,
        settings: S3Settings,
        *,
        codec: Codec = PLAIN,
        on_sent: Callable[[int, float], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        jitter: random.Random | None = None,
    ) -> None:
        """Contacts nobody. `on_sent` is told of every block stored: how many bytes, and the seconds that took.

        Raises ConfigError where a file cannot be read that the settings name.
        """
        self._settings = settings
        self._codec = codec
        self.objects, uploads = _open(settings, clock)
        self._faults = FaultCounter("s3", clock)
        self._breaker = CircuitBreaker(clock=clock)
        self._requests = S3Calls(
            settings.request_deadline_s, self._faults, self._breaker, clock=clock, sleep=sleep, jitter=jitter
        )
        self._calls = RunningCalls()
        self._counts_lock = Lock()
        self._num_blocks, self._used_bytes = 0, 0
        run = self._requests.run
        self._large = LargeObjects(self.objects, uploads, run, settings.threads, settings.part_bytes)
        self._blocks = S3Blocks(settings, self.objects, self._large, codec, run, self._faults, on_sent, clock)
        self.records = S3Records(settings, self.objects, self.run, self._faults, codec.keys)

    @property
    def kind(self) -> TierKind:
        return TierKind.S3

    @property
    def is_left_alone(self) -> bool:
        """Whether the bucket has answered so badly that it is only probed now and then."""
        return self._breaker.is_open

    @property
    def trouble(self) -> str:
        """What is wrong with the bucket and what to do about it, for people; empty where it answered last time."""
        fault = self._requests.last_fault
        return describe(fault, self._settings) if fault else ""

    def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """As `Tier.contains`; one HEAD per key."""
        return [self._answer(self._blocks.head, key) for key in keys]

    def read(self, blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> list[Outcome]:
        check_lengths(blocks, into)
        return [self._answer(self._blocks.get, meta, view) for meta, view in zip(blocks, into, strict=True)]

    def write(self, blocks: Sequence[BlockMeta], payloads: Sequence[memoryview]) -> list[Outcome]:
        """As `Tier.write`; never FULL."""
        check_lengths(blocks, payloads)
        return [self._answer(self._put, meta, payload) for meta, payload in zip(blocks, payloads, strict=True)]

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """As `Tier.delete`, but OK also for a block that was not there: S3 does not tell."""
        outcomes: list[Outcome] = []
        for start in range(0, len(keys), DELETE_AT_ONCE):
            batch = keys[start : start + DELETE_AT_ONCE]
            try:
                outcomes += self.run(partial(self._delete, batch))
            except TierUnavailable:
                outcomes += [Outcome.UNAVAILABLE] * len(batch)
        return outcomes

    def usage(self) -> Usage:
        """Counts what this process stored and deleted, not what others did in the same bucket. Bytes of deleted blocks
        are an estimate, since nobody is told how long they were."""
        with self._counts_lock:
            return Usage(self._num_blocks, self._used_bytes, None)

    def recover_batches(self) -> Iterator[RecoveredBatch]:
        """Yields nothing: see the module's text."""
        return iter(())

    def faults(self) -> dict[str, int]:
        """Return how often which fault was met since the start."""
        return self._faults.counts()

    def scrub(self, orders: Orders, parallel: int = 1) -> Iterator[Step]:
        """As `ScrubbedTier.scrub`; `parallel` objects are read at once."""
        return S3Scrub(
            self._settings, self.objects, self.run, self._codec, self.records, self.delete, orders, parallel
        ).steps()

    def run(self, action: Callable[[float, int], _T]) -> _T:
        """Return `action(deadline, attempt)`, which asks `objects` for one thing; within the deadline of one request,
        tried again, counted and refused as every request to this bucket is. Raises TierUnavailable."""
        with self._calls.enter() as is_open:
            if not is_open:
                raise TierUnavailable("the S3 tier is closed")
            return self._requests.run(action)

    def abort_unfinished_uploads(self, begun_before_s: float) -> int:
        """Free what uploads of blocks left behind that began before that time of the server's clock (seconds since
        1970) and whose process died; return how many. Raises TierUnavailable."""
        with self._calls.enter() as is_open:
            if not is_open:
                raise TierUnavailable("the S3 tier is closed")
            return self._large.abort_unfinished(self._settings.key("blocks/"), begun_before_s)

    def close(self) -> None:
        """Wait for running calls, then close all connections. Idempotent."""
        if self._calls.close(_CLOSE_WAIT_S):
            self._large.close()
            self.objects.close()
        else:
            _logger.error("s3 tier: calls still run after %.0f s; left open", _CLOSE_WAIT_S)

    # ------------------------------------------------------------ one block

    def _answer(self, action: Callable[..., Outcome], *arguments: object) -> Outcome:
        with self._calls.enter() as is_open:
            try:
                return action(*arguments) if is_open else Outcome.UNAVAILABLE
            except TierUnavailable:
                return Outcome.UNAVAILABLE

    def _put(self, meta: BlockMeta, payload: memoryview) -> Outcome:
        outcome, num_bytes = self._blocks.put(meta, payload)
        if outcome is Outcome.OK:
            with self._counts_lock:
                self._num_blocks += 1
                self._used_bytes += num_bytes
        return outcome

    def _delete(self, keys: Sequence[BlockKey], deadline: float, _attempt: int) -> list[Outcome]:
        refused = self.objects.delete([self._blocks.name(key) for key in keys], deadline)
        self._faults.count("delete_refused", len(refused))
        outcomes = [Outcome.UNAVAILABLE if self._blocks.name(key) in refused else Outcome.OK for key in keys]
        self._uncount_blocks(outcomes.count(Outcome.OK))
        return outcomes

    def _uncount_blocks(self, num_blocks: int) -> None:
        with self._counts_lock:
            left = max(0, self._num_blocks - num_blocks)
            self._used_bytes = self._used_bytes * left // max(1, self._num_blocks)
            self._num_blocks = left


def _open(settings: S3Settings, clock: Callable[[], float]) -> tuple[ObjectStore, BotoUploads]:
    if settings.client == "obstore":
        # Imported here, since the package is optional.
        from tiers.s3obstore import ObstoreObjects

        return ObstoreObjects(settings, clock), BotoUploads(partial(BotoObjects, settings, clock))
    objects = BotoObjects(settings, clock)
    return objects, BotoUploads(lambda: objects)
