"""Waiting for what other threads and processes do: by asking again and again, with an end."""

import time
from collections.abc import Callable
from typing import TypeVar

from kvstore.core.errors import TierUnavailable

_T = TypeVar("_T")
# For what happens at once where nobody else wants the cores. Only a test that fails waits so long.
PATIENCE_S = 60.0


def until(condition: Callable[[], _T], deadline_s: float = PATIENCE_S) -> _T:
    """Return what `condition` returns once that is true; a daemon that does not answer counts as not yet.

    What is waited for must stay true, or come again and again: a busy machine may look only once a second.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            if value := condition():
                return value
        except TierUnavailable:
            pass
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
