"""Jobs on several threads: all of them are done, or the fault is raised once none is running."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tiers.crew import Crew


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
