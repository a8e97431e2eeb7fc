"""Daemons that are gone at the end of the test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.daemons import DaemonProcess
from tests.support.s3server import s3_server

__all__ = ["s3_server"]


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    made: list[DaemonProcess] = []

    def make(name: str = "d", *, is_started: bool = True, **settings: object) -> DaemonProcess:
        made.append(DaemonProcess(tmp_path / name, settings))
        if is_started:
            made[-1].start()
        return made[-1]

    yield make
    for daemon in made:
        daemon.close()
        if daemon.log.exists():
            print(f"{daemon.log.parent.name}:\n{daemon.log.read_text()}")  # shown with a test that failed
