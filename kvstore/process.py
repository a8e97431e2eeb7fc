"""How the daemon's processes go together: helpers end with it, and stand back for its control thread."""

import contextlib
import ctypes
import gc
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
# Who wakes with a lower number runs at once where every core is busy: the control thread, beside uploads and HTTP.
_CONTROL_NICE: Final = -10
WORKER_NICE: Final = 5
HTTP_NICE: Final = 10
# What is made and not freed before the garbage collector looks at the young, and how often it looks at the older.
_GC_THRESHOLDS: Final = (5_000, 20, 100)


def end_with_parent(parent: int, by: signal.Signals) -> None:
    """Have the kernel send `by` to this process once its parent ends; ends it now if `parent` is no longer its parent.

    The kernel watches the thread that started this process, so that must have been one that lives as long as the
    parent (its main thread).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def go_first() -> None:
    """Have this thread, and those it starts, get a core as soon as they wake, where the system allows that.

    For the control thread, which needs little of it but at once. A priority that somebody chose for us is left alone.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) == 0:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, _CONTROL_NICE)


def stand_back(nice: int) -> None:
    """Have this process leave the core to the control thread and to the engine, while they want it. Before threads
    are started."""
    if os.getpriority(os.PRIO_PROCESS, 0) < nice:
        os.setpriority(os.PRIO_PROCESS, 0, nice)


def keep_pauses_short() -> None:
    """Have the garbage collector pass over all that is there now, which stays, and look at the rest less often.

    Each full collection walked over the objects of all modules and stopped the control thread for 30 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
