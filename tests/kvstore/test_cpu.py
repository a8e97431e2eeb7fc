"""That the number is the CPU's, and that moving away leads to another one and takes no right away."""

import os
from pathlib import Path

import pytest

from kvstore.cpu import current_cpu, getter, move_away, num_runnable, sharing_cache


def test_it_is_the_cpu_that_this_thread_is_bound_to() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        for cpu in allowed:
            os.sched_setaffinity(0, {cpu})
            assert current_cpu() == cpu
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_system_that_does_not_say_is_no_fault() -> None:
    assert getter(object())() == -1


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.cpu.num_runnable", lambda: 2)


@pytest.mark.usefixtures("quiet")
def test_after_moving_away_this_thread_runs_elsewhere_and_may_run_where_it_did() -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2 or len(sharing_cache(min(allowed)) & allowed) == 1:
        pytest.skip("there is one CPU, or none that shares its cache")
    try:
        # The system may move us at any moment; it does not do so a hundred times.
        for _ in range(100):
            before = current_cpu()
            moved, after = move_away(), current_cpu()
            assert moved and os.sched_getaffinity(0) == allowed
            if after != before:
                return
        raise AssertionError("it stayed where it was")
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.usefixtures("quiet")
def test_who_may_run_on_one_cpu_alone_stays_there() -> None:
    allowed = os.sched_getaffinity(0)
    only = {min(allowed)}
    try:
        os.sched_setaffinity(0, only)
        assert not move_away()
        assert os.sched_getaffinity(0) == only
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.usefixtures("quiet")
def test_who_may_run_only_where_no_cache_is_shared_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.cpu.sharing_cache", lambda cpu: frozenset({cpu}))
    assert not move_away()


@pytest.mark.usefixtures("quiet")
def test_a_cpu_that_is_taken_away_meanwhile_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.cpu.sharing_cache", lambda _: frozenset({4000}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 4000})
    assert not move_away()


def test_nobody_moves_where_the_system_has_other_cpus(quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted as running may run there."""
    monkeypatch.setattr(os, "cpu_count", lambda: len(os.sched_getaffinity(0)) + 1)
    assert not move_away()


@pytest.mark.parametrize("text", ["9999/123 4567\n", "busy\n"])
def test_nobody_moves_where_many_cpus_are_busy_or_nobody_knows(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    allowed = os.sched_getaffinity(0)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("it moved"))
    (tmp_path / "loadavg").write_text(f"0.50 0.40 0.30 {text}")
    monkeypatch.setattr("kvstore.cpu.num_runnable", lambda: num_runnable(tmp_path / "loadavg"))
    assert not move_away()
    assert os.sched_getaffinity(0) == allowed


def test_how_many_run_is_what_the_system_says() -> None:
    assert 1 <= num_runnable() < 100_000


@pytest.mark.parametrize(
    ("listed", "shared"),
    [("0-1\n", {0, 1}), ("0-3,64-67\n", {0, 1, 2, 3, 64, 65, 66, 67}), ("5\n", {5}), ("?\n", set()), (None, set())],
)
def test_which_cpus_share_a_cache(listed: str | None, shared: set[int], tmp_path: Path) -> None:
    folder = tmp_path / "cpu5" / "cache" / "index3"
    folder.mkdir(parents=True)
    if listed is not None:
        (folder / "shared_cpu_list").write_text(listed)
    assert sharing_cache(5, tmp_path) == shared
