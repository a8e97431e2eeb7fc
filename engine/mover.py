"""The threads that move blocks between HBM and kvstore: fetches in, stores out.

Covers: queues and threads. Does not cover: which blocks are moved (`engine/caching.py`), what is done with a job
(`engine/fetcher.py`, `engine/storer.py`). Whatever kvstore does, a job ends with an answer in bounded time.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from engine.counters import Counters
from engine.fetcher import Fetcher
from engine.jobs import FetchJob, StoreJob
from engine.link import Links, Roots
from engine.storer import Storer
from kvstore.region_pin import Hbm, RegionPin

_Job = TypeVar("_Job", FetchJob, StoreJob)

# A fetch has a thread for as long as it runs, and mostly waits for a slow tier: those of fast ones must find one free.
_NUM_FETCHERS = 6


class Movers(Protocol):
    """The threads that move blocks, as the step loop sees them: both calls return at once, False where full."""

    def fetch(self, job: FetchJob) -> bool: ...

    def store(self, job: StoreJob) -> bool: ...


class MoverThreads:
    """Bounded queues of jobs with threads behind them. `progressed` (blocks of some fetch have landed), `fetched` and
    `stored` are called on those threads. `layer_ends`: see `Fetcher`."""

    def __init__(
        self,
        roots: Roots,
        hbm: Hbm,
        progressed: Callable[[], None],
        fetched: Callable[[FetchJob], None],
        stored: Callable[[StoreJob], None],
        counters: Counters,
        faults: Counters,
        *,
        num_fetchers: int = _NUM_FETCHERS,
        max_jobs: int = 64,
        layer_ends: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._fetches: queue.Queue[FetchJob | None] = queue.Queue(max_jobs)
        self._stores: queue.Queue[StoreJob | None] = queue.Queue(max_jobs)
        self.pins = RegionPin(hbm)
        fetcher = Fetcher(hbm, self.pins, progressed, fetched, counters, faults, clock, layer_ends)
        storer = Storer(hbm, self.pins, stored, counters, faults, sleep)
        self._threads = [
            threading.Thread(
                target=_serve, args=(roots, self._fetches, fetcher.run), name=f"engine-fetch-{number}", daemon=True
            )
            for number in range(num_fetchers)
        ]
        self._store_thread = threading.Thread(
            target=_serve, args=(roots, self._stores, storer.run), name="engine-store", daemon=True
        )
        self._storer = storer

    def start(self) -> None:
        for thread in (*self._threads, self._store_thread):
            thread.start()

    def fetch(self, job: FetchJob) -> bool:
        return _offer(self._fetches, job)

    def store(self, job: StoreJob) -> bool:
        return _offer(self._stores, job)

    def close(self, timeout_s: float = 5.0) -> None:
        """Finish what is queued and end the threads; after `timeout_s` stores are no longer retried. Idempotent."""
        deadline_s = time.monotonic() + timeout_s
        for _ in self._threads:
            _put_end(self._fetches, deadline_s)
        _put_end(self._stores, deadline_s)
        for thread in (*self._threads, self._store_thread):
            if thread.is_alive():
                thread.join(max(0.0, deadline_s - time.monotonic()))
        self._storer.hurry = True
        if self._store_thread.is_alive():
            self._store_thread.join(1.0)
        self.pins.close(max(1.0, deadline_s - time.monotonic()))


def _serve(roots: Roots, jobs: "queue.Queue[_Job | None]", run: Callable[[_Job, Links], None]) -> None:
    links = Links(roots)
    try:
        while (job := jobs.get()) is not None:
            run(job, links)
    finally:
        links.close()


def _offer(jobs: "queue.Queue[_Job | None]", job: _Job) -> bool:
    try:
        jobs.put_nowait(job)
    except queue.Full:
        return False
    return True


def _put_end(jobs: "queue.Queue[_Job | None]", deadline_s: float) -> None:
    try:
        jobs.put(None, timeout=max(0.0, deadline_s - time.monotonic()))
    except queue.Full:
        return
