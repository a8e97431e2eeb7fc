"""RAM: blocks between an engine-side buffer and slots of a real daemon's region, against memcpy of the same sizes.

`store` is the engine's copy into slots that the daemon has granted, `fetch` its copy out of slots that are pinned for
it, with the check of each slot's generation; both with all that a real client does around them are `store_path` and
`fetch_path`. Blocks of every round are new ones, and the old ones are dropped in between, untimed. The first round,
which is not counted, is the first touch of the region by this process.
"""

import contextlib
import time
from collections.abc import Callable

from kvstore.bench.daemon import fetch, prefix, running, store
from kvstore.bench.memory import Buffers, copy, memcpy
from kvstore.bench.samples import Compared, Timing, in_turns
from kvstore.bench.settings import BenchSettings, Sizes, namespace
from kvstore.core.outcome import TierKind


def measure(settings: BenchSettings, sizes: Sizes, on_round: Callable[[], None]) -> dict[str, Compared]:
    """Return store, fetch, store_path and fetch_path. Raises TierUnavailable where the daemon does not do its part."""
    space = namespace(sizes.block_bytes)
    here, there = (Buffers(sizes.num_blocks, sizes.block_bytes, seed) for seed in (1, 2))
    # Room above the watermark, so that nothing is evicted while it is measured.
    region_bytes = max(sizes.total_bytes * 5 // 4, 4 * sizes.block_bytes) + (1 << 20)
    folder = settings.folder / f"ram-{sizes.block_bytes}"
    with (
        running(folder, settings.shm_dir, {"ram.size": region_bytes}) as daemon,
        contextlib.closing(daemon.engine(space)) as engine,
    ):

        def ours(number: int) -> dict[str, float]:
            keys = prefix(space, sizes.num_blocks, number)
            stored = store(engine, space, keys, lambda i, view: copy(view, here.views[i]))
            fetched = fetch(engine, keys, TierKind.RAM, lambda i, view: copy(there.views[i], view))
            assert there.views[-1] == here.views[-1], "other bytes came back"
            engine.evict(["ram"], drop=True)
            return {
                "store": stored["copy"],
                "store_path": stored["path"],
                "fetch": fetched["copy"],
                "fetch_path": fetched["path"],
            }

        def ceiling(_: int) -> dict[str, float]:
            started = time.perf_counter()
            for target, source in zip(there.views, here.views, strict=True):
                memcpy(target, source)
            return {"memcpy": time.perf_counter() - started}

        seconds = in_turns([ours, ceiling], settings.rounds, on_round)
    timings = {part: Timing(tuple(taken), sizes.total_bytes) for part, taken in seconds.items()}
    parts = ("store", "fetch", "store_path", "fetch_path")
    return {part: Compared(timings[part], {"memcpy": timings["memcpy"]}) for part in parts}
