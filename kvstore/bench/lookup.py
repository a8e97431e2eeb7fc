"""The control path: how long an engine waits to hear which blocks of a long prompt exist.

A lookup is timed from a contiguous uint32 buffer of tokens to the answer: keys, socket and catalog of a real daemon
in a process of its own, all blocks there. An empty round trip is timed in turns with it. Then the same while a third
process stores sessions that go to SSD and S3 and another asks the HTTP API (`load.py`). The blocks are small, since a
lookup never touches their bytes.
"""

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvstore.bench.daemon import DEADLINE_S, BenchDaemon, running, store, tokens
from kvstore.bench.load import LoadSettings, encode
from kvstore.bench.memory import fill
from kvstore.bench.samples import Timing, in_turns
from kvstore.bench.settings import MIB, BenchSettings, namespace
from kvstore.client import Client
from kvstore.core.errors import TierUnavailable
from kvstore.core.key import Namespace, chain_keys
from kvstore.core.outcome import Outcome

_BLOCK_BYTES: Final = 4096
_LOAD_BLOCK_BYTES: Final = MIB
_LOAD_READY_S: Final = 60.0
_API: Final = re.compile(r"http://127\.0\.0\.1:(\d+)")


def measure(settings: BenchSettings, where: dict[str, str] | None, on_round: Callable[[], None]) -> dict[str, Any]:
    """Return p50 and p99 in milliseconds, idle and, with a bucket (`where`), loaded. Raises TierUnavailable."""
    space = namespace(_BLOCK_BYTES)
    prompt = tokens(settings.lookup_tokens, 1)
    options: dict[str, object] = {
        "ram.size": 256 * MIB,
        "ssd.enabled": "true",
        "ssd.max_bytes": 1024 * MIB,
        "http.enabled": "true",
        "http.port": 0,
        "daemon.log_level": "info",  # the API's port is in the log
    }
    if where is not None:
        options |= {f"s3.{name}": value for name, value in where.items()}
    with (
        running(settings.folder / "lookup", settings.shm_dir, options) as daemon,
        contextlib.closing(daemon.engine(space)) as engine,
        contextlib.closing(daemon.console()) as console,
    ):
        keys = chain_keys(space, prompt)
        store(engine, space, keys, lambda i, view: fill(view, i))
        daemon.wait_written(console, "ssd", len(keys))
        idle = _lookups(engine, space, prompt, settings.lookup_rounds, on_round)
        figures: dict[str, Any] = {
            "tokens": len(prompt),
            "blocks": len(keys),
            "p50_ms": idle["lookup"].median_s * 1e3,
            "p99_ms": idle["lookup"].percentile_s(0.99) * 1e3,
            "keys_p50_ms": idle["keys"].median_s * 1e3,
            "ping_p50_ms": idle["ping"].median_s * 1e3,
            "ping_p99_ms": idle["ping"].percentile_s(0.99) * 1e3,
            "runs": len(idle["lookup"].seconds),
        }
        if where is None:
            figures["loaded_skipped"] = "the S3 server is not installed"
            return figures
        with _load(daemon, console):
            before = _uploaded_bytes(console)
            started = time.monotonic()
            loaded = _lookups(engine, space, prompt, settings.lookup_rounds, on_round)
            elapsed_s = time.monotonic() - started
            uploaded = _uploaded_bytes(console) - before
    return figures | {
        "loaded_p50_ms": loaded["lookup"].median_s * 1e3,
        "loaded_p99_ms": loaded["lookup"].percentile_s(0.99) * 1e3,
        "loaded_max_ms": max(loaded["lookup"].seconds) * 1e3,
        "loaded_ping_p99_ms": loaded["ping"].percentile_s(0.99) * 1e3,
        "loaded_upload_mb_per_s": uploaded / elapsed_s / 1e6,
    }


def _lookups(
    engine: Client, space: Namespace, prompt: Any, rounds: int, on_round: Callable[[], None]
) -> dict[str, Timing]:
    expected = len(prompt) // space.block_tokens

    def lookup(_: int) -> dict[str, float]:
        started = time.perf_counter()
        keys = chain_keys(space, prompt)
        hashed = time.perf_counter()
        found = engine.lookup(keys, DEADLINE_S)
        ended = time.perf_counter()
        if len(found.tiers) != expected or found.next is not Outcome.OK:
            raise TierUnavailable(f"only {len(found.tiers)} of {expected} blocks were found: {found.why}")
        return {"lookup": ended - started, "keys": hashed - started}

    def ping(_: int) -> dict[str, float]:
        return {"ping": engine.ping()}

    seconds = in_turns([lookup, ping], rounds, on_round)
    return {part: Timing(tuple(taken)) for part, taken in seconds.items()}


@contextlib.contextmanager
def _load(daemon: BenchDaemon, console: Client) -> Iterator[None]:
    """The other process at work: it has uploaded something and its requests are answered."""
    daemon.until(lambda: _API.search(daemon.log.read_text()) is not None)
    match = _API.search(daemon.log.read_text())
    assert match is not None
    with daemon.log.with_name("load.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvstore.bench.load"], stdin=subprocess.PIPE, stdout=log, stderr=log
        )
    try:
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(encode(LoadSettings(str(daemon.run_dir), match[0], _LOAD_BLOCK_BYTES)))
        before = _uploaded_bytes(console)
        deadline = time.monotonic() + _LOAD_READY_S
        while _uploaded_bytes(console) == before:
            if process.poll() is not None or time.monotonic() > deadline:
                raise TierUnavailable("the process that loads the daemon did not get to work")
            time.sleep(0.05)
        yield
        if process.poll() is not None:
            raise TierUnavailable("the process that loads the daemon ended early")
    finally:
        process.kill()
        process.wait()


def _uploaded_bytes(console: Client) -> int:
    tiers: Any = console.stats()["tiers"]
    return int(tiers["s3"]["bytes_in"])
