"""Replays a trace against GPUs and tiers that are given by figures, to compare ways of using a cache.

One request: looked up on arrival, planned, its blocks queued at their tiers' links, its prompt computed chunk by chunk
by the engine with the least work in front of it, its time to first token noted, its blocks stored. What is modelled:

    link     one per tier (DRAM: one per engine); blocks one after the other in order of asking, each there `latency_s`
             after it was sent, so that latency is paid once per burst
    engine   prefill in chunks; before each chunk it takes the oldest request that can go on, so one that waits for its
             loads does not hold up the others
    tiers    see `residence.py`

The strategies differ in their plans alone. `recompute` and `load` compute or load all that is cached. `static_cut` and
`two_ended` are the best prefix cut and the best two-ended plan for this very request, from the tiers its blocks lie
in, as if nothing else were going on. `ours` is the best interval, with the queues of the links and of the engine and
with a price on GPU seconds. With `two_ended` and `ours` a GPU that would be idle computes what is still on its way,
front first, where that ends before the loads are expected to or they are late; what was computed is not sent any more.

Does not cover: decoding, HBM as a cache, writes on the links, the gain of batching short prefills. Deterministic.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kvstore.core.outcome import TierKind
from policies.cost import LoadCost
from policies.interval import Interval, Question, compare
from policies.price import GpuPrice
from policies.simulator.residence import Residence
from policies.simulator.setting import Link, Outcome, Setting, Strategy
from policies.trace import TraceRequest


@dataclass(eq=False, slots=True)
class _Job:
    """A request on its way. The cached blocks [interval.start, interval.end) are not loaded."""

    index: int
    request: TraceRequest
    engine: "_Engine"
    interval: Interval
    # Which of the cached blocks have landed.
    is_there: list[bool]
    # When the plan expects all loads to be there.
    loaded_at_s: float
    # Planned work that has not been begun.
    left_s: float
    # Tokens from the front that are computed or loaded without a gap; not moved by loads while a chunk is computed.
    position: int = 0
    is_computed: bool = False


@dataclass(eq=False, slots=True)
class _Queue:
    """What is waiting for one link."""

    link: Link
    block_s: float
    waiting: deque[tuple[_Job, int]] = field(default_factory=deque)
    is_busy: bool = False
    free_at_s: float = 0.0

    def queue_s(self, now: float) -> float:
        return (max(0.0, self.free_at_s - now) if self.is_busy else 0.0) + len(self.waiting) * self.block_s


@dataclass(eq=False, slots=True)
class _Engine:
    ram: _Queue
    jobs: list[_Job] = field(default_factory=list)
    is_busy: bool = False
    free_at_s: float = 0.0
    # Planned work of its jobs that has not been begun.
    backlog_s: float = 0.0

    def queue_s(self, now: float) -> float:
        return max(self.free_at_s - now, 0.0) + self.backlog_s


class Simulation:
    """One run of one strategy over one trace; `run` may be called once."""

    def __init__(self, setting: Setting, strategy: Strategy) -> None:
        self._setting = setting
        self._strategy: Strategy = strategy
        self._meets = strategy in ("two_ended", "ours")
        self._engines = [_Engine(self._queue(TierKind.RAM)) for _ in range(setting.num_engines)]
        self._shared = {tier: self._queue(tier) for tier in (TierKind.SSD, TierKind.S3)}
        self._residence = Residence(
            setting.links[TierKind.RAM].capacity_blocks, setting.links[TierKind.SSD].capacity_blocks
        )
        self._price = GpuPrice(setting.num_engines, 0.0)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._now = 0.0
        self._ttft_s: list[float] = []
        self._gpu_busy_s = 0.0
        self._computed_tokens = 0
        self._loaded_blocks = dict.fromkeys((TierKind.RAM, TierKind.SSD, TierKind.S3), 0)

    def run(self, requests: Sequence[TraceRequest], progress: Callable[[int], None] = lambda done: None) -> Outcome:
        """Return what came out. `progress` is called with the number of requests that have arrived, now and then."""
        self._ttft_s = [0.0] * len(requests)
        arrived = 0
        while self._events or arrived < len(requests):
            if arrived < len(requests) and (not self._events or requests[arrived].arrival_s <= self._events[0][0]):
                self._now = requests[arrived].arrival_s
                self._arrive(arrived, requests[arrived])
                arrived += 1
                if arrived % 256 == 0 or arrived == len(requests):
                    progress(arrived)
            else:
                self._now, _, action = heapq.heappop(self._events)
                action()
        return Outcome(self._ttft_s, self._gpu_busy_s, self._now, self._computed_tokens, self._loaded_blocks)

    # ------------------------------------------------------------ arrival

    def _arrive(self, index: int, request: TraceRequest) -> None:
        engine = min(self._engines, key=lambda engine: engine.queue_s(self._now))
        # The last token is computed in any case: its logits are the answer.
        usable = (request.prompt_tokens - 1) // self._setting.block_tokens
        tiers = self._residence.lookup(request.hash_ids[:usable])
        self._price.arrived(self._now)
        loads = self._loads(engine, tiers)
        interval = self._plan(request, tiers, engine, loads)
        outside = Counter([*tiers[: interval.start], *tiers[interval.end :]])
        load_s = max((loads[tier].predict(n * self._setting.block_bytes) for tier, n in outside.items()), default=0.0)
        job = _Job(index, request, engine, interval, [False] * len(tiers), self._now + load_s, interval.gpu_s)
        engine.jobs.append(job)
        engine.backlog_s += job.left_s
        # The head in order; the tail from its end, so that computing from the front meets it wherever it is.
        for block in (*range(interval.start), *range(len(tiers) - 1, interval.end - 1, -1)):
            self._queue_of(engine, tiers[block]).waiting.append((job, block))
        for tier in (TierKind.RAM, TierKind.SSD, TierKind.S3):
            self._send(tier, self._queue_of(engine, tier))
        self._compute(engine)

    def _loads(self, engine: _Engine, tiers: list[TierKind]) -> dict[TierKind, LoadCost]:
        """Return what the strategy takes loading for: only ours looks at the queues."""
        costs = {}
        for tier in set(tiers):
            link = self._setting.links[tier]
            queue_s = self._queue_of(engine, tier).queue_s(self._now) if self._strategy == "ours" else 0.0
            costs[tier] = LoadCost(link.latency_s, 1 / link.bytes_per_s, queue_s)
        return costs

    def _plan(
        self, request: TraceRequest, tiers: list[TierKind], engine: _Engine, loads: dict[TierKind, LoadCost]
    ) -> Interval:
        setting = self._setting
        question = Question(request.prompt_tokens, setting.block_tokens, setting.block_bytes, 0, tiers)
        if self._strategy == "ours":
            queue_s = engine.queue_s(self._now)
            pooled_s = sum(each.queue_s(self._now) for each in self._engines) / len(self._engines)
            own_s = setting.prefill.predict(request.prompt_tokens, 0)
            price = self._price.ask(pooled_s + own_s, self._now) if setting.gpu_price is None else setting.gpu_price
            return compare(replace(question, gpu_queue_s=queue_s), setting.prefill, loads, price).best
        plans = compare(question, setting.prefill, loads)
        return {
            "recompute": plans.recompute_all,
            "load": plans.load_all,
            "static_cut": plans.prefix_cut,
            "two_ended": plans.two_ended,
        }[self._strategy]

    # ------------------------------------------------------------ links

    def _queue(self, tier: TierKind) -> _Queue:
        link = self._setting.links[tier]
        return _Queue(link, self._setting.block_bytes / link.bytes_per_s)

    def _queue_of(self, engine: _Engine, tier: TierKind) -> _Queue:
        return engine.ram if tier is TierKind.RAM else self._shared[tier]

    def _send(self, tier: TierKind, queue: _Queue) -> None:
        while queue.waiting and not queue.is_busy:
            job, block = queue.waiting.popleft()
            if block * self._setting.block_tokens < job.position:
                continue  # computed meanwhile
            queue.is_busy = True
            queue.free_at_s = self._now + queue.block_s
            self._loaded_blocks[tier] += 1
            self._at(queue.free_at_s, lambda: self._sent(tier, queue))
            self._at(queue.free_at_s + queue.link.latency_s, partial(self._landed, job, block))

    def _sent(self, tier: TierKind, queue: _Queue) -> None:
        queue.is_busy = False
        self._send(tier, queue)

    def _landed(self, job: _Job, block: int) -> None:
        job.is_there[block] = True
        if not job.is_computed:
            self._advance(job)
            self._compute(job.engine)

    def _advance(self, job: _Job) -> None:
        """Pass over the blocks that are there."""
        stride = self._setting.block_tokens
        while job.position % stride == 0 and job.position // stride < len(job.is_there):
            if not job.is_there[job.position // stride]:
                break
            job.position += stride

    # ------------------------------------------------------------ computing

    def _compute(self, engine: _Engine) -> None:
        """Begin the next chunk: of the oldest request that its plan allows, else of one that may meet its loads."""
        if engine.is_busy:
            return
        meeting: tuple[_Job, int] | None = None
        for job in engine.jobs:
            if tokens := self._planned_tokens(job):
                self._begin(engine, job, tokens, planned=True)
                return
            if meeting is None and self._may_meet(job):
                # One block at a time: the next one may land any moment.
                meeting = job, self._setting.block_tokens - job.position % self._setting.block_tokens
        if meeting is not None:
            self._begin(engine, *meeting, planned=False)

    def _may_meet(self, job: _Job) -> bool:
        """Return whether it is of use to compute the next block, which is on its way: that ends before the loads are
        expected to, or they are late."""
        if not self._meets or job.position // self._setting.block_tokens < job.interval.end:
            return False
        ends_s = self._now + self._setting.prefill.predict(self._setting.block_tokens, job.position)
        return ends_s < job.loaded_at_s or self._now > job.loaded_at_s

    def _planned_tokens(self, job: _Job) -> int:
        """Return how many tokens the plan allows to compute now: at most a chunk, and not what is being loaded."""
        stride, num_cached = self._setting.block_tokens, len(job.is_there)
        block = job.position // stride
        if block < num_cached and not job.interval.start <= block < job.interval.end:
            return 0
        goes_through = block >= num_cached or job.interval.end == num_cached
        end = job.request.prompt_tokens if goes_through else job.interval.end * stride
        return min(self._setting.prefill.chunk_tokens, end - job.position)

    def _begin(self, engine: _Engine, job: _Job, tokens: int, *, planned: bool) -> None:
        seconds = self._setting.prefill.predict(tokens, job.position)
        engine.is_busy = job.is_computed = True
        engine.free_at_s = self._now + seconds
        planned_s = min(seconds, job.left_s) if planned else 0.0
        job.left_s -= planned_s
        engine.backlog_s -= planned_s
        self._gpu_busy_s += seconds
        self._computed_tokens += tokens
        self._at(engine.free_at_s, lambda: self._computed(engine, job, tokens, seconds))

    def _computed(self, engine: _Engine, job: _Job, tokens: int, seconds: float) -> None:
        engine.is_busy = job.is_computed = False
        self._price.computed(seconds, self._now)
        job.position += tokens
        self._advance(job)
        if job.position >= job.request.prompt_tokens:
            self._finish(engine, job)
        self._compute(engine)

    def _finish(self, engine: _Engine, job: _Job) -> None:
        engine.jobs.remove(job)
        engine.backlog_s -= job.left_s
        self._ttft_s[job.index] = self._now - job.request.arrival_s
        self._residence.use(job.request.hash_ids[: job.request.prompt_tokens // self._setting.block_tokens])

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, action))
