"""A few threads that carry out the pieces of one call side by side, the caller among them.

A disk works on several requests at once, and what the processor does to one piece (checksum, copy, cipher) fits in
while others are under way. It must not wait for its next request meanwhile: jobs are prepared before they can begin,
and what a job returns to be done later is put off while fewer than five jobs are running and more can begin.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

Rest = Callable[[], None]
Job = Callable[[], Rest | None]

_MOST_RUNNING: Final = 5


class Crew:
    """Thread-safe: calls share the threads, and each goes on in its caller's thread where all are busy. The threads
    begin when they are first needed and end with `close`, or with the crew."""

    def __init__(self, threads: int, name: str) -> None:
        # Of those helpers that were started; each takes one call at a time and carries out what there is to do.
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._helpers = [
            threading.Thread(target=_help, args=(self._calls,), name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        self._num_started = 0
        self._lock = threading.Lock()
        self._dismiss = weakref.finalize(self, _dismiss, self._calls, threads)

    def run(self, jobs: Iterable[Job]) -> None:
        """Carry out all jobs, and what they return, in no particular order; blocks until nothing is running. Raises
        what one of them raised, and then some may not have begun.

        Jobs are drawn from `jobs` by one thread at a time, a few before they begin, while others are running; what
        drawing raises counts as raised by a job.
        """
        call = _Call(iter(jobs))
        for number in range(len(self._helpers) + 1):
            if not call.draw():
                break
            if number and self._start(number):
                # A helper that comes late finds nothing to do.
                self._calls.put(call)
        call.work()
        call.wait()

    def close(self) -> None:
        """Wait until all threads have ended. Idempotent; no call may be running or come."""
        self._dismiss()
        for helper in self._helpers[: self._num_started]:
            helper.join()

    def _start(self, count: int) -> bool:
        """Have at least so many helpers; return False where no more thread can be started: those there are do it."""
        with self._lock:
            while self._num_started < count:
                try:
                    self._helpers[self._num_started].start()
                except RuntimeError:
                    return False
                self._num_started += 1
        return True


def _help(calls: "queue.SimpleQueue[_Call | None]") -> None:
    while (call := calls.get()) is not None:
        call.work()
        del call


def _dismiss(calls: "queue.SimpleQueue[_Call | None]", threads: int) -> None:
    for _ in range(threads):
        calls.put(None)


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
                may_begin = self._num_jobs < _MOST_RUNNING or self._is_exhausted
                if self._ready and may_begin:
                    self._num_jobs += 1
                    return partial(self._do, self._ready.popleft())
                may_draw = not self._is_drawing and not self._is_exhausted
                if not self._ready and may_begin and may_draw:
                    return self.draw
                if self._rests:
                    self._num_rests += 1
                    return partial(self._do_rest, self._rests.popleft())
                if self._is_exhausted:
                    # Whoever carries out a job goes on with what is left of it.
                    return None
                if may_draw and len(self._ready) < _MOST_RUNNING:
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
        return not (self._num_jobs or self._num_rests or self._is_drawing or (self._rests and not self._faults))
