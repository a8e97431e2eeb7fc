"""The worker's side: carries out the orders of each step on threads of its own, and says what has ended.

    before a step   clear      no store reads what the step may write; loads that the step needs are done
    after it        submit     what it has completed is queued to be stored
    then            take       loads and stores that have ended, for the scheduler

A step waits for the copy of a single block at the most, and for the loads that it needs itself where `load` is "sync".
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kvstore.client import Client
from kvstore.connectors.vllm_parts import scout
from kvstore.connectors.vllm_parts.fence import Fence
from kvstore.connectors.vllm_parts.gate import Gate
from kvstore.connectors.vllm_parts.jobs import LoadJob, LoadMeter, StoreJob
from kvstore.connectors.vllm_parts.loader import Loader
from kvstore.connectors.vllm_parts.orders import LoadOrder, News, Step, StoreOrder
from kvstore.connectors.vllm_parts.pages import Pages
from kvstore.connectors.vllm_parts.settings import Settings
from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.connectors.vllm_parts.storer import Storer
from kvstore.core.key import BlockKey, Namespace, engine_keys
from kvstore.region_pin import RegionPin

_log = logging.getLogger("vllm.kvstore")
_Job = TypeVar("_Job", LoadJob, StoreJob)

# What a step that runs no model waits for news at the most, so that the threads get the interpreter.
_IDLE_STEP_S = 0.002
# A thread that is copying is not stopped: a load that the step needs is waited for beyond its deadline that long.
_GRACE_S = 5.0
# Beyond so many blocks at one order the rest is an order of its own, so that what is done with is told in time.
_MAX_STORE_BLOCKS = 256


@dataclass(slots=True)
class Ended:
    """Requests whose stores, and whose loads, are over; pool blocks that were not filled, and the requests of those."""

    stored: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class Worker:
    """One rank. `may_store`: False where another rank stores the same bytes. The step's thread calls; threads begin
    with the first order, or at `begin`."""

    def __init__(
        self,
        settings: Settings,
        namespace: Namespace,
        pages: Pages,
        make_client: Callable[[], Client],
        counters: Counters,
        *,
        may_store: bool = True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings = settings
        self._root = namespace.root()
        self._pages = pages
        self._make_client = make_client
        self._counters = counters
        self._may_store = may_store
        self._is_paused = False
        self._clock = clock
        self._gate = Gate("worker", clock)
        self._fence = Fence()
        self._pins = RegionPin(pages)
        self._meter = LoadMeter()
        self._loader = Loader(pages, self._pins, self._gate, self._meter, counters, verify=settings.verify, clock=clock)
        self._storer = Storer(pages, self._pins, self._fence, self._gate, counters, sleep)
        self._loads: queue.SimpleQueue[LoadJob | None] = queue.SimpleQueue()
        self._stores: queue.SimpleQueue[StoreJob | None] = queue.SimpleQueue()
        # The lock is over all that follows.
        self._changed = threading.Condition()
        self._loading: dict[str, LoadJob] = {}
        self._ended_loads: list[LoadJob] = []
        self._storing: Counter[str] = Counter()
        self._queued_bytes = 0
        self._news = News()
        # The step of which it is not known yet that it was launched.
        self._begun: Step | None = None
        self._held: dict[str, float] = {}
        self._threads: list[threading.Thread] = []
        self._client: Client | None = None
        self._is_closed = False
        self._first_idle_s = scout.EVERY_S
        counters.level("attached", "worker", lambda: self._gate.is_attached)
        counters.level("store_queue_bytes", "", lambda: self._queued_bytes)
        counters.level("load_queue_blocks", "", self._num_loading)

    # ------------------------------------------------------------ the step's thread

    def begin(self) -> None:
        """Attach at once, from the thread that stores: else the first order does. Before any other call."""
        self._first_idle_s = 0.0
        self._start_threads()

    def clear(self, step: Step) -> None:
        """Let the step, and the loads it orders, write: no store reads those blocks any more."""
        for request_id in step.held:
            self._held[request_id] = self._clock() + self._settings.hold_s
        if self._begun is not None:
            # With speculative decoding vLLM says on the last pipeline rank alone that a step has come to its end.
            self.store(self._begun)
        withdrawn = self._fence.clear_all() if step.writes_anywhere else self._fence.clear(step.written)
        for load in step.loads:
            withdrawn += self._fence.clear(load.block_ids)
        self._counters.add("unstored_blocks", "overwritten", withdrawn)
        self._begun = step

    def stop_storing(self) -> None:
        """Store nothing any more, nothing of what is queued either; returns once nothing is read."""
        self._may_store = False
        self._fence.clear_all()

    def pause(self) -> None:
        """Return once the KV cache is not touched any more: its memory is about to be taken away. What waits to be
        stored is left out; loads have ended by now, since vLLM drains them. Idempotent."""
        self._is_paused = True
        self._fence.clear_all()

    def resume(self) -> None:
        """The KV cache is back in its place, without its content. Idempotent."""
        self._is_paused = False

    def load(self, step: Step) -> None:
        """Begin the step's loads; return when those are over that it needs itself."""
        needed = [job for job in map(self._begin_load, step.loads) if not job.order.is_async]
        for job in needed:
            if job.over.wait(max(0.0, job.deadline_s - self._clock())):
                continue
            if job.claim():
                self._load_ended(job, set(), "timed_out")
            elif not job.over.wait(_GRACE_S):
                # A copy that takes so long would go on into blocks that are others' by then.
                raise RuntimeError("kvstore: a load does not end; the KV cache cannot be trusted")

    def store(self, step: Step) -> None:
        """Queue what the step has completed, which has been launched by now."""
        self._begun = None
        if step.num_tokens:
            with self._changed:
                self._news.steps.append(step.number)
        if not step.stores:
            return
        mark = self._pages.mark()
        for order in step.stores:
            for start in range(0, len(order.hashes), _MAX_STORE_BLOCKS):
                self._begin_store(_part(order, start), mark)

    def take(self, step: Step) -> Ended:
        """Return what has ended since the last call."""
        self._expire()
        ended = Ended()
        with self._changed:
            if not step.num_tokens and not self._ended_loads and (self._loading or self._held):
                self._changed.wait(_IDLE_STEP_S)
            jobs = self._ended_loads
            for job in jobs:
                ended.failed_blocks.update(job.failed_blocks())
                if job.num_missing:
                    ended.failed.add(job.order.request_id)
                if job.order.is_async:
                    ended.loaded.add(job.order.request_id)
            # With the news of the same step, not of one before: ours must not think that vLLM has let go already. And
            # all or nothing, since vLLM waits for each of them.
            self._news.add([_news_of(job) for job in jobs])
            self._ended_loads = []
            now = self._clock()
            waiting = set() if self._begun is None else {order.request_id for order in self._begun.stores}
            for request_id, until_s in list(self._held.items()):
                is_stored = not self._storing[request_id] and request_id not in waiting
                # A daemon that says nothing stores nothing soon; the fence keeps what waits all the same.
                if is_stored or now >= until_s or not self._gate.is_open or self._gate.is_silent:
                    del self._held[request_id]
                    ended.stored.add(request_id)
        return ended

    def take_news(self) -> News | None:
        with self._changed:
            if self._news.is_empty():
                return None
            news, self._news = self._news, News()
        return news

    def close(self) -> None:
        """Store what is queued, for `drain_s` at the most, and end. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        until_s = time.monotonic() + self._settings.drain_s
        for _ in self._threads[1:]:
            self._loads.put(None)
        self._stores.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        self._storer.hurry = True
        if self._threads:
            self._threads[0].join(0.5)
        self._pins.close(1.0)
        if self._client is not None and not any(thread.is_alive() for thread in self._threads):
            self._client.close()

    # ------------------------------------------------------------ loads

    def _begin_load(self, order: LoadOrder) -> LoadJob:
        """Queue a load; where even that fails it has ended, since vLLM waits for every one to end."""
        job = LoadJob(order, len(order.hashes), self._clock())
        with self._changed:
            self._loading[order.request_id] = job
        try:
            if not order.is_async:
                # vLLM may have queued work on those blocks, such as zeroing them; for others it leaves that out.
                job.mark = self._pages.mark()
            job.keys = engine_keys(self._root, order.hashes)
            self._start_threads()
            self._loads.put(job)
        except Exception:
            _log.exception("kvstore: a load cannot begin")
            self._counters.add("faults", "load")
            if job.claim():
                self._load_ended(job, set(), "fault")
        return job

    def _run_load(self, job: LoadJob, client: Client) -> None:
        if job.claim():
            tiers = set(job.order.tiers)
            self._meter.begin(tiers, self._clock())
            self._loader.run(job, client, partial(self._load_ended, job, tiers))

    def _load_ended(self, job: LoadJob, tiers: set[int], why: str) -> None:
        now = self._clock()
        measured = self._meter.end(tiers)
        self._counters.add("loads", why)
        self._counters.add("failed_blocks", why, job.num_missing if why in ("silent", "timed_out") else 0)
        self._counters.took("load", now - job.queued_s)
        failed_from = job.failed_from()
        with self._changed:
            self._loading.pop(job.order.request_id, None)
            self._ended_loads.append(job)
            self._news.loads += measured
            if failed_from is not None and why == "silent":
                self._news.silences.append((job.order.tiers[failed_from], now - job.queued_s))
            self._changed.notify_all()
        job.over.set()

    def _expire(self) -> None:
        """End the loads for which no thread was free in time."""
        now = self._clock()
        with self._changed:
            late = [job for job in self._loading.values() if now >= job.deadline_s]
        for job in late:
            if job.claim():
                self._load_ended(job, set(), "timed_out")

    def _num_loading(self) -> int:
        with self._changed:
            return sum(job.num_missing for job in self._loading.values())

    # ------------------------------------------------------------ stores

    def _begin_store(self, order: StoreOrder, mark: object) -> None:
        num_bytes = len(order.hashes) * self._pages.payload_bytes
        if not self._may_store or self._is_paused or self._queued_bytes + num_bytes > self._settings.max_store_bytes:
            with self._changed:
                self._settle(order, order.depth if self._may_store else None)
            if self._may_store:
                self._counters.add("unstored_blocks", "lagging", len(order.hashes))
            return
        keys = engine_keys(self._root, order.hashes)
        parent = self._root if order.parent is None else engine_keys(self._root, [order.parent])[0]
        job = StoreJob(order, keys, BlockKey(parent), self._fence.expect(order.block_ids), mark, self._clock())
        # First what may fail: bytes that nobody works on would count as queued for ever.
        try:
            self._start_threads()
        except Exception:
            for read in job.reads:
                self._fence.end(read)
            raise
        with self._changed:
            self._storing[order.request_id] += 1
            self._queued_bytes += num_bytes
        self._stores.put(job)

    def _run_store(self, job: StoreJob, client: Client) -> None:
        order = job.order
        try:
            self._storer.run(job, client)
        finally:
            self._counters.took("store", self._clock() - job.queued_s)
            with self._changed:
                self._queued_bytes -= len(order.hashes) * self._pages.payload_bytes
                self._storing[order.request_id] -= 1
                if not self._storing[order.request_id]:
                    del self._storing[order.request_id]
                self._settle(order, None if job.unstored_from is None else order.depth + job.unstored_from)
                self._changed.notify_all()

    def _settle(self, order: StoreOrder, unstored_from: int | None) -> None:
        settled = {order.request_id: len(order.hashes)}
        unstored = {} if unstored_from is None else {order.request_id: unstored_from}
        self._news.add([News(settled=settled, unstored=unstored)])

    # ------------------------------------------------------------ threads

    def _start_threads(self) -> None:
        if self._threads or self._is_closed:
            return
        self._client = self._make_client()
        self._threads = [threading.Thread(target=self._serve_stores, name="kvstore-store", daemon=True)]
        self._threads += [
            threading.Thread(target=self._serve_loads, name=f"kvstore-load-{number}", daemon=True)
            for number in range(self._settings.num_loaders)
        ]
        for thread in self._threads:
            thread.start()

    def _serve_stores(self) -> None:
        assert self._client is not None
        _serve(self._stores, self._run_store, self._client.clone(), self._scout, self._first_idle_s)

    def _serve_loads(self) -> None:
        assert self._client is not None
        _serve(self._loads, self._run_load, self._client.clone())

    def _scout(self, client: Client) -> None:
        scout.scout(self._gate, [(client, BlockKey(self._root))])


def _serve(
    jobs: "queue.SimpleQueue[_Job | None]",
    run: Callable[[_Job, Client], None],
    client: Client,
    when_idle: Callable[[Client], None] | None = None,
    wait_s: float = 0.0,
) -> None:
    """Run the jobs, up to a None. `when_idle` is called when nothing has come for `wait_s`, later for a while."""
    try:
        while True:
            try:
                job = jobs.get(timeout=None if when_idle is None else wait_s)
            except queue.Empty:
                assert when_idle is not None
                when_idle(client)
            else:
                if job is None:
                    return
                try:
                    run(job, client)
                except Exception:
                    # The next one may go well, and without this thread nothing would any more.
                    _log.exception("kvstore: a job failed")
            wait_s = scout.EVERY_S
    finally:
        client.close()


def _news_of(job: LoadJob) -> News:
    request_id = job.order.request_id
    failed_from = job.failed_from()
    return News(
        num_ended={request_id: 1},
        load_ends={request_id: job.by_tier},
        failed_from={} if failed_from is None else {request_id: failed_from},
    )


def _part(order: StoreOrder, start: int) -> StoreOrder:
    """Return the order's blocks from `start` on, at most _MAX_STORE_BLOCKS."""
    end = start + _MAX_STORE_BLOCKS
    if start == 0 and end >= len(order.hashes):
        return order
    parent = order.hashes[start - 1] if start else order.parent
    return StoreOrder(
        order.request_id,
        order.hashes[start:end],
        order.block_ids[start:end],
        parent,
        order.depth + start,
        order.tokens_of(start, end),
    )
