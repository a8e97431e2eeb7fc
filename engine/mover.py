"""The threads that move blocks between HBM and kvstore: fetches in, stores out.

Covers: when to wait, copy, check, retry and give up. Does not cover: which blocks, see `engine/caching.py`. Whatever
kvstore does, a job ends with an answer in bounded time, and only bytes that were still valid after their copy count.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from engine.counters import Counters
from engine.jobs import FetchJob, StoreJob
from engine.link import FetchStream, KVClient, Links, Roots
from kvstore.client import LandedBlock
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.outcome import Outcome, TierKind

_log = logging.getLogger(__name__)
_Job = TypeVar("_Job", FetchJob, StoreJob)

# A cancelled fetch is noticed at least this often.
_LANDED_TIMEOUT_S = 0.1
_STORE_TRIES = 8
_MIN_RETRY_S, _MAX_RETRY_S = 0.01, 0.5
# After these outcomes of a store no further attempt is needed: the block is there, or somebody is writing it.
_SETTLED = (Outcome.OK, Outcome.EXISTS, Outcome.PENDING)
# No room for now; or the daemon was started anew between grant and commit.
_WORTH_ANOTHER_TRY = (Outcome.BUSY, Outcome.STALE)


class Hbm(Protocol):
    """The bytes of the HBM pool, see `tiers/hbm.py`; both calls return when the copy is complete."""

    def gather(self, pool_blocks: Sequence[int], out: memoryview) -> None: ...

    def scatter(self, payload: memoryview, pool_blocks: Sequence[int]) -> None: ...


class MoverThreads:
    """Bounded queues of jobs with threads behind them. `fetched` and `stored` are called on those threads."""

    def __init__(
        self,
        roots: Roots,
        hbm: Hbm,
        fetched: Callable[[FetchJob], None],
        stored: Callable[[StoreJob], None],
        counters: Counters,
        faults: Counters,
        *,
        num_fetchers: int = 2,
        max_jobs: int = 64,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._fetches: queue.Queue[FetchJob | None] = queue.Queue(max_jobs)
        self._stores: queue.Queue[StoreJob | None] = queue.Queue(max_jobs)
        fetcher = _Fetcher(hbm, fetched, counters, faults, clock)
        storer = _Storer(hbm, stored, counters, faults, sleep)
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


class _Fetcher:
    def __init__(
        self,
        hbm: Hbm,
        fetched: Callable[[FetchJob], None],
        counters: Counters,
        faults: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._hbm = hbm
        self._fetched = fetched
        self._counters = counters
        self._faults = faults
        self._clock = clock

    def run(self, job: FetchJob, links: Links) -> None:
        """Do the job and report it, unless the step loop has taken it back."""
        if not job.claim():
            return
        try:
            self._fetch(job, links.client(job.tenant))
        except TierUnavailable:
            job.outcome = Outcome.UNAVAILABLE
        except ProtocolError as error:
            job.outcome = Outcome.REJECTED
            self._faults.add(f"fetch_refused_{error.code}")
        except Exception:
            _log.exception("a fetch failed")
            job.outcome = Outcome.UNAVAILABLE
            self._faults.add("fetch_fault")
        finally:
            self._counters.add("fetched_blocks", job.landed)
            self._fetched(job)

    def _fetch(self, job: FetchJob, client: KVClient) -> None:
        began_s = self._clock()
        wait_s = job.give_up_at_s[-1] - began_s
        if wait_s <= 0:
            job.outcome = Outcome.TIMED_OUT
            return
        with client.fetch(job.keys, deadline_s=wait_s) as stream:
            self._take_in(job, stream, began_s)

    def _take_in(self, job: FetchJob, stream: FetchStream, began_s: float) -> None:
        """Copy blocks as they land, in any order, until all are there, one fails, or patience ends."""
        sources: list[TierKind | None] = [None] * len(job.keys)
        loads: dict[TierKind, tuple[int, float]] = {}
        # Blocks from `limit` on are of no use: they hang on one that failed.
        limit = len(job.keys)
        while job.landed < limit:
            wait_s = job.give_up_at_s[job.landed] - self._clock()
            if job.cancelled or wait_s <= 0:
                job.outcome = Outcome.CANCELLED if job.cancelled else Outcome.TIMED_OUT
                break
            blocks = stream.landed(min(wait_s, _LANDED_TIMEOUT_S))
            for block in blocks:
                if block.index >= limit:
                    continue
                outcome = self._copy(job, block, stream)
                if outcome is not Outcome.OK:
                    limit, job.outcome = block.index, outcome
                    continue
                sources[block.index] = block.source
                num_bytes = len(block.view) if block.view is not None else 0
                before, _ = loads.get(block.source, (0, 0.0))
                loads[block.source] = before + num_bytes, self._clock() - began_s
            if blocks:
                stream.release_blocks([block.index for block in blocks])
            while job.landed < limit and (source := sources[job.landed]) is not None:
                job.sources.append(source)
                job.landed += 1
            if not blocks and stream.done and job.landed < limit:
                job.outcome = Outcome.MISS
                break
        job.loads = [(tier, num_bytes, seconds) for tier, (num_bytes, seconds) in loads.items()]
        if job.outcome is Outcome.TIMED_OUT:
            self._note_silence(job, self._clock() - began_s)

    def _copy(self, job: FetchJob, block: LandedBlock, stream: FetchStream) -> Outcome:
        if block.outcome is not Outcome.OK or block.view is None:
            return block.outcome if block.outcome is not Outcome.OK else Outcome.REJECTED
        self._hbm.scatter(block.view, job.pool_blocks[block.index])
        if not stream.still_valid(block):
            self._faults.add("stale_slot")
            return Outcome.STALE
        return Outcome.OK

    def _note_silence(self, job: FetchJob, seconds: float) -> None:
        """Let the tier that was waited for in vain count as at least so slow, else the next request waits as well."""
        tier = job.expected[job.landed]
        missing = sum(kind is tier for kind in job.expected[job.landed :])
        job.loads.append((tier, missing * job.block_bytes, seconds))


class _Storer:
    def __init__(
        self,
        hbm: Hbm,
        stored: Callable[[StoreJob], None],
        counters: Counters,
        faults: Counters,
        sleep: Callable[[float], None],
    ) -> None:
        self._hbm = hbm
        self._stored = stored
        self._counters = counters
        self._faults = faults
        self._sleep = sleep
        self.hurry = False

    def run(self, job: StoreJob, links: Links) -> None:
        """Do the job and report it."""
        try:
            self._store(job, links.client(job.tenant))
        except TierUnavailable:
            self._counters.add("store_unavailable_blocks", len(job.keys) - job.num_stored)
        except ProtocolError as error:
            self._faults.add(f"store_refused_{error.code}")
        except Exception:
            _log.exception("a store failed")
            self._faults.add("store_fault")
        finally:
            self._stored(job)

    def _store(self, job: StoreJob, client: KVClient) -> None:
        """Offer the blocks in prefix order until all are settled; from the first that must wait on, try again later."""
        for _ in range(1 if self.hurry else _STORE_TRIES):
            outcomes, retry_s = self._offer_rest(job, client)
            settled = next((i for i, outcome in enumerate(outcomes) if outcome not in _SETTLED), len(outcomes))
            self._count(outcomes[:settled])
            job.num_stored += settled
            if settled == len(outcomes):
                return
            if outcomes[settled] not in _WORTH_ANOTHER_TRY:
                self._count(outcomes[settled:])
                return
            self._sleep(min(max(retry_s, _MIN_RETRY_S), _MAX_RETRY_S))
        self._counters.add("store_gave_up_blocks", len(job.keys) - job.num_stored)

    def _offer_rest(self, job: StoreJob, client: KVClient) -> tuple[list[Outcome], float]:
        """Ask for slots for what is not settled yet, fill and commit them; return the outcomes and when to retry."""
        first = job.num_stored
        keys, groups = job.keys[first:], job.pool_blocks[first:]
        grant = client.store(keys, job.keys[first - 1] if first else job.parent, job.depth + first)
        outcomes = [block.outcome for block in grant.blocks]
        granted = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        if granted:
            written = [self._copy(groups[i], grant.blocks[i].view) for i in granted]
            generations = [grant.blocks[i].generation for i in granted]
            committed = client.commit([keys[i] for i in granted], generations, written)
            for i, done, outcome in zip(granted, written, committed, strict=True):
                outcomes[i] = outcome if done else Outcome.UNAVAILABLE
        return outcomes, grant.retry_s

    def _copy(self, pool_blocks: Sequence[int], view: memoryview | None) -> bool:
        """Return whether the block's bytes are all in `view`; never raises, since then the grant must be given back."""
        if view is None:
            return False
        try:
            self._hbm.gather(pool_blocks, view)
        except Exception:
            _log.exception("a block could not be copied out of HBM")
            self._faults.add("store_copy_fault")
            return False
        return True

    def _count(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in set(outcomes):
            self._counters.add(f"store_{outcome.label}_blocks", outcomes.count(outcome))


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
