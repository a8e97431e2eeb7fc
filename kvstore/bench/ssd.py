"""SSD: durable writes and cold reads of the real tier, against plain files in the same folder (`files.py`).

Writes go in batches of up to 64 MiB from as many threads as the daemon's worker has for them, from slots of a region;
every block is on disk when its batch is answered, checksum and index included. Reads are single blocks in random order,
again from as many threads as the worker has, with every page of the folder dropped before. The files are written and
read by as many threads, from and to buffers on huge pages, whatever pages the region got: direct I/O from small ones
that lie scattered reaches a third of that. `write` and `read` compare with the plain calls, `write_direct` and
`read_direct` with O_DIRECT, which is what the disk itself can do.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvstore.bench.daemon import prefix
from kvstore.bench.files import PlainFile, drop_cache, is_cold
from kvstore.bench.memory import Buffers, fill
from kvstore.bench.samples import Compared, Timing, in_turns, shuffled
from kvstore.bench.settings import MIB, BenchSettings, Sizes, namespace
from kvstore.core.block import BlockMeta
from kvstore.core.errors import TierUnavailable
from kvstore.core.outcome import Outcome
from kvstore.worker.serving import SSD_BATCH_BYTES, SSD_WRITERS
from tiers.region import Region
from tiers.ssd import SsdTier

_EPOCH = 1


def measure(
    settings: BenchSettings, sizes: Sizes, on_round: Callable[[], None]
) -> tuple[dict[str, Compared], dict[str, Any]]:
    """Return write and read, and whether every read was cold and the slots lay on huge pages.

    Raises TierUnavailable where the tier fails.
    """
    folder = settings.folder / f"ssd-{sizes.block_bytes}"
    folder.mkdir()
    plain = {
        name: PlainFile(folder / f"plain-{name}", sizes.num_blocks, sizes.block_bytes, direct=name == "direct")
        for name in ("buffered", "direct")
    }
    cached: list[float] = []
    here, there = (Buffers(sizes.num_blocks, sizes.block_bytes, seed).views for seed in (1, 2))
    with (
        _views(settings, sizes) as (sources, targets, is_huge),
        contextlib.closing(_tier(folder / "tier", sizes, huge_slots=is_huge)) as tier,
        ThreadPoolExecutor(SSD_WRITERS) as writers,
        ThreadPoolExecutor(settings.ssd_threads) as threads,
    ):
        indexes = batches(sizes)

        def ours(number: int) -> dict[str, float]:
            metas = blocks(sizes, number)
            started = time.perf_counter()
            for outcomes in writers.map(lambda b: tier.write([metas[i] for i in b], [sources[i] for i in b]), indexes):
                expect(outcomes)
            written = time.perf_counter()
            cached.append(drop_cache(folder / "tier"))
            order = shuffled(sizes.num_blocks, number)
            reading = time.perf_counter()
            for outcomes in threads.map(lambda i: tier.read([metas[i]], [targets[i]]), order):
                expect(outcomes)
            seconds = {"write": written - started, "read": time.perf_counter() - reading}
            assert targets[0] == sources[0], "other bytes came back"
            expect(tier.delete([meta.key for meta in metas]))
            return seconds

        def ceiling(name: str, file: PlainFile) -> Callable[[int], dict[str, float]]:
            def run(number: int) -> dict[str, float]:
                write_s = file.write([[(i, here[i]) for i in batch] for batch in indexes], writers)
                cached.append(drop_cache(file.path))
                read_s = file.read(shuffled(sizes.num_blocks, number), there, threads)
                return {f"write {name}": write_s, f"read {name}": read_s}

            return run

        try:
            seconds = in_turns([ours, *(ceiling(*one) for one in plain.items())], settings.rounds, on_round)
        finally:
            for file in plain.values():
                file.close()
    timings = {part: Timing(tuple(taken), sizes.total_bytes) for part, taken in seconds.items()}
    compared = {
        f"{part}{suffix}": Compared(timings[part], {name: timings[f"{part} {name}"]})
        for part in ("write", "read")
        for suffix, name in (("", "buffered"), ("_direct", "direct"))
    }
    facts = {"reads_were_cold": all(map(is_cold, cached)), "pages_left_in_cache": max(cached), "huge_slots": is_huge}
    return compared, facts


def blocks(sizes: Sizes, seed: int) -> list[BlockMeta]:
    """Return the blocks of a prefix that nobody else has."""
    space = namespace(sizes.block_bytes)
    digest, parent, metas = space.digest(), space.root(), []
    for depth, key in enumerate(prefix(space, sizes.num_blocks, seed)):
        metas.append(BlockMeta(key, parent, digest, depth, sizes.block_bytes))
        parent = key
    return metas


def batches(sizes: Sizes) -> list[range]:
    """Cut the blocks as the daemon's worker would."""
    step = max(1, SSD_BATCH_BYTES // sizes.block_bytes)
    return [range(first, min(first + step, sizes.num_blocks)) for first in range(0, sizes.num_blocks, step)]


def expect(outcomes: Sequence[Outcome]) -> None:
    """Raises TierUnavailable unless all are OK."""
    for outcome in outcomes:
        if outcome is not Outcome.OK:
            raise TierUnavailable(f"the tier answered {outcome.label} to a block of the benchmark")


@contextlib.contextmanager
def _views(settings: BenchSettings, sizes: Sizes) -> Iterator[tuple[list[memoryview], list[memoryview], bool]]:
    """Slots of a region to write from, filled with noise, others to read into, and whether they lie on huge pages."""
    path = settings.shm_dir / f"ssd-{sizes.block_bytes}"
    region = Region.create(path, 2 * sizes.total_bytes, _EPOCH, prefault=lambda _done, _total: None)
    views = [region.view(index * sizes.block_bytes, sizes.block_bytes) for index in range(2 * sizes.num_blocks)]
    try:
        for index, view in enumerate(views):
            fill(view, index)
        yield views[: sizes.num_blocks], views[sizes.num_blocks :], region.is_huge()
    finally:
        for view in views:
            view.release()
        region.close()
        region.unlink()


def _tier(folder: Path, sizes: Sizes, *, huge_slots: bool) -> SsdTier:
    # Twice what a round writes, so that the cap is nowhere near.
    cap_bytes = 2 * sizes.total_bytes + 64 * MIB
    return SsdTier(folder, max_bytes=cap_bytes, segment_bytes=cap_bytes // 4, huge_slots=huge_slots)
