"""Makes requests to a bucket within a deadline: retries with jitter, counts faults, and leaves a sick bucket alone.

Covers: whether trying again may help. Does not cover: what is asked (`tiers/s3.py`, `tiers/s3records.py`), and what is
a fault (`tiers/objects.py`).
"""

import logging
import random
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from kvstore.core.errors import CorruptBlock, TierUnavailable
from tiers.breaker import CircuitBreaker
from tiers.faults import FaultCounter
from tiers.objects import PASSING, ObjectFault

_T = TypeVar("_T")
_logger = logging.getLogger("kvstore.tiers.s3")
_MAX_ATTEMPTS = 3
_FIRST_PAUSE_S = 0.05


class Runner(Protocol):
    """Makes one request as `S3Calls.run` does."""

    def __call__(self, action: Callable[[float, int], _T]) -> _T: ...


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
        self._last_fault = ""

    @property
    def last_fault(self) -> str:
        """The kind of fault that the last request ended with; empty where the bucket answered it."""
        return self._last_fault

    def run(self, action: Callable[[float, int], _T]) -> _T:
        """Return `action(deadline, attempt)`, tried again while that may help and time is left.

        The action makes one request that ends by `deadline`. Raises TierUnavailable where it meets an ObjectFault to
        the end, which is counted, and at once where the bucket is known to be sick.
        """
        if not self._breaker.admits():
            raise TierUnavailable("the bucket has not answered lately and is left alone for a while")
        deadline = self._clock() + self._deadline_s
        for attempt in range(_MAX_ATTEMPTS):
            try:
                answer = action(deadline, attempt)
            except ObjectFault as fault:
                pause_s = _FIRST_PAUSE_S * 4**attempt * self._jitter.uniform(0.5, 1.5)
                is_last = attempt == _MAX_ATTEMPTS - 1 or self._clock() + pause_s >= deadline
                if fault.kind not in PASSING or is_last:
                    self._failed(fault)
                    raise TierUnavailable(f"the bucket does not answer ({fault.kind})") from fault
                self._sleep(pause_s)
            except CorruptBlock:
                # The bucket answered, if with something else.
                self._last_fault = ""
                self._breaker.succeeded()
                raise
            except BaseException:
                # A fault of ours, which says nothing of the bucket; but the probe must not stay taken.
                self._breaker.failed()
                raise
            else:
                self._last_fault = ""
                if self._breaker.succeeded():
                    _logger.info("s3 tier: the bucket answers again")
                return answer
        raise AssertionError("the last attempt returns or raises")

    def _failed(self, fault: ObjectFault) -> None:
        self._last_fault = fault.kind
        self._faults.count(fault.kind, detail=fault.detail)
        if self._breaker.failed():
            _logger.warning("s3 tier: too many faults in a row, the bucket is left alone for a while")
