"""The region file of a boot, and what is cleared away for it."""

import itertools
import logging
import os
from pathlib import Path

import pytest

from kvstore.config import RamConfig
from kvstore.core.errors import ConfigError
from kvstore.region_file import create_region

MIB = 1 << 20
LONG_AGO_S = 1_000_000.0


def config(shm_dir: Path, size_bytes: int = MIB) -> RamConfig:
    return RamConfig(size_bytes=size_bytes, shm_dir=str(shm_dir), prefault=False)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_new_boot_unlinks_what_the_boots_before_it_left(shm_dir: Path, tmp_path: Path) -> None:
    first = create_region(config(shm_dir), tmp_path, 1)
    first.close()  # killed: the name stays
    second = create_region(config(shm_dir), tmp_path, 2)
    assert files(shm_dir) == {second.path.name}
    second.unlink()
    second.close()


def test_the_region_of_a_daemon_that_runs_elsewhere_stays(shm_dir: Path, tmp_path: Path) -> None:
    other = create_region(config(shm_dir), tmp_path / "other", 1)
    os.utime(other.path, (LONG_AGO_S, LONG_AGO_S))
    mine = create_region(config(shm_dir), tmp_path / "mine", 2)
    assert files(shm_dir) == {other.path.name, mine.path.name}
    for region in (other, mine):
        region.unlink()
        region.close()


def test_the_region_of_a_daemon_that_was_killed_elsewhere_goes(shm_dir: Path, tmp_path: Path) -> None:
    """A daemon killed with SIGKILL whose run folder was never used again kept its memory in /dev/shm for good."""
    other = create_region(config(shm_dir), tmp_path / "other", 1)
    os.utime(other.path, (LONG_AGO_S, LONG_AGO_S))
    other.close()
    mine = create_region(config(shm_dir), tmp_path / "mine", 2)
    assert files(shm_dir) == {mine.path.name}
    mine.unlink()
    mine.close()


def test_what_cannot_be_removed_stops_nobody(shm_dir: Path, tmp_path: Path) -> None:
    """Anybody on the machine may make something with our region's name in /dev/shm, and the daemon then ended with a
    traceback when it could not unlink it. (A folder here, which root cannot unlink either.)"""
    first = create_region(config(shm_dir), tmp_path, 1)
    first.close()
    first.unlink()
    first.path.mkdir()
    second = create_region(config(shm_dir), tmp_path, 2)
    first.path.rmdir()
    second.unlink()
    second.close()


def test_a_size_that_can_never_fit_is_refused_with_what_there_is(shm_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ram\.size is .*iB\), but .* free of .*iB\)"):
        create_region(config(shm_dir, 1 << 50), tmp_path, 1)
    assert not files(shm_dir)


def test_without_a_terminal_the_log_tells_how_far_prefaulting_is(
    shm_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Half a terabyte takes minutes, in which a container's log showed nothing."""
    ticks = itertools.count(0.0, 6.0)
    with caplog.at_level(logging.INFO):
        region = create_region(
            RamConfig(size_bytes=300 * MIB, shm_dir=str(shm_dir)), tmp_path, 1, clock=lambda: next(ticks)
        )
    region.unlink()
    region.close()
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if line.startswith("prefaulting the RAM tier: ")]) == 2
    assert "300MiB, of which" in lines[-1]
    assert "GB/s" in lines[-1]
