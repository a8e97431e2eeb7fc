"""The daemon's end of the HTTP API's process: start it, start it again when it dies, stop it."""

import contextlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from kvstore.config import Config
from kvstore.worker.encryption import without_key

_log = logging.getLogger(__name__)
_RESTART_AFTER_S = (1.0, 5.0, 30.0)
_STOP_DEADLINE_S = 5.0
_BAD_SETTINGS = 2


class HttpProcess:
    """Owned by the daemon's main thread."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._settings = {
            "run_dir": str(run_dir),
            "http": config.http,
            "log_level": config.daemon.log_level,
            "parent": os.getpid(),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths = 0
        self._start_at = 0.0

    def start(self) -> None:
        # -P: with -m alone Python would import from the current folder first, and anybody may have put files there.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvstore.api"], stdin=subprocess.PIPE, env=without_key(os.environ)
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(msgspec.json.encode(self._settings))

    def supervise(self, now: float) -> None:
        """Start the process again if it died, less and less often; never blocks."""
        if self._process is None:
            if self._start_at and now >= self._start_at:
                self.start()
            return
        status = self._process.poll()
        if status is None:
            return
        self._process = None
        if status == _BAD_SETTINGS:
            _log.error("the HTTP API cannot start with these settings; the daemon goes on without it")
            self._start_at = 0.0
            return
        delay = _RESTART_AFTER_S[min(self._deaths, len(_RESTART_AFTER_S) - 1)]
        self._deaths += 1
        self._start_at = now + delay
        _log.warning("the HTTP API ended with status %d; another starts in %.0f s", status, delay)

    def stop(self) -> None:
        """Idempotent."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=_STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
