"""Whose a folder is: taking it, and what is refused."""

import errno
import logging
import os
import stat
from pathlib import Path

import pytest

from kvstore.core.errors import ConfigError
from tiers.dirlock import FolderLock, own_folder


def test_a_folder_is_made_for_its_owner_alone_and_known_again(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    own_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    FolderLock(folder, wait_s=0).release()
    (folder / "more").touch()
    own_folder(folder)


def test_the_root_of_a_fresh_file_system_is_taken(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    own_folder(tmp_path)


def test_a_folder_where_something_else_lives_is_refused_and_left_open(tmp_path: Path) -> None:
    """`ssd.path = "/tmp"`, started as root, closed /tmp to everybody on the machine."""
    (tmp_path / "of somebody else").touch()
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="name a folder below it"):
        own_folder(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_folder_of_another_user_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume that belongs to root, under a daemon that does not run as root, is no fault of the disk."""

    def not_yours(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "operation not permitted")

    monkeypatch.setattr(os, "chmod", not_yours)
    with pytest.raises(ConfigError, match="another user"):
        own_folder(tmp_path)


def test_a_full_disk_does_not_keep_the_lock_from_being_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder's name did not fit on a full disk, and so the tier did not open and served none of its blocks."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "pwrite", full)
    lock = FolderLock(tmp_path, wait_s=0)
    with pytest.raises(ConfigError, match="another process"):
        FolderLock(tmp_path, wait_s=0)
    lock.release()


def test_whoever_waits_says_once_for_whom(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        if now_s < 1.0:
            assert not caplog.records
        if now_s > 5.0:
            holder.release()

    holder = FolderLock(tmp_path, wait_s=0)
    with caplog.at_level(logging.WARNING, logger="kvstore.tiers.dirlock"):
        FolderLock(tmp_path, wait_s=10.0, clock=lambda: now_s, sleep=sleep).release()
    (record,) = caplog.records
    assert f"in use by process {os.getpid()} on" in record.getMessage()
    assert "up to 10 s" in record.getMessage()
