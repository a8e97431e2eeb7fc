"""On which CPU this thread runs at the moment."""

import ctypes
from collections.abc import Callable


def getter(libc: object) -> Callable[[], int]:
    """Return the C library's function, or one that does not know: not every system has it."""
    return getattr(libc, "sched_getcpu", lambda: -1)


# Keeps the interpreter lock: to get it back from a thread that computes would take milliseconds.
current_cpu: Callable[[], int] = getter(ctypes.PyDLL(None))
"""Returns its number, -1 where the system does not say."""
