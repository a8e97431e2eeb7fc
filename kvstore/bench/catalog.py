"""A daemon that comes back with a million blocks on its SSD: how long until it knows them, and what it takes to know
them.

Recovery reads the index and no payload, so none is written here: the segment files are allocated and every block gets
an entry of the index, as a real write would make it, but its slot stays empty. (A million real blocks of 2 MiB would
be 2 TB.) The blocks are chains of 512, like long prompts. Memory is RssAnon, summed over all processes of the daemon:
what is private to them and in RAM; the region is shared memory and not in it.
"""

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

from kvstore.bench.daemon import BenchDaemon
from kvstore.bench.settings import MIB, BenchSettings, namespace
from kvstore.core.block import BlockMeta
from kvstore.core.key import BlockKey
from tiers.direct import record_size
from tiers.index import BlockIndex, IndexEntry
from tiers.segments import Segments
from tiers.space import DiskSpace
from tiers.ssd import SsdTier

_CHAIN_BLOCKS: Final = 512
_PAYLOAD_BYTES: Final = 4096
_PER_TRANSACTION: Final = 50_000
_RECOVER_DEADLINE_S: Final = 600.0


def measure(settings: BenchSettings, on_step: Callable[[float], None]) -> dict[str, Any]:
    """Return recover_s, rss_mib and what they are about. `on_step(done)` tells how far it has come, from 0 to 1.

    Raises TierUnavailable where the daemon does not find every block.
    """
    folder = settings.folder / "catalog"
    count = settings.catalog_blocks
    max_bytes = 2 * count * record_size(_PAYLOAD_BYTES) + 256 * MIB
    filled_s = _fill(folder / "ssd", max_bytes, count, lambda done: on_step(0.8 * done))
    options = {"ram.size": 64 * MIB, "ssd.enabled": "true", "ssd.max_bytes": max_bytes}
    daemon = BenchDaemon(folder, settings.shm_dir, options)
    started = time.perf_counter()
    try:
        ready_s = daemon.start()
        with contextlib.closing(daemon.console()) as console:
            daemon.until(lambda: _blocks_on_ssd(console.stats()) == count, _RECOVER_DEADLINE_S)
            recover_s = time.perf_counter() - started
        on_step(1.0)
        rss = {_name(pid): rss_anon_bytes(pid) for pid in daemon.processes()}
    finally:
        daemon.stop()
    return {
        "blocks": count,
        "recover_s": recover_s,
        "answers_after_s": ready_s,
        "rss_mib": sum(rss.values()) / MIB,
        "rss_mib_by_process": {name: rss_bytes / MIB for name, rss_bytes in rss.items()},
        "fill_s": filled_s,
    }


def rss_anon_bytes(pid: int) -> int:
    """Return the private memory of a process that is in RAM; 0 where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def _name(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    module = words[words.index("-m") + 1] if "-m" in words else words[0]
    return f"{module} {pid}"


def _fill(path: Path, max_bytes: int, count: int, on_step: Callable[[float], None]) -> float:
    started = time.perf_counter()
    # The tier itself makes the folder.
    path.parent.mkdir(parents=True, exist_ok=True)
    SsdTier(path, max_bytes=max_bytes).close()
    space = DiskSpace.of(path, max_bytes=max_bytes, min_free_bytes=0, max_record_bytes=None, segment_bytes=256 * MIB)
    record_bytes = record_size(_PAYLOAD_BYTES)
    segments = Segments(path / "segments", segment_bytes=space.segment_bytes, room=lambda _: max_bytes)
    index = BlockIndex(path / "index.mdb", space.index_bytes(count) + 64 * MIB)
    try:
        metas = _metas(count)
        for done in range(0, count, _PER_TRANSACTION):
            some = list(islice(metas, _PER_TRANSACTION))
            places = segments.take(record_bytes, len(some))
            assert len(places) == len(some), "the disk has no room for so many blocks"
            index.insert([IndexEntry(meta, place, 0) for meta, place in zip(some, places, strict=True)])
            on_step(min(1.0, (done + len(some)) / count))
    finally:
        index.close()
        segments.close()
    return time.perf_counter() - started


def _metas(count: int) -> Iterator[BlockMeta]:
    space = namespace(_PAYLOAD_BYTES)
    digest, parent = space.digest(), space.root()
    for number in range(count):
        depth = number % _CHAIN_BLOCKS
        parent = space.root() if depth == 0 else parent
        key = BlockKey(hashlib.sha256(parent + number.to_bytes(8, "little")).digest())
        yield BlockMeta(key, parent, digest, depth, _PAYLOAD_BYTES)
        parent = key


def _blocks_on_ssd(stats: dict[str, Any]) -> int:
    return int(stats["tiers"]["ssd"].get("blocks", 0))
