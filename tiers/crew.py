"""A few threads that carry out the pieces of one call side by side, the caller among them.

A disk works on several requests at once, and what the processor does to one piece (checksum, copy, cipher) fits in
while others are under way.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice

Job = Callable[[], None]


class Crew:
    """Thread-safe: calls share the threads, and each goes on in its caller's thread where all are busy."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)

    def run(self, jobs: Iterable[Job]) -> None:
        """Carry out all jobs, in no particular order; blocks until none is running. Raises what one of them raised, and
        then some may not have begun.

        A job is drawn from `jobs` when it is about to begin, by one thread at a time, so that the first ones are under
        way while later ones are prepared; what drawing raises counts as raised by a job.
        """
        drawn = iter(jobs)
        ahead = list(islice(drawn, self._threads + 1))
        call = _Call(chain(ahead, drawn))
        # Where no thread can be started, those there are do it. One that comes late finds nothing to do.
        with contextlib.suppress(RuntimeError):
            for _ in ahead[1:]:
                self._executor.submit(call.work)
        call.work()
        call.wait()

    def close(self) -> None:
        """Idempotent. No call may be running."""
        self._executor.shutdown()


class _Call:
    def __init__(self, jobs: Iterator[Job]) -> None:
        self._jobs = jobs
        self._changed = threading.Condition()
        self._num_running = 0
        self._faults: list[BaseException] = []

    def work(self) -> None:
        """Carry out jobs until there are no more."""
        while (job := self._begin()) is not None:
            fault = None
            try:
                job()
            except BaseException as error:
                fault = error
            self._end(fault)

    def wait(self) -> None:
        """Block until no job is running. Raises what one raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_running == 0)
            # A helper that comes late must not keep what the jobs hold.
            self._jobs = iter(())
            faults, self._faults = self._faults, []
            if faults:
                raise faults[0]

    def _begin(self) -> Job | None:
        with self._changed:
            if self._faults:
                return None
            try:
                job = next(self._jobs, None)
            except BaseException as error:
                self._faults.append(error)
                return None
            self._num_running += job is not None
            return job

    def _end(self, fault: BaseException | None) -> None:
        with self._changed:
            if fault is not None:
                self._faults.append(fault)
            self._num_running -= 1
            if self._num_running == 0:
                self._changed.notify()
