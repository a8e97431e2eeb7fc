"""Real daemon processes in a folder of their own, and what engines do with them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstore.client import Client
from kvstore.core.errors import KVStoreError
from kvstore.core.key import BlockKey, Namespace
from kvstore.core.outcome import Outcome, TierKind
from tests.support.chats import namespace as small_namespace
from tests.support.chats import parents, payload
from tests.support.waiting import PATIENCE_S, until


class DaemonProcess:
    """A daemon that can be started again and again in the same folders. `settings`: as in `ram_size="8MiB"`."""

    def __init__(self, folder: Path, settings: Mapping[str, object]) -> None:
        self.run_dir = folder / "run"
        self.ssd_dir = folder / "ssd"
        self.log = folder / "daemon.log"
        self.arguments: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.shm_dir = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
        chosen: dict[str, object] = {
            "daemon_run_dir": self.run_dir,
            "daemon_drain_deadline": f"{PATIENCE_S}s",
            "ram_size": "8MiB",
            "ram_shm_dir": self.shm_dir,
            "ssd_path": self.ssd_dir,
            "ssd_max_bytes": "64MiB",
            "ssd_segment_bytes": "4MiB",
            "ssd_min_free_bytes": 0,
            "ssd_threads": 2,
            "http_enabled": "false",
            **settings,
        }
        self._environment = {key: value for key, value in os.environ.items() if not key.startswith("KVSTORE_")}
        self._environment |= {f"KVSTORE_{key.upper()}": str(value) for key, value in chosen.items()}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start the process and return at once."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", "from kvstore.cli import main; main()", "serve", *self.arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def start(self) -> None:
        """Start it and wait until it answers."""
        process = self._process = self.spawn()
        with contextlib.closing(Client(self.run_dir)) as console:
            until(lambda: process.poll() is not None or console.ping() > 0)
        assert process.poll() is None, self.log.read_text()

    def start_refused(self, deadline_s: float = PATIENCE_S) -> str:
        """Start one that must end by itself, and not in good order; return its log."""
        with self.spawn() as process:
            try:
                assert process.wait(deadline_s) != 0
            finally:
                process.kill()
        log = self.log.read_text()
        assert "Traceback" not in log, log
        return log

    def kill(self) -> None:
        """kill -9"""
        self.process.kill()
        self.process.wait()

    def stop(self, deadline_s: float = 1.5 * PATIENCE_S) -> int:
        """SIGTERM; return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(deadline_s)

    def restart(self) -> None:
        self.kill()
        self.start()

    def worker(self, tier: str) -> int:
        """The process id of a tier's worker."""
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            holds_disk = any(name.startswith(str(self.ssd_dir)) for name in _open_files(child))
            is_worker = b"kvstore.worker.main" in Path(f"/proc/{child}/cmdline").read_bytes()
            if is_worker and holds_disk == (tier == "ssd"):
                return int(child)
        raise AssertionError(f"no worker of the {tier} tier runs")

    def kill_worker(self, tier: str) -> None:
        """kill -9 the worker of a tier; return when the daemon has noticed, which starts another before long."""
        gone = f"{tier}: the worker is gone"
        before = self.log.read_text().count(gone)
        os.kill(self.worker(tier), signal.SIGKILL)
        until(lambda: self.log.read_text().count(gone) > before)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        shutil.rmtree(self.shm_dir, ignore_errors=True)

    # ------------------------------------------------------------ clients

    def console(self) -> Client:
        return Client(self.run_dir, deadline_s=PATIENCE_S)

    def engine(self, namespace: Namespace | None = None, deadline_s: float = PATIENCE_S) -> Client:
        return Client(self.run_dir, namespace=namespace or small_namespace(), name="test", deadline_s=deadline_s)

    def stats(self) -> dict[str, Any]:
        with contextlib.closing(self.console()) as console:
            return dict(console.stats())

    def errors(self) -> dict[str, int]:
        return dict(self.stats()["errors"])

    def wait_written(self, tier: str = "ssd") -> None:
        """Until nothing waits to be copied to that tier."""
        until(lambda: self.stats()["tiers"][tier]["queue"] == 0)


def _open_files(process_id: str) -> Iterator[str]:
    for path in Path(f"/proc/{process_id}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed by now
            yield os.readlink(path)


def store(client: Client, namespace: Namespace, keys: Sequence[BlockKey], start: int = 0) -> list[Outcome]:
    """Store blocks `start` and on of a prefix, with the bytes that belong to each key."""
    grant = client.store(keys[start:], parents(namespace, keys)[start], start)
    outcomes = [block.outcome for block in grant.blocks]
    granted = [i for i, outcome in enumerate(outcomes) if outcome == Outcome.OK]
    for i in granted:
        view = grant.blocks[i].view
        assert view is not None
        view[:] = payload(keys[start + i], namespace.block_bytes)
    if granted:
        keys_granted = [keys[start + i] for i in granted]
        committed = client.commit(keys_granted, [grant.blocks[i].generation for i in granted], [True] * len(granted))
        for i, outcome in zip(granted, committed, strict=True):
            outcomes[i] = outcome
    return outcomes


def store_all(client: Client, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
    """Store the prefix, waiting where there is no room for now."""
    done = 0

    def go_on() -> bool:
        nonlocal done
        outcomes = store(client, namespace, keys[: done + 512], done)
        while outcomes and outcomes[0] in (Outcome.OK, Outcome.EXISTS):
            done += 1
            outcomes.pop(0)
        return done == len(keys)

    until(go_on)


def fetch(
    client: Client, namespace: Namespace, keys: Sequence[BlockKey], deadline_s: float = PATIENCE_S
) -> tuple[list[Outcome], list[TierKind]]:
    """Fetch the blocks, releasing as they land; every byte of what is OK is checked. Return outcomes and sources."""
    outcomes = [Outcome.UNKNOWN] * len(keys)
    sources = [TierKind.HBM] * len(keys)
    with client.fetch(keys, deadline_s) as stream:
        while not stream.done:
            blocks = stream.landed(deadline_s + 1.0)
            for block in blocks:
                outcomes[block.index], sources[block.index] = block.outcome, block.source
                if block.view is not None:
                    copied = bytes(block.view)
                    if stream.still_valid(block):
                        assert copied == payload(keys[block.index], namespace.block_bytes), "another block's bytes"
                    else:
                        outcomes[block.index] = Outcome.STALE
            stream.release_blocks([block.index for block in blocks])
    return outcomes, sources


def ignoring_faults(action: Callable[[], object]) -> None:
    with contextlib.suppress(KVStoreError):
        action()
