"""A circuit breaker: stops asking what does not answer, and asks again after a while.

    CLOSED --faults in a row--> OPEN --after a while--> HALF OPEN (one call asks) --it answers--> CLOSED
                                 ^------------------------------|it fails: wait twice as long

After Nygard, Release It! (2007).
"""

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Thread-safe. Every call that `admits` must be followed by `succeeded` or `failed`."""

    def __init__(
        self,
        *,
        faults_to_open: int = 5,
        first_wait_s: float = 2.0,
        longest_wait_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._faults_to_open = faults_to_open
        self._first_wait_s = first_wait_s
        self._longest_wait_s = longest_wait_s
        self._clock = clock
        self._lock = threading.Lock()
        self._faults_in_row = 0
        self._wait_s = first_wait_s
        self._opened_at: float | None = None
        self._is_probing = False

    @property
    def is_open(self) -> bool:
        """Whether calls are refused, but for a probe now and then."""
        with self._lock:
            return self._opened_at is not None

    def admits(self) -> bool:
        """Return whether a call may be made now; while open, only one probe at a time may, after the wait."""
        with self._lock:
            if self._opened_at is None:
                return True
            if self._is_probing or self._clock() - self._opened_at < self._wait_s:
                return False
            self._is_probing = True
            return True

    def succeeded(self) -> bool:
        """The other side answered; return whether that closed the breaker."""
        with self._lock:
            was_open = self._opened_at is not None
            self._faults_in_row = 0
            self._opened_at, self._is_probing = None, False
            self._wait_s = self._first_wait_s
            return was_open

    def failed(self) -> bool:
        """The other side did not answer; return whether that opened the breaker."""
        with self._lock:
            self._faults_in_row += 1
            if self._opened_at is not None:
                if self._is_probing:
                    self._is_probing = False
                    self._opened_at = self._clock()
                    self._wait_s = min(2 * self._wait_s, self._longest_wait_s)
                return False
            if self._faults_in_row < self._faults_to_open:
                return False
            self._opened_at = self._clock()
            return True
