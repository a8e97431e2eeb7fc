"""The S3 tier: one object per block, header and payload, in a bucket that several daemons may share.

    {prefix}/blocks/{first two hex digits of the key}/{key in hex}
    {prefix}/records/...    session records (`tiers/s3records.py`)

A PUT is conditional (If-None-Match), so that two daemons do not replace each other's copy. A GET goes straight into
its place, stops at its deadline, and is verified; an object that is not the block is deleted, counted, and can be
stored again. A bucket that is missing, forbidden or silent answers UNAVAILABLE, and after some of that it is left
alone for a while (`tiers/s3calls.py`), so that it slows nobody down.

What a bucket holds is found through the session records in it, not by listing: a listing says nothing of parents and
namespaces, and of a bucket of millions of objects it takes minutes. So `recover_batches` yields nothing.
"""

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from kvstore.core.block import HEADER_BYTES, RAW, BlockMeta, decode_header
from kvstore.core.errors import CorruptBlock, TierUnavailable, WrongKey
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome, TierKind
from tiers.base import RecoveredBatch, Usage
from tiers.batch import check_lengths
from tiers.breaker import CircuitBreaker
from tiers.calls import RunningCalls
from tiers.codec import PLAIN, Codec
from tiers.faults import FaultCounter
from tiers.s3body import Traffic
from tiers.s3calls import S3Calls, error_code
from tiers.s3client import S3Settings, make_client
from tiers.s3records import S3Records

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

__all__ = ["S3Settings", "S3Tier"]

_T = TypeVar("_T")
# S3's limit for one DeleteObjects.
_DELETE_AT_ONCE = 1000
_CLOSE_WAIT_S = 30.0
_logger = logging.getLogger("kvstore.tiers.s3")


