"""Whom a client trusts, and how it notices that nobody is there."""

import os
from pathlib import Path

import pytest

from kvstore.connection import LOCK_NAME, daemon_lives, lock
from kvstore.core.errors import TierUnavailable

OTHER_USER = 12_345


def test_a_held_lock_is_a_daemon_that_lives(tmp_path: Path) -> None:
    assert not daemon_lives(tmp_path)
    descriptor = lock(tmp_path / LOCK_NAME)
    try:
        assert daemon_lives(tmp_path)
    finally:
        os.close(descriptor)
    assert not daemon_lives(tmp_path)


def test_a_second_holder_of_the_lock_is_refused_at_its_deadline(tmp_path: Path) -> None:
    descriptor = lock(tmp_path / LOCK_NAME)
    try:
        with pytest.raises(BlockingIOError):
            lock(tmp_path / LOCK_NAME, deadline_s=0.0)
    finally:
        os.close(descriptor)


def test_the_folder_of_another_user_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default run folder lies in /tmp: whoever made it first could pose as the daemon and read every chat."""
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
    if tmp_path.stat().st_uid == 0:
        os.chown(tmp_path, OTHER_USER + 1, -1)
    with pytest.raises(TierUnavailable, match="another user"):
        daemon_lives(tmp_path)
