"""The table of engines: who may attach, and who counts as alive."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.errors import ProtocolError
from kvstore.store import engines as module
from kvstore.store.engines import EngineTable


@pytest.fixture
def table(tmp_path: Path) -> Iterator[EngineTable]:
    made = EngineTable(tmp_path)
    yield made
    made.close()


def hold(folder: Path, name: str) -> int:
    lock = os.open(folder / "clients" / name, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def test_an_engine_lives_as_long_as_it_holds_its_lock(table: EngineTable, tmp_path: Path) -> None:
    lock = hold(tmp_path, "one")
    engine = table.attach(0, "engine", "one")
    assert table.dead() == [] and table.get(engine.incarnation) is engine
    os.close(lock)
    assert table.dead() == [engine]
    table.remove(engine)
    table.remove(engine)
    assert len(table) == 0 and not (tmp_path / "clients" / "one").exists()


def test_a_living_engine_whose_file_was_cleared_away_is_not_taken_for_dead(table: EngineTable, tmp_path: Path) -> None:
    """A cleaner of /tmp removed the file; its engine's slots were given to others while it was still writing."""
    lock = hold(tmp_path, "one")
    table.attach(0, "engine", "one")
    (tmp_path / "clients" / "one").unlink()
    assert table.dead() == []
    os.close(lock)
    assert len(table.dead()) == 1


def test_engines_of_one_process_share_its_lock(table: EngineTable, tmp_path: Path) -> None:
    lock = hold(tmp_path, "one")
    first, second = table.attach(0, "a", "one"), table.attach(1, "b", "one")
    assert first.incarnation != second.incarnation
    table.remove(first)
    assert (tmp_path / "clients" / "one").exists()
    os.close(lock)
    assert table.dead() == [second]


def test_incarnations_are_never_given_out_twice(table: EngineTable, tmp_path: Path) -> None:
    lock = hold(tmp_path, "one")
    seen = set()
    for _ in range(5):
        engine = table.attach(0, "engine", "one")
        seen.add(engine.incarnation)
        table._engines.pop(engine.incarnation)
        os.close(engine.liveness)
    assert len(seen) == 5
    os.close(lock)


@pytest.mark.parametrize("name", ["", ".", "..", "../daemon.lock", "a/b", "nul\0byte", "x" * 300, "nobody"])
def test_a_name_that_is_no_locked_file_of_the_folder_is_refused(table: EngineTable, name: str) -> None:
    with pytest.raises(ProtocolError):
        table.attach(0, "engine", name)


def test_a_file_that_nobody_holds_and_a_pipe_are_refused_at_once(table: EngineTable, tmp_path: Path) -> None:
    (tmp_path / "clients" / "free").touch()
    os.mkfifo(tmp_path / "clients" / "pipe")
    (tmp_path / "clients" / "link").symlink_to(tmp_path / "clients" / "free")
    for name in ("free", "pipe", "link"):
        with pytest.raises(ProtocolError, match="nobody holds"):
            table.attach(0, "engine", name)


def test_there_is_an_end_to_engines(table: EngineTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENGINES", 2)
    lock = hold(tmp_path, "one")
    for _ in range(2):
        table.attach(0, "engine", "one")
    with pytest.raises(ProtocolError, match="attached already"):
        table.attach(0, "engine", "one")
    os.close(lock)


def test_the_next_daemon_clears_away_the_files_of_the_dead_only(table: EngineTable, tmp_path: Path) -> None:
    lock = hold(tmp_path, "alive")
    (tmp_path / "clients" / "dead").touch()
    following = EngineTable(tmp_path)
    assert sorted(os.listdir(tmp_path / "clients")) == ["alive"]
    following.close()
    os.close(lock)
