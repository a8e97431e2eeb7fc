"""Whom a client trusts, and how it notices that nobody is there."""

import contextlib
import os
import socket
from pathlib import Path

import pytest

from kvstore import connection, wire
from kvstore.connection import LOCK_NAME, SOCKET_NAME, Connection, daemon_lives, lock
from kvstore.core.errors import TierUnavailable
from tests.support.fake_daemon import FakeDaemon

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


def ask(run_dir: Path) -> None:
    with contextlib.closing(Connection(run_dir)) as connection:
        connection.request(0, 0, wire.Ping(), 1.0)


def test_a_path_that_no_socket_can_have_is_named_as_the_reason(tmp_path: Path) -> None:
    """It was said that the daemon starts, stops or is too busy, and so one waited."""
    real = tmp_path / "run"
    real.mkdir()
    alias = tmp_path / ("long" * 30)
    alias.symlink_to(real)
    descriptor = lock(real / LOCK_NAME)
    try:
        with pytest.raises(TierUnavailable, match="may have 107"):
            ask(alias)
    finally:
        os.close(descriptor)


def test_a_daemon_that_there_was_no_time_to_ask_is_asked_the_next_time(tmp_path: Path) -> None:
    """To attach had taken all of an engine's first question's time. The daemon was taken for silent and left alone, and
    the first request computed what lay there."""
    descriptor = lock(tmp_path / LOCK_NAME)
    try:
        with (
            contextlib.closing(socket.socket(socket.AF_UNIX)) as listener,
            contextlib.closing(Connection(tmp_path)) as connection,
        ):
            listener.bind(str(tmp_path / SOCKET_NAME))
            listener.listen(1)
            with pytest.raises(TierUnavailable, match="no time was left"):
                connection.request(0, 0, wire.Ping(), -0.1)
            assert connection.send(0, 0, wire.Ping()) == 1, "the first that goes out"
    finally:
        os.close(descriptor)


def test_why_a_living_daemon_cannot_be_reached_is_said(tmp_path: Path) -> None:
    descriptor = lock(tmp_path / LOCK_NAME)
    try:
        with pytest.raises(TierUnavailable, match="is starting or stopping"):
            ask(tmp_path)
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
            listener.bind(str(tmp_path / SOCKET_NAME))
            listener.listen(0)
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as first:
                first.connect(str(tmp_path / SOCKET_NAME))
                with pytest.raises(TierUnavailable, match="is too busy"):
                    ask(tmp_path)
        (tmp_path / SOCKET_NAME).unlink()
        (tmp_path / SOCKET_NAME).symlink_to(SOCKET_NAME)
        with pytest.raises(TierUnavailable, match="cannot be reached"):
            ask(tmp_path)
    finally:
        os.close(descriptor)


class Answering(Connection):
    """Every question is answered after `takes_s`."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.now = 0.0
        self.takes_s = 0.0
        self.looked: list[float] = []

    def send(self, epoch: int, incarnation: int, body: wire.Message, deadline_s: float = 1.0) -> int:
        return 7

    def receive(self, timeout_s: float, asked: int, look_s: float = 0.0) -> tuple[int, wire.Reply]:
        self.looked.append(look_s)
        self.now += self.takes_s
        return 7, wire.Pong(0)


def test_it_looks_for_answers_only_while_they_come_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that is busy may need the core on which somebody looks."""
    connection = Answering(tmp_path)
    monkeypatch.setattr("kvstore.connection.time.monotonic", lambda: connection.now)

    def ask(times: int, takes_s: float) -> float:
        """Return how long it looked the last time."""
        connection.takes_s = takes_s
        for _ in range(times):
            connection.request(0, 0, wire.Ping(), 1.0)
        return connection.looked[-1]

    assert ask(10, 50e-6) > 0
    assert ask(1, 5.0) > 0, "nobody knew before"
    assert ask(1, 50e-6) > 0, "a single one is no habit"
    assert ask(20, 2e-3) == 0
    assert ask(20, 150e-6) > 0, "woken up each time it looks like this, and it is quick again"


@pytest.mark.parametrize(
    ("answered_on", "expected_s"),
    [(3, connection._LOOK_BESIDE_S), (2, connection._LOOK_S), (-1, connection._LOOK_S)],
)
def test_an_answer_from_our_own_cpu_is_not_looked_for_for_long(
    answered_on: int, expected_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon waited on our CPU for as long as we looked, a third of a millisecond after every other pause."""
    monkeypatch.setattr(connection, "current_cpu", lambda: 3)
    with FakeDaemon(tmp_path) as daemon, contextlib.closing(Connection(tmp_path)) as asking:
        daemon.answered_on = answered_on
        assert asking._look_s() == connection._LOOK_S
        asking.request(0, 0, wire.Stats(), 5.0)
        asking._answer_s = 0.0
        assert asking._look_s() == expected_s


def test_a_daemon_that_stays_on_our_cpu_is_not_kept_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = 3
    monkeypatch.setattr(connection, "current_cpu", lambda: ours)
    with FakeDaemon(tmp_path) as daemon, contextlib.closing(Connection(tmp_path)) as asking:
        daemon.answered_on = 3

        asking.request(0, 0, wire.Stats(), 5.0)
        asking._answer_s = 0.0
        looks = [asking._look_s() for _ in range(20)]
        assert looks[8] == looks[0] > 2 * looks[-1], "it may take several attempts to move"
        assert asking._look_s() <= 50e-6
        ours = 2
        assert asking._look_s() == connection._LOOK_S
        ours = 3
        assert asking._look_s() > 100e-6, "it has moved once, so it may again"


def test_a_client_that_cannot_tell_its_own_cpu_looks_as_long_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "current_cpu", lambda: -1)
    with FakeDaemon(tmp_path), contextlib.closing(Connection(tmp_path)) as asking:
        asking.request(0, 0, wire.Stats(), 5.0)
        asking._answer_s = 0.0
        assert asking._look_s() == connection._LOOK_S
