"""Jobs on several threads: all of them are done, or the fault is raised once none is running."""

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tiers.crew import Crew, Job


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew(3, "crew")
    yield crew
    crew.close()


@pytest.mark.parametrize("num_jobs", [0, 1, 2, 50])
def test_every_job_is_done_once(crew: Crew, num_jobs: int) -> None:
    done: list[int] = []
    crew.run([lambda number=number: done.append(number) for number in range(num_jobs)])
    assert sorted(done) == list(range(num_jobs))


def test_jobs_run_side_by_side(crew: Crew) -> None:
    together = threading.Barrier(4)
    crew.run([lambda: void(together.wait(30))] * 4)


def void(_: object) -> None:
    pass


def test_a_caller_goes_on_where_all_threads_are_busy(crew: Crew) -> None:
    may_end = threading.Event()
    started = threading.Barrier(5)

    def hold() -> None:
        started.wait(30)
        may_end.wait(30)

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(crew.run, [hold] * 4)
        started.wait(30)
        done: list[int] = []
        crew.run([lambda: done.append(1), lambda: done.append(2)])
        assert sorted(done) == [1, 2]
        may_end.set()
        busy.result()


def test_a_fault_is_raised_when_nothing_runs_any_more(crew: Crew) -> None:
    running: list[int] = []

    def fails() -> None:
        raise OSError("the disk")

    def lasts() -> None:
        running.append(1)
        running.pop()

    with pytest.raises(OSError, match="the disk"):
        crew.run([fails, *[lasts] * 20])
    assert running == []


def test_a_job_is_drawn_when_it_is_about_to_begin(crew: Crew) -> None:
    done: list[int] = []

    def jobs() -> Iterator[Job]:
        for number in range(50):
            # The first four, one for each thread, are drawn ahead; at most three others are running.
            assert len(done) >= number - 3 - 4
            yield lambda number=number: done.append(number)

    crew.run(jobs())
    assert sorted(done) == list(range(50))


def test_jobs_that_cannot_be_drawn_are_a_fault_like_others(crew: Crew) -> None:
    running: list[int] = []

    def lasts() -> None:
        running.append(1)
        time.sleep(0.01)
        running.pop()

    def jobs() -> Iterator[Job]:
        for _ in range(10):
            yield lasts
        raise OSError("there is no such file")

    with pytest.raises(OSError, match="no such file"):
        crew.run(jobs())
    assert running == []


def test_where_no_thread_can_be_started_those_there_are_do_it(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def refuse(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    crew.run([lambda number=number: done.append(number) for number in range(50)])
    assert sorted(done) == list(range(50))


def test_a_helper_that_comes_late_keeps_nothing_of_the_call(crew: Crew) -> None:
    may_end, started = threading.Event(), threading.Barrier(5)

    def hold() -> None:
        started.wait(30)
        may_end.wait(30)

    class Memory:
        pass

    def run_in_vain() -> "weakref.ref[Memory]":
        memory = Memory()
        with contextlib.suppress(OSError):
            crew.run([fails, lambda: void(memory)])
        return weakref.ref(memory)

    def fails() -> None:
        raise OSError("the disk")

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(crew.run, [hold] * 4)
        started.wait(30)
        kept = run_in_vain()
        gc.collect()
        assert kept() is None
        may_end.set()
        busy.result()
