"""Starts and kills the demo's processes: daemons and engines, each as a user would start it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from kvstore.client import Client
from kvstore.core.errors import KVStoreError, TierUnavailable

_START_DEADLINE_S = 180.0
_LOOK_EVERY_S = 0.05


@dataclass(slots=True)
class Daemon:
    """`kvstore serve` in a run folder of its own; `environment` is its configuration."""

    run_dir: Path
    log: Path
    environment: Mapping[str, str]
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Return once it answers. Raises TierUnavailable where it ends instead."""
        variables = {key: value for key, value in os.environ.items() if not key.startswith("KVSTORE_")}
        variables |= {**self.environment, "KVSTORE_DAEMON_RUN_DIR": str(self.run_dir)}
        self._process = _start(["kvstore", "serve"], self.log, variables)
        with contextlib.closing(self.console()) as console:
            _wait(self._process, lambda: _answers(console), self.log)

    def console(self) -> Client:
        """A client that asks and orders; the caller closes it."""
        return Client(self.run_dir, name="demo", deadline_s=5.0)

    def kill(self) -> None:
        """SIGKILL: it writes nothing down any more."""
        _end(self._process, signal.SIGKILL)
        self._process = None

    def stop(self) -> None:
        _end(self._process, signal.SIGTERM)
        self._process = None


@dataclass(slots=True)
class EngineProcess:
    """The reference engine as a server on a free port; `arguments` are its command line."""

    arguments: list[str]
    log: Path
    url: str = field(default="", init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Return once it serves. Raises TierUnavailable where it ends instead."""
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        # What engines of other runs measured here, over other links, would decide its first plans.
        options = ["--port", str(port), "--profile-dir", str(self.log.with_suffix(".costs"))]
        self._process = _start(["engine.server", *options, *self.arguments], self.log, os.environ)
        _wait(self._process, self._is_ready, self.log)

    def kill(self) -> None:
        _end(self._process, signal.SIGKILL)
        self._process = None

    def stop(self) -> None:
        _end(self._process, signal.SIGTERM)
        self._process = None

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False


def _start(module: list[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", *module],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def _wait(process: subprocess.Popen[bytes], is_ready: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + _START_DEADLINE_S
    while not is_ready():
        if process.poll() is not None or time.monotonic() > deadline:
            _end(process, signal.SIGKILL)
            tail = log.read_text(errors="replace").splitlines()[-15:]
            raise TierUnavailable(f"a process of the demo did not start; the end of {log}:\n" + "\n".join(tail))
        time.sleep(_LOOK_EVERY_S)


def _end(process: subprocess.Popen[bytes] | None, number: signal.Signals) -> None:
    if process is None:
        return
    process.send_signal(number)
    try:
        process.wait(timeout=30.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    # Nobody else on this machine asks for ports one after the other, so it is still free a moment later.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(console: Client) -> bool:
    try:
        console.ping()
    except KVStoreError:
        return False
    return True
