"""On which CPU this thread runs at the moment."""

import ctypes
from collections.abc import Callable


def _sched_getcpu() -> Callable[[], int]:
    libc = ctypes.CDLL(None)
    # Not there on every system that Python runs on.
    return libc.sched_getcpu if hasattr(libc, "sched_getcpu") else lambda: -1


current_cpu: Callable[[], int] = _sched_getcpu()
"""Returns its number, -1 where the system does not say."""
