"""Whole paths through a real daemon, in GB/s: stored until readable, until durable on SSD and in S3, and fetched back
from each tier into the engine's buffers. No ceiling stands beside these: they say what a user gets, the parts say
why.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

from kvstore import wire
from kvstore.bench.daemon import BenchDaemon, fetch, prefix, running, store
from kvstore.bench.files import drop_cache
from kvstore.bench.memory import Buffers, copy
from kvstore.bench.samples import Timing, in_turns
from kvstore.bench.settings import MIB, BenchSettings, Sizes, namespace
from kvstore.client import Client
from kvstore.core.key import BlockKey, join_keys
from kvstore.core.outcome import TierKind


def measure(
    settings: BenchSettings, sizes: Sizes, where: dict[str, str] | None, on_round: Callable[[], None]
) -> dict[str, Timing]:
    """Return the timings of store, durable_ssd, fetch_ram, fetch_ssd and, with a bucket, durable_s3 and fetch_s3.

    `durable_ssd` begins with the store, `durable_s3` with the session that makes the blocks worth uploading.
    """
    space = namespace(sizes.block_bytes)
    here, there = (Buffers(sizes.num_blocks, sizes.block_bytes, seed) for seed in (1, 2))
    region_bytes = max(sizes.total_bytes * 3 // 2, 4 * sizes.block_bytes) + MIB
    options: dict[str, object] = {
        "ram.size": region_bytes,
        "ssd.enabled": "true",
        "ssd.max_bytes": 4 * sizes.total_bytes + 64 * MIB,
        "ssd.segment_bytes": max(sizes.total_bytes // 2, 4 * MIB),
        "ssd.threads": settings.ssd_threads,
        "s3.threads": settings.s3_threads,
    }
    if where is not None:
        options |= {f"s3.{name}": value for name, value in where.items()} | {"s3.prefix": f"flow-{sizes.block_bytes}"}
    folder = settings.folder / f"flow-{sizes.block_bytes}"
    with (
        running(folder, settings.shm_dir, options) as daemon,
        contextlib.closing(daemon.engine(space)) as engine,
        contextlib.closing(daemon.console()) as console,
    ):

        def back(keys: list[BlockKey], source: TierKind) -> float:
            taken_s = fetch(engine, keys, source, lambda i, view: copy(there.views[i], view))["path"]
            assert there.views[-1] == here.views[-1], "other bytes came back"
            return taken_s

        def run(number: int) -> dict[str, float]:
            keys = prefix(space, sizes.num_blocks, number)
            started = time.perf_counter()
            seconds = {"store": store(engine, space, keys, lambda i, view: copy(view, here.views[i]))["path"]}
            seconds["durable_ssd"] = _until_written(daemon, console, "ssd", len(keys), started)
            seconds["fetch_ram"] = back(keys, TierKind.RAM)
            # Asked by the engine itself, so that the daemon hears of it after the end of the fetch's pins.
            engine.evict(["ram"])
            drop_cache(folder / "ssd")
            seconds["fetch_ssd"] = back(keys, TierKind.SSD)
            if where is not None:
                started = time.perf_counter()
                _put_session(engine, space.digest(), number, keys)
                seconds["durable_s3"] = _until_written(daemon, console, "s3", len(keys), started)
                engine.evict(["ram", "ssd"])
                seconds["fetch_s3"] = back(keys, TierKind.S3)
                engine.session_delete(f"bench-{number}", namespace=space.digest())
            daemon.until(lambda: _is_empty(engine, ["ram", "ssd", "s3"] if where else ["ram", "ssd"]))
            return seconds

        seconds = in_turns([run], settings.rounds, on_round)
    return {part: Timing(tuple(taken), sizes.total_bytes) for part, taken in seconds.items()}


def as_json(timings: dict[str, Timing]) -> dict[str, Any]:
    return {part: timing.as_json() for part, timing in timings.items()}


def _until_written(daemon: BenchDaemon, console: Client, tier: str, num_blocks: int, started: float) -> float:
    daemon.wait_written(console, tier, num_blocks)
    return time.perf_counter() - started


def _is_empty(engine: Client, tiers: list[str]) -> bool:
    """Drop every block that nobody holds; return whether that was all."""
    engine.evict(tiers, drop=True)
    stats: Any = engine.stats()
    return all(stats["tiers"][tier]["blocks"] == 0 for tier in tiers)


def _put_session(engine: Client, digest: bytes, number: int, keys: list[BlockKey]) -> None:
    message = wire.ChatMessage("user", "bench", list(range(len(keys) * 256)))
    engine.session_put(wire.SessionPut(f"bench-{number}", "", digest, 0, [message], join_keys(keys)))
