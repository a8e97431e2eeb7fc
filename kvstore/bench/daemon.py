"""A daemon of the benchmark's own, and what an engine asks of it, timed."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstore.client import Client, StoreGrant
from kvstore.core.errors import KVStoreError, TierUnavailable
from kvstore.core.key import BlockKey, Namespace, chain_keys
from kvstore.core.outcome import Outcome, TierKind

DEADLINE_S: Final = 60.0
_START_DEADLINE_S = 180.0
_LOOK_EVERY_S = 0.005
_STORE_AT_ONCE = 512


class BenchDaemon:
    """`kvstore serve` in a folder of its own. `settings` as in `{"ram.size": "1GiB"}`; HTTP, SSD and S3 are off unless
    they say otherwise."""

    def __init__(self, folder: Path, shm_dir: Path, settings: Mapping[str, object]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Not in `folder`: the path of a socket has at most 107 bytes.
        self.run_dir = Path(tempfile.mkdtemp(prefix="run-", dir=shm_dir))
        self.log = folder / "daemon.log"
        chosen: dict[str, object] = {
            "daemon.run_dir": self.run_dir,
            "daemon.log_level": "warning",
            # What is measured is over by then.
            "daemon.drain_deadline": "0.1s",
            "ram.shm_dir": shm_dir,
            "ssd.enabled": "false",
            "ssd.path": folder / "ssd",
            "ssd.min_free_bytes": 0,
            "http.enabled": "false",
            **settings,
        }
        self._environment = {key: value for key, value in os.environ.items() if not key.startswith("KVSTORE_")}
        self._environment |= {f"KVSTORE_{key.upper().replace('.', '_')}": str(value) for key, value in chosen.items()}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Return once it answers, with the seconds that took. Raises TierUnavailable where it ends instead."""
        started = time.perf_counter()
        with self.log.open("ab") as log:
            # -P: nothing is imported from the current folder.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvstore", "serve"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        with contextlib.closing(self.console()) as console:
            self.until(lambda: console.ping() > 0)
        return time.perf_counter() - started

    def console(self) -> Client:
        return Client(self.run_dir, name="bench", deadline_s=DEADLINE_S)

    def engine(self, namespace: Namespace) -> Client:
        return Client(self.run_dir, namespace=namespace, name="bench", deadline_s=DEADLINE_S)

    def until(self, condition: Callable[[], bool], deadline_s: float = _START_DEADLINE_S) -> None:
        """Wait for the condition; a daemon that does not answer counts as not yet. Raises TierUnavailable where the
        daemon ends or the time is up."""
        deadline = time.monotonic() + deadline_s
        while True:
            with contextlib.suppress(KVStoreError):
                if condition():
                    return
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
                raise TierUnavailable(f"the daemon of the benchmark ended or did not get ready in time:\n{tail}")
            time.sleep(_LOOK_EVERY_S)

    def wait_written(self, console: Client, tier: str, num_blocks: int) -> None:
        """Wait until that tier holds so many blocks."""
        self.until(lambda: int(_tier(console, tier)["blocks"]) >= num_blocks)

    def processes(self) -> list[int]:
        """Return the daemon's process and all of its children's."""
        assert self._process is not None
        found = [self._process.pid]
        for pid in found:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += [int(child) for child in children.read_text().split()]
        return found

    def stop(self) -> None:
        """Idempotent."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout=30.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        shutil.rmtree(self.run_dir, ignore_errors=True)


@contextlib.contextmanager
def running(folder: Path, shm_dir: Path, settings: Mapping[str, object]) -> Iterator[BenchDaemon]:
    """A daemon that answers, ended afterwards."""
    daemon = BenchDaemon(folder, shm_dir, settings)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.stop()


def tokens(num_tokens: int, seed: int) -> "np.ndarray[Any, np.dtype[np.uint32]]":
    """Return token ids in one contiguous buffer, others for every seed."""
    generator = np.random.Generator(np.random.SFC64(seed))
    return generator.integers(0, 128_000, num_tokens, dtype=np.uint32)


def prefix(namespace: Namespace, num_blocks: int, seed: int) -> list[BlockKey]:
    """Return the keys of a prefix that nobody else has."""
    return chain_keys(namespace, tokens(num_blocks * namespace.block_tokens, seed))


def store(
    client: Client,
    namespace: Namespace,
    keys: Sequence[BlockKey],
    write: Callable[[int, memoryview], None],
) -> dict[str, float]:
    """Store the blocks of a prefix; `write(i, view)` copies block i to its slot. Waits where the daemon is busy.

    Return the seconds of `copy` (into the slots alone) and `path` (grants, copies and commits). Raises
    TierUnavailable where a block is not taken.
    """
    started = time.perf_counter()
    copy_s = 0.0
    done = 0
    while done < len(keys):
        some = keys[done : done + _STORE_AT_ONCE]
        grant = client.store(some, keys[done - 1] if done else namespace.root(), done)
        count = _num_granted(grant)
        if count == 0:
            time.sleep(max(grant.retry_s, 0.001))
            continue
        copying = time.perf_counter()
        for index in range(count):
            view = grant.blocks[index].view
            assert view is not None
            write(done + index, view)
        copy_s += time.perf_counter() - copying
        generations = [block.generation for block in grant.blocks[:count]]
        committed = client.commit(some[:count], generations, [True] * count)
        if any(outcome is not Outcome.OK for outcome in committed):
            raise TierUnavailable(f"a block of the benchmark was not stored: {set(committed)}")
        done += count
    return {"copy": copy_s, "path": time.perf_counter() - started}


def fetch(
    client: Client,
    keys: Sequence[BlockKey],
    source: TierKind,
    read: Callable[[int, memoryview], None],
) -> dict[str, float]:
    """Fetch the blocks; `read(i, view)` copies block i out of its slot, after which its generation is checked.

    Return the seconds of `copy` (copies and checks) and `path` (from the question to the last block). Raises
    TierUnavailable where a block does not come, or not from the tier `source`.
    """
    started = time.perf_counter()
    copy_s = 0.0
    landed = 0
    with client.fetch(keys, DEADLINE_S) as stream:
        while not stream.done:
            blocks = stream.landed(DEADLINE_S)
            copying = time.perf_counter()
            for block in blocks:
                if block.outcome is not Outcome.OK or block.view is None:
                    raise TierUnavailable(f"a block of the benchmark did not come back: {block.outcome.label}")
                if block.source is not source:
                    raise TierUnavailable(f"a block of the benchmark came from {block.source.label}")
                read(block.index, block.view)
                landed += stream.still_valid(block)
            copy_s += time.perf_counter() - copying
            stream.release_blocks([block.index for block in blocks])
    path_s = time.perf_counter() - started
    if landed != len(keys):
        raise TierUnavailable(f"only {landed} of {len(keys)} blocks of the benchmark came back")
    return {"copy": copy_s, "path": path_s}


def _num_granted(grant: StoreGrant) -> int:
    """How many leading blocks were granted; the daemon refuses in order."""
    for index, block in enumerate(grant.blocks):
        if block.outcome is not Outcome.OK:
            if block.outcome not in (Outcome.BUSY, Outcome.FULL):
                raise TierUnavailable(f"a block of the benchmark was refused: {block.outcome.label}")
            return index
    return len(grant.blocks)


def _tier(console: Client, tier: str) -> dict[str, Any]:
    tiers: Any = console.stats()["tiers"]
    return dict(tiers[tier])
