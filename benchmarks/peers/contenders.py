"""Who takes part in the comparison, and the process of each."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from environments import HERE, python_of
from worker import Task


@dataclass(frozen=True)
class Entry:
    """`column` is whose figures these are: where several entries of a column do an operation, the fastest counts."""

    column: str
    name: str
    script: str
    environment: str = ""
    arguments: Sequence[str] = ()


CEILING, OURS = "ceiling", "kvstore"
ENTRIES = (
    Entry(CEILING, "ceiling, buffered", "ceiling.py"),
    Entry(CEILING, "ceiling, direct", "ceiling.py", arguments=["direct"]),
    Entry(OURS, "kvstore", "ours.py"),
    Entry("lmcache", "storage manager", "lmcache_core.py", "lmcache"),
    Entry("lmcache", "fs", "lmcache_core.py", "lmcache", ["fs"]),
    Entry("lmcache", "fs, direct", "lmcache_core.py", "lmcache", ["fs", "direct"]),
    Entry("lmcache", "fs_native", "lmcache_core.py", "lmcache", ["fs_native"]),
    Entry("lmcache", "fs_native, direct", "lmcache_core.py", "lmcache", ["fs_native", "direct"]),
    Entry("lmcache", "daemon", "lmcache_daemon.py", "lmcache"),
    Entry("redis", "redis", "redis_server.py", "redis"),
    Entry("files", "files", "plain_files.py"),
)


@dataclass
class Running:
    """The process of one entry, which does what it is asked, one thing at a time."""

    entry: Entry
    folder: Path
    shm_dir: Path
    about: str = ""
    ops: frozenset[str] = frozenset()
    _process: "subprocess.Popen[str] | None" = field(default=None, repr=False)

    def start(self, task: dict[str, Any]) -> None:
        """Return once it is ready. Raises RuntimeError, with the end of its log, where it is not."""
        self.folder.mkdir(parents=True)
        self.shm_dir.mkdir(parents=True)
        python = python_of(self.entry.environment)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, HERE / self.entry.script, *self.entry.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # A group of its own, with everything it starts, so that all of it can be held.
                start_new_session=True,
            )
        whole = Task(**task, folder=str(self.folder), shm_dir=str(self.shm_dir))
        ready = self._ask(asdict(whole))
        self.about, self.ops = ready["about"], frozenset(ready["ops"])

    def run(self, op: str, number: int, times: int = 1, pause_s: float = 0.0) -> list[float]:
        """Return the seconds of the operation, each time after a pause. Raises RuntimeError where it failed."""
        answer = self._ask({"op": op, "round": number, "times": times, "pause_s": pause_s})
        if "error" in answer:
            raise RuntimeError(f"{self.entry.name}, {op}: {answer['error']}\n{self._tail()}")
        return [float(taken_s) for taken_s in answer["seconds"]]

    def hold(self) -> None:
        """Stop it and all that it has started, until `go_on`: what a peer does in the background is its own cost and
        nobody else's."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Idempotent."""
        if self._process is None:
            return
        self.go_on()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            print(f"{self.entry.name} did not end by itself", file=sys.stderr)
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._process = None

    @property
    def _log(self) -> Path:
        return self.folder.with_suffix(".log")

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"{self.entry.name} ended:\n{self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