class S3Tier:
    """Implements `tiers.base.Tier`. Thread-safe; a batch goes one block after the other, so that the caller decides
    how many requests run at once by how many threads it calls from.

    `records` is a RecordStore in the same bucket.
    """

    def __init__(
        self,
        settings: S3Settings,
        *,
        client: "S3Client | None" = None,
        codec: Codec = PLAIN,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        jitter: random.Random | None = None,
    ) -> None:
        """Contacts nobody. Closes `client` (default: one made from the settings) at the end.

        Raises ConfigError where a key file cannot be read.
        """
        self._settings = settings
        self._codec = codec
        self._client = make_client(settings) if client is None else client
        self._traffic = Traffic(settings.request_deadline_s, clock)
        self._faults = FaultCounter("s3", clock)
        self._breaker = CircuitBreaker(clock=clock)
        self._requests = S3Calls(
            settings.request_deadline_s, self._faults, self._breaker, clock=clock, sleep=sleep, jitter=jitter
        )
        self._calls = RunningCalls()
        self._counts_lock = Lock()
        self._num_blocks, self._used_bytes = 0, 0
        # A HEAD that finds nothing does not say whether there is a bucket at all.
        self._has_seen_bucket = False
        self.records = S3Records(settings, self._client, self._run, self._traffic, self._faults)

    @property
    def kind(self) -> TierKind:
        return TierKind.S3

    @property
    def is_left_alone(self) -> bool:
        """Whether the bucket has answered so badly that it is only probed now and then."""
        return self._breaker.is_open

    def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """As `Tier.contains`; one HEAD per key."""
        return [self._answer(self._head, key) for key in keys]

    def read(self, blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> list[Outcome]:
        check_lengths(blocks, into)
        return [self._answer(self._get, meta, view) for meta, view in zip(blocks, into, strict=True)]

    def write(self, blocks: Sequence[BlockMeta], payloads: Sequence[memoryview]) -> list[Outcome]:
        """As `Tier.write`; never FULL."""
        check_lengths(blocks, payloads)
        return [self._answer(self._put, meta, payload) for meta, payload in zip(blocks, payloads, strict=True)]

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """As `Tier.delete`, but OK also for a block that was not there: S3 does not tell."""
        outcomes: list[Outcome] = []
        for start in range(0, len(keys), _DELETE_AT_ONCE):
            batch = keys[start : start + _DELETE_AT_ONCE]
            try:
                outcomes += self._run(partial(self._delete, batch))
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

    def close(self) -> None:
        """Wait for running calls, then close all connections. Idempotent."""
        if self._calls.close(_CLOSE_WAIT_S):
            self._client.close()
        else:
            _logger.error("s3 tier: calls still run after %.0f s; left open", _CLOSE_WAIT_S)

    # ------------------------------------------------------------ one block

    def _answer(self, action: Callable[..., Outcome], *arguments: object) -> Outcome:
        try:
            return self._run(partial(action, *arguments))
        except TierUnavailable:
            return Outcome.UNAVAILABLE

    def _run(self, action: Callable[[float, int], _T]) -> _T:
        with self._calls.enter() as is_open:
            if not is_open:
                raise TierUnavailable("the S3 tier is closed")
            return self._requests.run(action)

    def _head(self, key: BlockKey, _deadline: float, _attempt: int) -> Outcome:
        try:
            self._client.head_object(Bucket=self._settings.bucket, Key=self._name(key))
        except ClientError as error:
            if error_code(error) not in ("404", "NoSuchKey", "NotFound"):
                raise
            if not self._has_seen_bucket:
                self._look_for_bucket()
            return Outcome.MISS
        self._has_seen_bucket = True
        return Outcome.OK

    def _look_for_bucket(self) -> None:
        try:
            self._client.head_bucket(Bucket=self._settings.bucket)
        except ClientError as error:
            if error_code(error) in ("404", "NotFound"):
                error.response["Error"]["Code"] = "NoSuchBucket"
            raise
        self._has_seen_bucket = True

    def _get(self, meta: BlockMeta, view: memoryview, deadline: float, _attempt: int) -> Outcome:
        try:
            response = self._client.get_object(Bucket=self._settings.bucket, Key=self._name(meta.key))
        except ClientError as error:
            if error_code(error) != "NoSuchKey":
                self._has_seen_bucket = False
                raise
            return Outcome.MISS
        try:
            self._receive(meta, response, view, deadline)
        except CorruptBlock as error:
            self._faults.count("corrupt", detail=f"block {meta.key.hex()[:12]}: {error}")
            self._quarantine(meta.key)
            return Outcome.CORRUPT
        except WrongKey as error:
            # It stays: a start with the wrong key must not empty the bucket.
            self._faults.count("wrong_key", detail=f"block {meta.key.hex()[:12]}: {error}")
            return Outcome.MISS
        return Outcome.OK

    def _receive(self, meta: BlockMeta, response: Any, view: memoryview, deadline: float) -> None:
        """Bring the payload into `view`, received there directly where it is stored as it is."""
        header = memoryview(bytearray(HEADER_BYTES))
        stored = view

        def places() -> Iterator[memoryview]:
            nonlocal stored
            yield header
            # The header says how much follows, and what it is.
            found = decode_header(header)
            if found.meta != meta:
                raise CorruptBlock("the object holds another block")
            expected_bytes = HEADER_BYTES + found.stored_bytes
            # A server, or a proxy in between, need not state a length.
            found_bytes = response.get("ContentLength", expected_bytes)
            if found_bytes != expected_bytes:
                raise CorruptBlock(f"the object has {found_bytes} bytes, expected {expected_bytes}")
            if found.codec != RAW:
                stored = memoryview(bytearray(found.stored_bytes))
            yield stored

        if response.get("ContentLength", HEADER_BYTES) < HEADER_BYTES:
            response["Body"].close()
            raise CorruptBlock("the object is shorter than a header")
        self._traffic.receive(response["Body"], places(), deadline)
        self._codec.open(meta, header, stored, view)

    def _quarantine(self, key: BlockKey) -> None:
        """Delete a damaged copy. Where that is refused (credentials that may only read) or fails, it stays, and answers
        CORRUPT to the next reader: no reason to take the whole bucket for sick."""
        try:
            self._client.delete_object(Bucket=self._settings.bucket, Key=self._name(key))
        except (BotoCoreError, ClientError):
            self._faults.count("delete_refused", detail=f"the damaged block {key.hex()[:12]} stays in the bucket")

    def _put(self, meta: BlockMeta, payload: memoryview, deadline: float, _attempt: int) -> Outcome:
        # Joined, since boto3 takes no pieces.
        body = b"".join(self._codec.seal(meta, payload))
        try:
            self._client.put_object(
                Bucket=self._settings.bucket,
                Key=self._name(meta.key),
                Body=self._traffic.body(body, deadline),
                IfNoneMatch="*",
                **self._settings.write_options(),
            )
        except ClientError as error:
            if error_code(error) not in ("412", "PreconditionFailed"):
                raise
            return Outcome.EXISTS
        with self._counts_lock:
            self._num_blocks += 1
            self._used_bytes += len(body)
        return Outcome.OK

    def _delete(self, keys: Sequence[BlockKey], _deadline: float, _attempt: int) -> list[Outcome]:
        response = self._client.delete_objects(
            Bucket=self._settings.bucket,
            Delete={"Objects": [{"Key": self._name(key)} for key in keys], "Quiet": True},
        )
        refused = {error.get("Key") for error in response.get("Errors", []) if error.get("Code") != "NoSuchKey"}
        self._faults.count("delete_refused", len(refused))
        outcomes = [Outcome.UNAVAILABLE if self._name(key) in refused else Outcome.OK for key in keys]
        self._uncount_blocks(outcomes.count(Outcome.OK))
        return outcomes

    def _name(self, key: BlockKey) -> str:
        # Two hex digits of a hash first, so that requests spread over S3's partitions.
        text = key.hex()
        return self._settings.key(f"blocks/{text[:2]}/{text}")

    def _uncount_blocks(self, num_blocks: int) -> None:
        with self._counts_lock:
            left = max(0, self._num_blocks - num_blocks)
            self._used_bytes = self._used_bytes * left // max(1, self._num_blocks)
            self._num_blocks = left
