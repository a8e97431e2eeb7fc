"""Counts faults by kind and logs them without flooding the log."""

import logging
import threading
import time
from collections.abc import Callable

_LOG_INTERVAL_S = 10.0


class FaultCounter:
    """One tier's faults since it was opened. Thread-safe."""

    def __init__(self, tier: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._tier = tier
        self._clock = clock
        self._logger = logging.getLogger(f"kvstore.tiers.{tier}")
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._logged_at: dict[str, float] = {}

    def count(self, kind: str, number: int = 1, detail: object = "") -> None:
        """Add to `kind`, and log a warning unless that kind was logged a moment ago.

        `detail` is for people and must hold no secret.
        """
        if number == 0:
            return
        with self._lock:
            self._counts[kind] = total = self._counts.get(kind, 0) + number
            now = self._clock()
            if now - self._logged_at.get(kind, -_LOG_INTERVAL_S) < _LOG_INTERVAL_S:
                return
            self._logged_at[kind] = now
        self._logger.warning("%s tier: %s (%d so far) %s", self._tier, kind, total, detail)

    def counts(self) -> dict[str, int]:
        """Return how often each kind was met."""
        with self._lock:
            return dict(self._counts)
