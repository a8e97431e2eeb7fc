"""Makes this boot's region file and clears away those of earlier boots.

Old files lose their name only: an engine that still maps one keeps it whole until it has attached anew, and its memory
counts as taken until then, so a daemon that finds too little room waits for a while and then takes what there is.
"""

import hashlib
import logging
import os
import sys
import time
from pathlib import Path

from rich.progress import Progress

from kvstore.config import RamConfig
from kvstore.core.errors import ConfigError
from tiers.region import Region, is_abandoned

_log = logging.getLogger(__name__)
_WAIT_FOR_ROOM_S = 10.0
# What is left of the file system for others, and the least that is worth starting with.
_SPARE_BYTES = 8 << 20
_SMALLEST_SHARE = 0.25


def create_region(config: RamConfig, run_dir: Path, epoch: int) -> Region:
    """Raises ConfigError where not even a quarter of the size asked for can be had. The caller holds the daemon's lock,
    so every older file of this run folder is a dead daemon's."""
    folder = Path(config.shm_dir)
    # By run folder: what this folder's earlier daemons left is certainly dead, since we hold the folder's lock.
    ours = f"kvstore-{os.geteuid()}-"
    stem = f"{ours}{hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:8]}-"
    _clear(folder, ours, stem)
    size_bytes = _affordable(folder, config.size_bytes)
    path = folder / f"{stem}{epoch:x}.region"
    if not config.prefault:
        return Region.create(path, size_bytes, epoch)
    with Progress(disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("prefaulting the RAM tier", total=size_bytes)
        return Region.create(path, size_bytes, epoch, prefault=lambda done, _: progress.update(task, completed=done))


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


def _affordable(folder: Path, wanted_bytes: int) -> int:
    deadline = time.monotonic() + _WAIT_FOR_ROOM_S
    while (free_bytes := _free_bytes(folder)) < wanted_bytes + _overhead_bytes(wanted_bytes):
        if wanted_bytes > _total_bytes(folder) or time.monotonic() >= deadline:
            break
        time.sleep(0.1)
    if free_bytes >= wanted_bytes + _overhead_bytes(wanted_bytes):
        return wanted_bytes
    smaller_bytes = free_bytes - _overhead_bytes(free_bytes)
    if wanted_bytes > _total_bytes(folder) or smaller_bytes < _SMALLEST_SHARE * wanted_bytes:
        raise ConfigError(
            f"ram.size is {wanted_bytes} bytes, but {folder} has {free_bytes} free of {_total_bytes(folder)}; "
            "lower ram.size, or give that file system more room (docker: shm_size; Kubernetes: sizeLimit)"
        )
    _log.warning(
        "%s has no room for %d bytes (old mappings?): the RAM tier gets %d", folder, wanted_bytes, smaller_bytes
    )
    return smaller_bytes


def _overhead_bytes(size_bytes: int) -> int:
    return size_bytes // 512 + _SPARE_BYTES  # generations: 8 bytes per page


def _free_bytes(folder: Path) -> int:
    try:
        status = os.statvfs(folder)
    except OSError as error:
        raise ConfigError(f"cannot use ram.shm_dir {folder}: {error.strerror}") from None
    return status.f_bavail * status.f_frsize


def _total_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_blocks * status.f_frsize
