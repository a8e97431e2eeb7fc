"""Jobs on several threads: all of them are done, or the fault is raised once none is running."""

import contextlib
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tiers.crew import Crew, Job, Rest, _Call


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


@pytest.mark.parametrize("num_helpers", [0, 1])
def test_where_no_more_threads_can_be_started_those_there_are_do_it(
    num_helpers: int, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []
    refused = threading.Event()

    def begin(thread: threading.Thread) -> None:
        if len(started) == num_helpers:
            refused.set()
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    done: list[int] = []

    def work(number: int) -> None:
        assert refused.wait(30)
        done.append(number)

    crew.run([partial(work, number) for number in range(50)])
    assert sorted(done) == list(range(50))
    monkeypatch.undo()
    together = threading.Barrier(4)
    crew.run([lambda: void(together.wait(30))] * 4)


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_helper_that_comes_late_keeps_nothing_of_the_call(crew: Crew, is_begun: bool) -> None:
    may_end, started = threading.Event(), threading.Barrier(5)

    def hold() -> None:
        started.wait(30)
        may_end.wait(30)

    class Memory:
        pass

    def run_in_vain() -> "weakref.ref[Memory]":
        memory = Memory()
        with contextlib.suppress(OSError):
            crew.run([lambda: partial(void, memory), fails] if is_begun else [fails, lambda: void(memory)])
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


def test_what_is_left_of_jobs_is_done_before_run_returns(crew: Crew) -> None:
    choice = random.Random(1)
    for _ in range(300):
        done: list[int] = []

        def rest(number: int, done: list[int], wait_s: float) -> None:
            time.sleep(wait_s)
            done.append(number)

        def job(number: int, done: list[int], waits_s: tuple[float, float]) -> Rest:
            time.sleep(waits_s[0])
            return partial(rest, number, done, waits_s[1])

        waits_s = [(choice.choice([0, 0.0002]), choice.choice([0, 0.0004])) for _ in range(6)]
        crew.run([partial(job, number, done, both) for number, both in enumerate(waits_s)])
        assert sorted(done) == list(range(6))


def test_what_is_left_waits_while_more_jobs_can_begin() -> None:
    done: list[str] = []

    def job(number: int) -> Rest:
        done.append(f"job {number}")
        return lambda: done.append(f"rest {number}")

    # Without helpers no more than one job runs at once.
    Crew(0, "alone").run(partial(job, number) for number in range(3))
    assert done == ["job 0", "job 1", "job 2", "rest 0", "rest 1", "rest 2"]


def test_what_is_left_is_done_while_enough_jobs_run() -> None:
    crew, rest_was_done, lock = Crew(7, "crew"), threading.Event(), threading.Lock()
    most_running = num_running = 0

    def job(number: int) -> Rest | None:
        nonlocal most_running, num_running
        with lock:
            num_running += 1
            # The last ones begin all at once.
            most_running = max(most_running, num_running if number < 80 else 0)
        if number:
            # For ever, if only those that run go on: there are more of them than may run at once.
            assert rest_was_done.wait(30)
        with lock:
            num_running -= 1
        return None if number else rest_was_done.set

    crew.run(partial(job, number) for number in range(100))
    crew.close()
    assert most_running == 5


def test_after_a_fault_nothing_begins() -> None:
    done: list[int] = []

    def fails() -> None:
        raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        Crew(0, "alone").run([lambda: partial(done.append, 0), fails, lambda: done.append(1)])
    assert done == []


def test_a_fault_in_what_is_left_is_raised(crew: Crew) -> None:
    def fails() -> None:
        raise OSError("the checksum")

    with pytest.raises(OSError, match="the checksum"):
        crew.run([lambda: fails, lambda: None])


@pytest.mark.parametrize("is_closed", [True, False])
def test_threads_end_with_their_crew(is_closed: bool) -> None:
    crew = Crew(2, "to-end")
    together = threading.Barrier(3)
    crew.run([lambda: void(together.wait(30))] * 3)
    helpers = [thread for thread in threading.enumerate() if thread.name.startswith("to-end")]
    assert len(helpers) == 2
    if is_closed:
        crew.close()
        crew.close()
    else:
        del crew
        gc.collect()
        for helper in helpers:
            helper.join(30)
    assert not any(helper.is_alive() for helper in helpers)


def test_run_waits_for_what_nobody_has_begun_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper has carried out the last job, and has not come to what is left of it."""
    crew, find, wait = Crew(1, "crew"), _Call._next, _Call.wait
    is_waiting = threading.Event()

    def find_late(call: _Call) -> Callable[[], object] | None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)
        return find(call)

    def tell_and_wait(call: _Call) -> None:
        is_waiting.set()
        wait(call)

    monkeypatch.setattr(_Call, "_next", find_late)
    monkeypatch.setattr(_Call, "wait", tell_and_wait)
    is_begun = threading.Event()
    done: list[int] = []

    def job() -> Rest | None:
        if threading.current_thread() is threading.main_thread():
            assert is_begun.wait(30)
            return None
        is_begun.set()
        assert is_waiting.wait(30)
        return lambda: done.append(1)

    crew.run([job, job])
    assert done == [1]
    crew.close()


def test_after_a_fault_run_waits_for_whoever_draws(crew: Crew) -> None:
    is_drawing, is_drawn = threading.Event(), threading.Event()

    def fails() -> None:
        assert is_drawing.wait(30)
        raise OSError("the disk")

    def jobs() -> Iterator[Job]:
        yield from [fails, fails, fails, lambda: None]
        is_drawing.set()
        time.sleep(0.05)
        is_drawn.set()
        yield lambda: None

    with pytest.raises(OSError, match="the disk"):
        crew.run(jobs())
    assert is_drawn.is_set()
