"""A few threads that carry out the pieces of one call side by side, the caller among them.

A disk works on several requests at once, and what the processor does to one piece (checksum, copy, cipher) fits in
while others are under way.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

Job = Callable[[], None]


class Crew:
    """Thread-safe: calls share the threads, and each goes on in its caller's thread where all are busy."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)

    def run(self, jobs: Sequence[Job]) -> None:
        """Carry out all jobs, in no particular order; blocks until none is running. Raises what one of them raised, and
        then some may not have begun."""
        if len(jobs) == 1:
            jobs[0]()
            return
        waiting = deque(jobs)
        faults: list[BaseException] = []

        def work() -> None:
            while True:
                try:
                    job = waiting.popleft()
                except IndexError:
                    return
                try:
                    job()
                except BaseException as fault:
                    waiting.clear()
                    faults.append(fault)

        helpers = [self._executor.submit(work) for _ in range(min(len(jobs) - 1, self._threads))]
        work()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
        if faults:
            raise faults[0]

    def close(self) -> None:
        """Idempotent. No call may be running."""
        self._executor.shutdown()
