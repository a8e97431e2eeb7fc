"""Writes a trace to a file that never grows beyond a size, on a thread of its own that only waits for the disk.

    FILE ──full──► FILE.1 ──► FILE.2 ──► … ──► gone

What comes faster than the disk takes it is dropped and counted. A fault of the disk ends the recording, not the daemon.
"""

import asyncio
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import aiofiles
from aiofiles.threadpool.binary import AsyncBufferedIOBase

from kvstore.core.errors import ConfigError

_log = logging.getLogger(__name__)
MAX_FILE_BYTES = 64 << 20
NUM_FILES = 4
_MAX_WAITING = 4096
_STOP_S = 5.0
_LOOK_EVERY_S = 0.5

_Line = tuple[bytes, bool]


def check_record(path: Path) -> None:
    """Raises ConfigError where nothing could be recorded to `path`, and leaves all as it is."""
    reason = ""
    if path.is_dir():
        reason = "it is a folder"
    elif not path.parent.is_dir():
        reason = f"there is no folder {path.parent}"
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        reason = f"{path.parent} cannot be written to"
    if reason:
        raise ConfigError(f"cannot record to {path}: {reason}; choose another file")


class RecordFile:
    """`on_full` is called on the caller's thread, by `write`. Close it once; idempotent."""

    def __init__(self, path: Path, max_file_bytes: int = MAX_FILE_BYTES, num_files: int = NUM_FILES) -> None:
        """Raises ConfigError where nothing can be written there. A file that is there is kept as FILE.1."""
        self._path = path
        self._max_file_bytes = max_file_bytes
        self._num_files = num_files
        self._bytes = 0
        self._begins_file = False
        self._is_closing = False
        self._waiting: queue.Queue[_Line | None] = queue.Queue(_MAX_WAITING)
        self.dropped = 0
        self.on_full: Callable[[], None] = lambda: None
        try:
            if path.exists():
                self._rotate()
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        except OSError as error:
            raise ConfigError(f"cannot record to {path}: {error.strerror}; choose another file") from None
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    def write(self, line: bytes, begins_file: bool) -> None:
        """Queue a line; never blocks."""
        try:
            self._waiting.put_nowait((line, begins_file))
        except queue.Full:
            self.dropped += 1
            return
        self._bytes = len(line) + (0 if begins_file else self._bytes)
        if self._bytes >= self._max_file_bytes:
            self.on_full()

    def close(self) -> None:
        self._is_closing = True
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait(None)
            self._thread.join(_STOP_S)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except OSError as error:
            _log.warning("the trace is recorded no more: %s", error.strerror)

    async def _serve(self) -> None:
        line = await self._next()
        while line is not None:
            async with aiofiles.open(self._path, "ab") as file:
                line = await self._fill(file, line)
            if line is not None:
                self._rotate()
                os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))

    async def _fill(self, file: AsyncBufferedIOBase, first: bytes) -> bytes | None:
        """Write this line and those that follow; return the first line of the next file, or None at the end."""
        await file.write(first)
        while True:
            if self._waiting.empty():
                await file.flush()
            line = await self._next()
            if line is None or self._begins_file:
                return line
            await file.write(line)

    async def _next(self) -> bytes | None:
        """Wait for a line; None where there will be none. `_begins_file`: whether it is another file's first."""
        while True:
            try:
                line = await asyncio.to_thread(self._waiting.get, timeout=_LOOK_EVERY_S)
            except queue.Empty:
                if self._is_closing:
                    return None
                continue
            if line is None:
                return None
            self._begins_file = line[1]
            return line[0]

    def _rotate(self) -> None:
        for number in range(self._num_files - 1, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            newer = self._path if number == 1 else self._path.with_name(f"{self._path.name}.{number - 1}")
            if newer.exists():
                newer.replace(older)
