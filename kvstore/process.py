"""Ties a helper process to the one that started it, so that a killed daemon leaves nothing running."""

import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


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
