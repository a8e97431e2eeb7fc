"""Makes this boot's region file and clears away those of earlier boots.

Old files lose their name only: an engine that still maps one keeps it whole until it has attached anew, and its memory
counts as taken until then, so a daemon that finds too little room waits for a while and then takes what there is.
"""

import contextlib
import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.progress import Progress

from kvstore.config import RamConfig
from kvstore.core.errors import ConfigError
from kvstore.core.units import approximate_size, format_size
from kvstore.memory import Limit, System
from tiers.backing import Backing
from tiers.pages import PAGE_BYTES
from tiers.region import Region, is_abandoned

_log = logging.getLogger(__name__)
_WAIT_FOR_ROOM_S = 10.0
# The least share of what was asked for that is worth starting with.
_SMALLEST_SHARE = 0.25
# Without a terminal, progress is a line of the log every so often.
_REPORT_EVERY_S = 10.0


def create_region(
    config: RamConfig,
    run_dir: Path,
    epoch: int,
    system: System = System(),  # noqa: B008 (frozen)
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Region:
    """Raises ConfigError where not even a quarter of the size asked for can be had, or not in the way asked for. The
    caller holds the daemon's lock, so every older file of this run folder is a dead daemon's."""
    folder = Path(config.shm_dir)
    # By run folder: what this folder's earlier daemons left is certainly dead, since we hold the folder's lock.
    ours = f"kvstore-{os.geteuid()}-"
    stem = f"{ours}{hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:8]}-"
    _clear(folder, ours, stem)
    node = config.numa_node if config.numa_node >= 0 else None
    size_bytes = _affordable(config.size_bytes, lambda: system.limits(folder, node), clock, sleep)
    huge_page_bytes = system.huge_page_bytes(folder)
    if config.hugetlb and not huge_page_bytes:
        raise ConfigError(
            f"ram.hugetlb needs ram.shm_dir on a hugetlbfs, and {folder} is on something else; mount one "
            "(mount -t hugetlbfs none /mnt/huge), or set ram.hugetlb to false: a tmpfs mounted with huge=advise "
            "gives huge pages too, where memory is not fragmented"
        )
    backing = Backing(huge_page_bytes or PAGE_BYTES, node, config.mlock)
    path = folder / f"{stem}{epoch:x}.region"
    if not config.prefault:
        return Region.create(path, size_bytes, epoch, backing=backing)
    began = clock()
    with _progress(size_bytes, clock) as prefault:
        region = Region.create(path, size_bytes, epoch, prefault=prefault, backing=backing)
    seconds = max(clock() - began, 1e-9)
    _log.info(
        "the RAM tier has %s, of which %s in huge pages; prefaulted in %.1f s (%.1f GB/s)",
        format_size(region.data_bytes),
        format_size(region.huge_bytes()),
        seconds,
        region.data_bytes / seconds / 1e9,
    )
    return region


@contextlib.contextmanager
def _progress(size_bytes: int, clock: Callable[[], float]) -> Iterator[Callable[[int, int], None]]:
    """Yield what is told (done_bytes, total_bytes): a bar on a terminal, else lines of the log."""
    if sys.stderr.isatty():
        with Progress(transient=True) as progress:
            task = progress.add_task("prefaulting the RAM tier", total=size_bytes)
            yield lambda done, total: progress.update(task, completed=done, total=total)
        return
    began = reported = clock()

    def report(done_bytes: int, total_bytes: int) -> None:
        nonlocal reported
        now = clock()
        if now - reported >= _REPORT_EVERY_S:
            reported = now
            rate = done_bytes / (now - began) / 1e9
            share = 100 * done_bytes / total_bytes
            _log.info("prefaulting the RAM tier: %.0f%% of %.1f GB, %.1f GB/s", share, total_bytes / 1e9, rate)

    yield report


def _clear(folder: Path, ours: str, stem: str) -> None:
    """Unlink what earlier boots left, also those of other run folders whose daemon was killed and never came back."""
    try:
        old_files = sorted(folder.glob(f"{ours}*.region"))
    except OSError as error:
        raise ConfigError(f"cannot read ram.shm_dir {folder}: {error.strerror}") from None
    for old in old_files:
        if old.name.startswith(stem) or is_abandoned(old):
            try:
                old.unlink(missing_ok=True)
            except OSError as error:
                # Everybody may write to /dev/shm: what has such a name need not be ours.
                _log.warning("cannot remove %s: %s", old, error.strerror)


def _affordable(
    wanted_bytes: int,
    limits: Callable[[], list[Limit]],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> int:
    """Wait for a while for old mappings to go; return `wanted_bytes`, or the smaller size that there is."""
    deadline = clock() + _WAIT_FOR_ROOM_S
    while True:
        found = limits()
        tightest = min(found, key=lambda limit: _room_bytes(limit, limit.free_bytes))
        smaller_bytes = _room_bytes(tightest, tightest.free_bytes)
        can_never = [limit for limit in found if wanted_bytes > _room_bytes(limit, limit.total_bytes)]
        if can_never:
            raise _too_small(wanted_bytes, can_never[0])
        if smaller_bytes >= wanted_bytes:
            return wanted_bytes
        if clock() >= deadline:
            break
        sleep(0.1)
    if smaller_bytes < _SMALLEST_SHARE * wanted_bytes:
        raise _too_small(wanted_bytes, tightest)
    _log.warning(
        "%s has no room for %d bytes (old mappings?): the RAM tier gets %d; else %s",
        tightest.where,
        wanted_bytes,
        smaller_bytes,
        tightest.remedy,
    )
    return smaller_bytes


def _room_bytes(limit: Limit, free_bytes: int) -> int:
    """The largest region there is room for: its generations take 8 bytes per page, and some is for others."""
    room_bytes = free_bytes - limit.spare_bytes
    return max(0, room_bytes - room_bytes // 512)


def _too_small(wanted_bytes: int, limit: Limit) -> ConfigError:
    return ConfigError(
        f"ram.size is {wanted_bytes} bytes ({approximate_size(wanted_bytes)}), but {limit.where} has "
        f"{limit.free_bytes} free of {limit.total_bytes} ({approximate_size(limit.free_bytes)} of "
        f"{approximate_size(limit.total_bytes)}), and needs {approximate_size(limit.spare_bytes)} for others; "
        f"lower ram.size, or {limit.remedy}"
    )
