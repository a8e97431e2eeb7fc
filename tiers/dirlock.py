"""A folder of one's own, and an exclusive lock on it, held for the life of a process."""

import contextlib
import fcntl
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from kvstore.core.errors import ConfigError

_RETRY_S = 0.05
# A predecessor that ends is mostly gone by then.
_SILENT_S = 1.0
_LOCK_NAME = "lock"
_logger = logging.getLogger("kvstore.tiers.dirlock")


def own_folder(path: Path) -> None:
    """Make the folder, or close the one that is there to all others (mode 0700).

    Raises ConfigError where something else lives in it, such as /tmp, or it belongs to another user.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        names = {entry.name for entry in path.iterdir()} - {"lost+found"}
        if names and _LOCK_NAME not in names:
            raise ConfigError(f"{path} holds other things ({min(names)} …); name a folder below it, which is made")
        path.chmod(0o700)
    except PermissionError:
        raise ConfigError(f"{path} belongs to another user; name a folder below it, which is made") from None


class FolderLock:
    """An flock on the file `lock` in the folder; the kernel drops it when the last process that holds it is gone."""

    def __init__(
        self,
        folder: Path,
        *,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Take the lock, waiting up to `wait_s`: a killed predecessor may take a moment to be gone.

        Raises ConfigError, naming the holder, where it is held beyond that.
        """
        self._descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        told_at = clock() + _SILENT_S
        deadline = clock() + wait_s
        while not self._try_lock():
            if clock() >= deadline:
                holder = self._holder()
                self.release()
                raise ConfigError(f"{folder} is in use by {holder}; stop it or use another folder")
            if clock() >= told_at:
                told_at = math.inf
                _logger.warning("%s is in use by %s; waiting up to %.0f s for its end", folder, self._holder(), wait_s)
            sleep(_RETRY_S)
        # A word for whoever is refused; on a full disk they go without.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)

    def release(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _holder(self) -> str:
        return os.pread(self._descriptor, 200, 0).decode(errors="replace").strip() or "another process"

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
