"""One turn of the daemon's loop: what it waits for, and what it does not wait for."""

import contextlib
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore import wire
from kvstore.config import Config, HttpConfig, SsdConfig
from kvstore.core.errors import ConfigError
from kvstore.core.outcome import TierKind
from kvstore.daemon import Daemon, _private_folder
from kvstore.eager_poll import EagerPoll
from kvstore.wire import Header
from tiers.region import Region


class Link:
    """A worker that has answered before the poll begins, so that ZMQ does not tell of it again."""

    kind = TierKind.SSD
    num_starts = 0
    ready = False
    failure = ""
    is_fatal = False

    def __init__(self) -> None:
        self.num_received = 0

    def sources(self) -> list[int]:
        return []

    def has_answers(self) -> bool:
        return not self.num_received

    def receive(self) -> None:
        self.num_received += 1


class Epoll:
    """Notes how long the loop would have waited, and never waits."""

    def __init__(self, real: select.epoll) -> None:
        self._real = real
        self.waits_s: list[float] = []

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        self.waits_s.append(timeout_s)
        return self._real.poll(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    (tmp_path / "clients").mkdir()
    with contextlib.closing(Region.create(tmp_path / "region", 1 << 20, 7)) as region:
        made = Daemon(Config(ssd=SsdConfig(enabled=False), http=HttpConfig(enabled=False)), tmp_path, 7, region)
        made._control.open()
        yield made
        made._links = {}
        made._stop()


def test_a_question_does_not_hold_up_what_a_worker_has_answered_already(daemon: Daemon, tmp_path: Path) -> None:
    """The loop answered the question and then waited once more, for up to a tenth of a second."""
    link, epoll = Link(), Epoll(daemon._epoll)
    daemon._links = cast(Any, {TierKind.SSD: link})
    daemon._wait = EagerPoll(cast("select.epoll", epoll))
    readable, writable = socket.socketpair()
    with readable, writable, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "control.sock"))
        daemon._poll(readable, 0.0)
        epoll.waits_s.clear()
        link.num_received = 0
        client.sendall(wire.pack(Header(sequence=1), wire.encode(wire.Ping())))
        daemon._poll(readable, 60.0)
        assert client.recv(100), "the question was answered"
    assert link.num_received == 1
    assert epoll.waits_s == [0.0]


def test_a_run_folder_that_is_a_symbolic_link_is_refused_for_what_it_is(tmp_path: Path) -> None:
    """It was said to belong to another user."""
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir(mode=0o700)
    link.symlink_to(folder)
    with pytest.raises(ConfigError, match=f"symbolic link: name the folder itself, {folder}"):
        _private_folder(link)
    assert _private_folder(folder) == folder


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_daemon_that_is_stopped_while_it_starts_blames_no_tier(
    is_stopped: bool, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It logged an error without a reason, that it would go on without the SSD."""
    daemon._links = cast(Any, {TierKind.SSD: Link()})
    monkeypatch.setattr("kvstore.daemon._START_DEADLINE_S", 0.0)
    daemon._signals = int(is_stopped)
    readable, writable = socket.socketpair()
    with readable, writable:
        daemon._recover(readable)
    assert ("serving without the ssd tier" in caplog.text) is not is_stopped
