"""An exclusive lock on a folder, held for the life of a process."""

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from kvstore.core.errors import ConfigError

_RETRY_S = 0.05


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
        self._descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        deadline = clock() + wait_s
        while not self._try_lock():
            if clock() >= deadline:
                holder = os.pread(self._descriptor, 200, 0).decode(errors="replace").strip()
                self.release()
                raise ConfigError(f"{folder} is in use by {holder or 'another process'}; stop it or use another folder")
            sleep(_RETRY_S)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)

    def release(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
