"""Lets a tier close only when no call is running, and refuse calls after that."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class RunningCalls:
    """Counts calls that are running. Thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._num_running = 0
        self._is_closed = False

    @contextlib.contextmanager
    def enter(self) -> Iterator[bool]:
        """Yield whether the tier is open; while inside, it stays so."""
        with self._condition:
            is_open = not self._is_closed
            self._num_running += is_open
        try:
            yield is_open
        finally:
            if is_open:
                with self._condition:
                    self._num_running -= 1
                    self._condition.notify_all()

    def close(self, wait_s: float, clock: Callable[[], float] = time.monotonic) -> bool:
        """Refuse new calls and wait for the running ones; return whether all have ended."""
        deadline = clock() + wait_s
        with self._condition:
            self._is_closed = True
            while self._num_running:
                left_s = deadline - clock()
                if left_s <= 0:
                    return False
                self._condition.wait(left_s)
        return True
