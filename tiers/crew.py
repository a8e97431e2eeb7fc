"""A few threads that carry out the pieces of one call side by side, the caller among them.

A disk works on several requests at once, and what the processor does to one piece (checksum, copy, cipher) fits in
while others are under way. It must not wait for its next request meanwhile: jobs are prepared before they can begin,
and what a job returns to be done later is put off while fewer than five jobs are running.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

Rest = Callable[[], None]
Job = Callable[[], Rest | None]

# As many wait, prepared, for one of them to end.
_MOST_RUNNING: Final = 5


class Crew:
    """Thread-safe: calls share the threads, and each goes on in its caller's thread where all are busy."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)

    def run(self, jobs: Iterable[Job]) -> None:
        """Carry out all jobs, and what they return, in no particular order; blocks until nothing is running. Raises
        what one of them raised, and then some may not have begun.

        Jobs are drawn from `jobs` by one thread at a time, a few before they begin, while others are running; what
        drawing raises counts as raised by a job.
        """
        call = _Call(iter(jobs))
        # Where no thread can be started, those there are do it. One that comes late finds nothing to do.
        with contextlib.suppress(RuntimeError):
            for number in range(self._threads + 1):
                if not call.draw():
                    break
                if number:
                    self._executor.submit(call.work)
        call.work()
        call.wait()

    def close(self) -> None:
        """Idempotent. No call may be running."""
        self._executor.shutdown()


class _Call:
    """What is left to do of one call, and how much of it is being done."""

    def __init__(self, jobs: Iterator[Job]) -> None:
        self._jobs = jobs
        self._changed = threading.Condition()
        self._ready: deque[Job] = deque()
        self._rests: deque[Rest] = deque()
        self._num_jobs = 0
        self._num_rests = 0
        self._is_drawing = False
        self._is_exhausted = False
        self._faults: list[BaseException] = []

    def work(self) -> None:
        """Carry out jobs, and what they return, until there is nothing to begin."""
        while (step := self._next()) is not None:
            step()

    def wait(self) -> None:
        """Block until nothing is running. Raises what was raised."""
        with self._changed:
            self._changed.wait_for(self._has_ended)
            # A helper that comes late must not keep what the jobs hold.
            self._jobs = iter(())
            self._ready.clear()
            self._rests.clear()
            self._is_exhausted = True
            faults, self._faults = self._faults, []
            if faults:
                raise faults[0]

    def draw(self) -> bool:
        """Make one more job ready, unless another thread is about to; return False where there are no more."""
        with self._changed:
            if self._is_drawing or self._is_exhausted:
                return not self._is_exhausted
            self._is_drawing = True
        job, fault = None, None
        try:
            job = next(self._jobs, None)
        except BaseException as error:
            fault = error
        with self._changed:
            self._is_drawing = False
            self._is_exhausted = job is None
            if job is not None:
                self._ready.append(job)
            self._note(fault)
            return job is not None

    def _next(self) -> Callable[[], object] | None:
        """Wait until there is something to do for the calling thread, and return it; None where nothing will be."""
        with self._changed:
            while not self._faults:
                if self._ready and (self._num_jobs < _MOST_RUNNING or self._is_exhausted):
                    self._num_jobs += 1
                    return partial(self._do, self._ready.popleft())
                if self._rests:
                    self._num_rests += 1
                    return partial(self._do_rest, self._rests.popleft())
                if self._is_exhausted:
                    # Whoever carries out a job goes on with what is left of it.
                    return None
                if not self._is_drawing and len(self._ready) < _MOST_RUNNING:
                    return self.draw
                self._changed.wait()
            return None

    def _do(self, job: Job) -> None:
        rest: Rest | None = None
        fault: BaseException | None = None
        try:
            rest = job()
        except BaseException as error:
            fault = error
        with self._changed:
            self._num_jobs -= 1
            if rest is not None:
                self._rests.append(rest)
            self._note(fault)

    def _do_rest(self, rest: Rest) -> None:
        fault: BaseException | None = None
        try:
            rest()
        except BaseException as error:
            fault = error
        with self._changed:
            self._num_rests -= 1
            self._note(fault)

    def _note(self, fault: BaseException | None) -> None:
        """Let others know of a change; the lock is held."""
        if fault is not None:
            self._faults.append(fault)
        if self._faults or self._is_exhausted:
            self._changed.notify_all()
        else:
            self._changed.notify()

    def _has_ended(self) -> bool:
        is_left = (self._ready or self._rests) and not self._faults
        return not (self._num_jobs or self._num_rests or self._is_drawing or is_left)
