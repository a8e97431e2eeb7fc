"""Makes requests to a bucket within a deadline: retries with jitter, counts faults, and leaves a sick bucket alone.

Covers: what is a fault and whether trying again may help. Does not cover: what is asked (`tiers/s3.py`,
`tiers/s3records.py`); answers that are expected, such as a missing key, are the action's to turn into a value.
"""

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

import urllib3.exceptions
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    ConnectTimeoutError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
)

from kvstore.core.errors import TierUnavailable
from tiers.breaker import CircuitBreaker
from tiers.faults import FaultCounter

_T = TypeVar("_T")
_logger = logging.getLogger("kvstore.tiers.s3")
_MAX_ATTEMPTS = 3
_FIRST_PAUSE_S = 0.05
# Faults that another try a moment later may not meet.
_PASSING = frozenset({"timeout", "connection", "throttled", "server_error", "conflict"})
_KINDS = {
    "NoSuchBucket": "no_bucket",
    "AccessDenied": "forbidden",
    "InvalidAccessKeyId": "forbidden",
    "SignatureDoesNotMatch": "forbidden",
    "ExpiredToken": "forbidden",
    "SlowDown": "throttled",
    "ConditionalRequestConflict": "conflict",
    "OperationAborted": "conflict",
}


class DeadlinePassed(Exception):
    """The action saw its deadline pass in the middle of a body."""


class S3Calls:
    """Runs actions against one bucket. Thread-safe."""

    def __init__(
        self,
        deadline_s: float,
        faults: FaultCounter,
        breaker: CircuitBreaker,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        jitter: random.Random | None = None,
    ) -> None:
        self._deadline_s = deadline_s
        self._faults = faults
        self._breaker = breaker
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter or random.Random()

    def run(self, action: Callable[[float, int], _T]) -> _T:
        """Return `action(deadline, attempt)`, tried again while that may help and time is left.

        The action makes one request, stops with DeadlinePassed at `deadline`, and returns for every expected answer.
        Raises TierUnavailable for any other: counted by kind, or at once where the bucket is known to be sick.
        """
        if not self._breaker.admits():
            raise TierUnavailable("the bucket has not answered lately and is left alone for a while")
        deadline = self._clock() + self._deadline_s
        for attempt in range(_MAX_ATTEMPTS):
            try:
                answer = action(deadline, attempt)
            except (BotoCoreError, ClientError, urllib3.exceptions.HTTPError, OSError, DeadlinePassed) as error:
                kind = fault_kind(error)
                pause_s = _FIRST_PAUSE_S * 4**attempt * self._jitter.uniform(0.5, 1.5)
                is_last = attempt == _MAX_ATTEMPTS - 1 or self._clock() + pause_s >= deadline
                if kind not in _PASSING or is_last:
                    self._failed(kind, error)
                    raise TierUnavailable(f"the bucket does not answer ({kind})") from error
                self._sleep(pause_s)
            except BaseException:
                # A fault of ours, which says nothing of the bucket; but the probe must not stay taken.
                self._breaker.failed()
                raise
            else:
                if self._breaker.succeeded():
                    _logger.info("s3 tier: the bucket answers again")
                return answer
        raise AssertionError("the last attempt returns or raises")

    def _failed(self, kind: str, error: Exception) -> None:
        # Not the server's own words: some repeat the key they were sent.
        code = error_code(error) if isinstance(error, ClientError) else ""
        self._faults.count(kind, detail=f"{type(error).__name__} {code}")
        if self._breaker.failed():
            _logger.warning("s3 tier: too many faults in a row, the bucket is left alone for a while")


def error_code(error: ClientError) -> str:
    """Return S3's own name for the error, such as NoSuchKey; a bare status for an answer without a body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def fault_kind(error: Exception) -> str:
    """Return the word under which a fault is counted."""
    if isinstance(error, ClientError):
        kind = _KINDS.get(error_code(error))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if kind is None:
            kind = {403: "forbidden", 409: "conflict", 429: "throttled", 503: "throttled"}.get(status)
        return kind or ("server_error" if status >= 500 else "refused")
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return "credentials"
    if isinstance(error, HTTPClientError) and isinstance(error.kwargs.get("error"), DeadlinePassed):
        return "timeout"
    if isinstance(
        error,
        ConnectTimeoutError | ReadTimeoutError | urllib3.exceptions.TimeoutError | TimeoutError | DeadlinePassed,
    ):
        return "timeout"
    if isinstance(
        error,
        ConnectionError | HTTPClientError | IncompleteReadError | urllib3.exceptions.HTTPError | OSError,
    ):
        return "connection"
    return "refused"
