"""SSD after ten turnovers at 90% full: does it still write as fast as when it was fresh, and stay below its cap?

Two tiers of one size side by side. One stays almost empty: a batch is written and deleted again. The other is filled
to 90% of what it can hold and turned over ten times, random blocks going for every batch that comes. Then a batch
goes to each in turns. A thread samples what the full one's folder takes up on the disk, physically, all the time.
"""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from kvstore.bench.memory import Buffers
from kvstore.bench.samples import Compared, Timing, in_turns
from kvstore.bench.settings import BenchSettings, Sizes
from kvstore.bench.ssd import blocks, expect
from kvstore.core.block import BlockMeta
from kvstore.worker.serving import SSD_BATCH_BYTES
from tiers.ssd import SsdTier

_FULL = 0.9
_TURNOVERS = 10
_SAMPLE_EVERY_S = 0.005


def measure(
    settings: BenchSettings, block_bytes: int, on_step: Callable[[float], None]
) -> tuple[dict[str, Compared], dict[str, Any]]:
    """Return churn (the write alone) and churn_with_eviction, and the bytes seen on the disk.

    `on_step(done)` tells how far it has come, from 0 to 1. Raises TierUnavailable where a tier fails.
    """
    folder = settings.folder / "churn"
    folder.mkdir()
    fresh = SsdTier(folder / "fresh", max_bytes=settings.churn_bytes)
    full = SsdTier(folder / "full", max_bytes=settings.churn_bytes)
    batch = Sizes(block_bytes, max(1, min(SSD_BATCH_BYTES, settings.churn_bytes // 16) // block_bytes))
    source = Buffers(batch.num_blocks, block_bytes)
    victims = random.Random(1)
    with _PeakBytes(folder / "full") as peak:
        try:
            held = _fill(full, batch, source, settings.churn_bytes)
            capacity = len(held)
            turns = max(1, _TURNOVERS * capacity // batch.num_blocks)
            for turn in range(turns):
                _replace(full, held, _new(batch, turn), source, victims)
                on_step(turn / turns)

            def churned(number: int) -> dict[str, float]:
                evict_s, write_s = _replace(full, held, _new(batch, turns + number), source, victims)
                return {"full": write_s, "full_evicting": evict_s + write_s}

            def ceiling(number: int) -> dict[str, float]:
                metas = _new(batch, turns + number)
                started = time.perf_counter()
                expect(fresh.write(metas, source.views))
                written = time.perf_counter()
                expect(fresh.delete([meta.key for meta in metas]))
                return {"fresh": written - started, "fresh_evicting": time.perf_counter() - started}

            seconds = in_turns([churned, ceiling], 2 * settings.rounds, lambda: None)
            full.check_integrity()
        finally:
            full.close()
            fresh.close()
    on_step(1.0)
    timings = {part: Timing(tuple(taken), batch.total_bytes) for part, taken in seconds.items()}
    compared = {
        "churn": Compared(timings["full"], {"fresh": timings["fresh"]}),
        "churn_with_eviction": Compared(timings["full_evicting"], {"fresh": timings["fresh_evicting"]}),
    }
    facts = {
        "peak_bytes": peak.peak_bytes,
        "max_bytes": settings.churn_bytes,
        "samples": peak.samples,
        "turnovers": turns * batch.num_blocks / capacity,
        "blocks_held": capacity,
        "block_bytes": block_bytes,
    }
    return compared, facts


class _PeakBytes:
    """Samples, on a thread, what a folder takes up on the disk."""

    def __init__(self, folder: Path) -> None:
        self.peak_bytes = 0
        self.samples = 0
        self._folder = folder
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak-bytes")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, _physical_bytes(self._folder))
            self.samples += 1
            if self._stopping.wait(_SAMPLE_EVERY_S):
                return


def _physical_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def _fill(tier: SsdTier, batch: Sizes, source: Buffers, max_bytes: int) -> list[BlockMeta]:
    """Fill the tier to its share of what it can hold; return the blocks in it."""
    first = _new(batch, -1)
    expect(tier.write(first, source.views))
    capacity_bytes = tier.usage().capacity_bytes
    assert capacity_bytes is not None and capacity_bytes <= max_bytes
    held, number = list(first), -2
    while True:
        usage = tier.usage()
        record_bytes = usage.used_bytes // usage.blocks
        room = int((_FULL * capacity_bytes - usage.used_bytes) // record_bytes)
        if room <= 0:
            return held
        metas = _new(batch, number)[:room]
        number -= 1
        expect(tier.write(metas, source.views[: len(metas)]))
        held += metas


def _replace(
    tier: SsdTier, held: list[BlockMeta], metas: list[BlockMeta], source: Buffers, victims: random.Random
) -> tuple[float, float]:
    """Delete as many random blocks as come, then write those; return the seconds of both."""
    victims.shuffle(held)
    gone = [held.pop().key for _ in range(min(len(metas), len(held)))]
    started = time.perf_counter()
    expect(tier.delete(gone))
    deleted = time.perf_counter()
    expect(tier.write(metas, source.views))
    written = time.perf_counter()
    held += metas
    return deleted - started, written - deleted


def _new(batch: Sizes, number: int) -> list[BlockMeta]:
    """Blocks that no other number has; `number` may be negative."""
    return blocks(batch, (number + (1 << 20)) * 2 + 1)
