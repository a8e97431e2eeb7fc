"""An engine that does with the connector what vLLM does: paged blocks with a prefix cache, chunked prefill, decodes,
preemption, aborts, loads before a step or beside it, several ranks, and recomputing what did not come.

    schedule ─► execute, on every rank ─► (steps scheduled meanwhile) ─► process

With `depth` 2 a step is scheduled before the output of the one before it was processed, as with vLLM's async
scheduling: tokens are computed that the scheduler does not know yet, and blocks come free only when no step under way
may write them.

It computes nothing: a block's KV follows from its hash, the rank and the weights. Whenever a step reads a block it is
compared with that, so wrong KV shows the moment it would be used.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from kvstore.client import Client
from kvstore.connectors.vllm_parts.consult import Shard
from kvstore.connectors.vllm_parts.costs import Costs, blank_profile
from kvstore.connectors.vllm_parts.orders import News, Step
from kvstore.connectors.vllm_parts.scheduler import Scheduler
from kvstore.connectors.vllm_parts.settings import Settings
from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.connectors.vllm_parts.worker import Worker
from kvstore.core.key import Namespace
from tests.support.vllm import BLOCK_TOKENS, BODY_BYTES, FakeRequest, MemoryPages, hashes_of, kv_of, namespace
from tests.support.vllm_blocks import Blocks

_GARBAGE = bytes([255]) * BODY_BYTES


@dataclass(eq=False)
class Running:
    """`tokens` are all there are, the scheduler's `request.all_token_ids` those it has heard of; `placeholders` stand
    there for the others. `stale_tokens` were computed in steps from before a preemption whose output is to come."""

    request: FakeRequest
    max_tokens: int
    prompt: list[int]
    tokens: list[int]
    block_ids: list[int] = field(default_factory=list)
    state: str = "waiting"
    output: int = 0
    placeholders: int = 0
    stale_tokens: int = 0
    last_step: int = 0
    num_indexed: int = 0
    is_new: bool = True
    was_preempted: bool = False
    has_received: bool = False
    has_failed: bool = False
    # It goes on over blocks that another was to compute again: vLLM does not look whether that one does.
    is_spoiled: bool = False

    @property
    def num_tokens(self) -> int:
        return self.request.num_tokens + self.placeholders


@dataclass(frozen=True)
class Part:
    """What of a request is computed in one step, for which it got the blocks `added`. `samples`: up to its end."""

    running: Running
    start: int
    count: int
    added: list[int]
    samples: bool


@dataclass(frozen=True)
class Batch:
    """`targets` are the blocks that are filled before the step, each with its hash."""

    number: int
    step: Step
    parts: list[Part]
    targets: list[tuple[int, bytes]]


@dataclass
class Output:
    batch: Batch
    sampled: dict[Running, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    news: News | None = None


class FakeEngine:
    """`pages[rank]` are what `workers[rank]` copies from and to; block 0 is nobody's, as in vLLM. At most `budget`
    tokens a step, and `depth` steps under way."""

    def __init__(
        self,
        scheduler: Scheduler,
        workers: Sequence[Worker],
        pages: Sequence[MemoryPages],
        budget: int = 24,
        depth: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.workers = workers
        self.pages = pages
        self.budget = budget
        self.depth = depth
        self.queue: list[Running] = []
        self.outputs: dict[str, list[int]] = {}
        self.external_tokens = 0
        self.recomputed = 0
        self.num_steps = 0
        # What every request has come to, also those that were aborted.
        self.texts: list[list[int]] = []
        # How often it got new weights, and which weights each block is of: what is computed over older KV is older KV.
        self.era = 0
        self.salts = [b""]
        self._era_of: dict[int, int] = {}
        self._under_way: deque[Output] = deque()
        self._processed = 0
        self._blocks = Blocks(len(pages[0].blocks))
        self._free_later: deque[tuple[int, list[int]]] = deque()
        self._finished: dict[str, Running] = {}
        # How many ranks have said of a request that its load, its stores are over.
        self._received: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        # Written over what did not come, which is vLLM's fault and must not become anybody else's.
        self._spoiled: set[int] = set()

    # ------------------------------------------------------------ what a user does

    def add(self, request: FakeRequest, max_tokens: int = 4) -> None:
        tokens = request.all_token_ids
        self.queue.append(Running(request, max_tokens, list(tokens), list(tokens)))
        self.texts.append(self.queue[-1].tokens)
        self.scheduler.on_new_request(request)

    def abort(self, running: Running) -> None:
        self.queue.remove(running)
        running.request.status = "FINISHED_ABORTED"
        self._finish(running)

    def preempt(self, running: Running) -> None:
        request = running.request
        self._release(running)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        running.state, running.was_preempted = "waiting", True
        running.stale_tokens, running.placeholders = request.num_in_flight_tokens, 0
        running.is_spoiled = False

    def evict(self, block_ids: set[int]) -> None:
        self._blocks.evict(block_ids)

    def drop_prefix_cache(self) -> None:
        self._blocks.forget()

    def take_new_weights(self) -> None:
        """As `reset_prefix_cache(reset_connector=True)`: vLLM's own cache is emptied only where no block is in use."""
        self.era += 1
        if not self._blocks.num_used:
            self.drop_prefix_cache()
        self.scheduler.reset()
        self.salts.append(self.scheduler._matcher._salt)

    @property
    def has_cached_blocks(self) -> bool:
        return self._blocks.has_cached

    @property
    def is_idle(self) -> bool:
        return not (self.queue or self._finished or self._under_way)

    def run(self, max_steps: int = 20000) -> None:
        for _ in range(max_steps):
            if self.is_idle:
                return
            self.step()
        left = [(each.state, each.request.num_computed_tokens, each.block_ids) for each in self.queue]
        raise AssertionError(
            f"these do not end: {left}, {len(self._finished)} finished; {self._blocks.num_free} free blocks"
        )

    def close_workers(self) -> None:
        for worker in self.workers:
            worker.close()

    def close(self) -> None:
        self.close_workers()
        self.scheduler.close()

    def step(self) -> None:
        """One turn of vLLM's loop."""
        self._under_way.append(self._execute(self._schedule()))
        while self._under_way and (len(self._under_way) >= self.depth or not self.queue):
            self._process(self._under_way.popleft())

    # ------------------------------------------------------------ schedule

    def _schedule(self) -> Batch:
        self.num_steps += 1
        parts: list[Part] = []
        targets: list[tuple[int, bytes]] = []
        was_preempted = self._schedule_running(parts)
        if not was_preempted:
            self._schedule_waiting(parts, targets)
        step = self.scheduler.begin_step(_output_of(parts))
        for part in parts:
            part.running.is_new = part.running.was_preempted = False
            request = part.running.request
            request.num_computed_tokens += part.count
            request.num_in_flight_tokens += part.count
            part.running.placeholders += part.samples
            part.running.last_step = self.num_steps
        return Batch(self.num_steps, step, parts, targets)

    def _schedule_running(self, parts: list[Part]) -> bool:
        """Return whether any of them was preempted for want of room."""
        was_preempted = False
        active = [running for running in self.queue if running.state == "running"]
        index = 0
        while index < len(active) and self._left(parts) > 0:
            running = active[index]
            count = min(running.num_tokens - running.request.num_computed_tokens, self._left(parts))
            index += 1
            if count <= 0:
                continue
            wanted = running.request.num_computed_tokens + count
            while (more := self._blocks_for(running, wanted)) is None:
                victim = active[-1]
                if self.scheduler.is_holding or not self._is_free_at_once(victim):
                    return was_preempted
                self.preempt(active.pop())
                was_preempted = True
                if victim is running:
                    return was_preempted
            self._enter(running, count, more, parts)
        return was_preempted

    def _schedule_waiting(self, parts: list[Part], targets: list[tuple[int, bytes]]) -> None:
        for running in self.queue:
            if running.state == "loading" and running.has_received:
                self._promote(running)
        # Those that hold blocks first.
        waiting = [running for running in self.queue if running.state == "waiting"]
        for running in sorted(waiting, key=lambda each: not each.block_ids):
            if self._left(parts) <= 0:
                return
            if running.stale_tokens:
                continue
            assert running.tokens == running.request.all_token_ids
            if running.request.num_computed_tokens == 0:
                is_admitted = self._admit(running, parts, targets)
                if is_admitted is False:
                    return
                continue
            request = running.request
            count = min(request.num_tokens - request.num_computed_tokens, self._left(parts))
            more = self._blocks_for(running, request.num_computed_tokens + count)
            if more is None:
                return
            self._enter(running, count, more, parts)

    def _admit(self, running: Running, parts: list[Part], targets: list[tuple[int, bytes]]) -> bool | None:
        """Begin a request that has nothing; False: there is no room for it, None: it is not known yet what to load."""
        request = running.request
        hits = self._blocks.hits(request.block_hashes[: (request.num_tokens - 1) // BLOCK_TOKENS])
        local = len(hits) * BLOCK_TOKENS
        external, is_async = self.scheduler.match(request, local)
        if external is None:
            return None
        assert external % BLOCK_TOKENS == 0
        assert local + external <= request.num_tokens - (not is_async and external > 0)
        count = 0 if is_async else min(request.num_tokens - local - external, self._left(parts))
        wanted = -(-(local + external + count) // BLOCK_TOKENS) - len(hits)
        self._blocks.hold(hits)
        if wanted > self._blocks.num_free - (self._reserved() if is_async else 0):
            self._blocks.let_go(hits)
            return False
        running.block_ids, running.num_indexed = hits + self._blocks.take(wanted), len(hits)
        self.scheduler.allocated(request, running.block_ids, external)
        self.external_tokens += external
        request.num_computed_tokens = local + external
        filled = running.block_ids[len(hits) :][: external // BLOCK_TOKENS]
        self._era_of.update(dict.fromkeys(filled, self.era))
        if is_async:
            running.state, running.has_received, running.has_failed = "loading", False, False
            return True
        targets += zip(filled, request.block_hashes[len(hits) :], strict=False)
        self._enter(running, count, [], parts)
        return True

    def _enter(self, running: Running, count: int, more: list[int], parts: list[Part]) -> None:
        running.block_ids += more
        start = running.request.num_computed_tokens
        running.state = "running"
        # As vLLM does: in the prefix cache before they are filled.
        self._index(running, start + count)
        parts.append(Part(running, start, count, more, start + count == running.num_tokens))

    def _left(self, parts: list[Part]) -> int:
        return self.budget - sum(part.count for part in parts)

    def _promote(self, running: Running) -> None:
        """vLLM takes note of a load that has ended."""
        request = running.request
        running.state, running.has_received = "waiting", False
        if running.has_failed and not request.num_computed_tokens:
            self._release(running)
            return
        self._index(running, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1

    def _reserved(self) -> int:
        """Blocks that others need yet to hold what they have begun to load or to prefill."""
        return sum(
            max(0, -(-each.request.num_tokens // BLOCK_TOKENS) - len(each.block_ids))
            for each in self.queue
            if each.block_ids
        )

    # ------------------------------------------------------------ execute

    def _execute(self, batch: Batch) -> Output:
        output = Output(batch)
        lost: set[int] = set()
        for rank, worker in enumerate(self.workers):
            worker.clear(batch.step)
            worker.load(batch.step)
            blocks = self.pages[rank].blocks
            lost |= {block for block, block_hash in batch.targets if blocks[block] != kv_of(block_hash, rank, self.era)}
        for part in batch.parts:
            self._compute(part, lost)
            if part.samples and not lost.intersection(part.running.block_ids):
                output.sampled[part.running] = token = sum(part.running.tokens[-3:]) % 97
                part.running.tokens.append(token)
        news = []
        for worker in self.workers:
            worker.store(batch.step)
            ended = worker.take(batch.step)
            output.failed |= ended.failed_blocks
            output.loaded |= self._by_all(self._received, ended.loaded)
            output.stored |= self._by_all(self._sent, ended.stored)
            news.append(worker.take_news())
        assert lost <= output.failed, "wrong KV was taken for right"
        told = [each for each in news if each is not None]
        if told:
            output.news = News()
            output.news.add(told)
        return output

    def _compute(self, part: Part, lost: set[int]) -> None:
        running = part.running
        hashes = hashes_of(running.tokens)
        read = running.block_ids[: part.start // BLOCK_TOKENS]
        # Then the step will count for nothing.
        is_garbage = any(block in lost for block in running.block_ids)
        for rank, pages in enumerate(self.pages):
            for index, block in enumerate([] if is_garbage else read):
                if pages.blocks[block] == kv_of(hashes[index], rank, self._era_of[block]):
                    continue
                assert running.is_spoiled or block in self._spoiled, "wrong KV is read"
                is_garbage = running.is_spoiled = True
        end = part.start + part.count
        era = min(
            (self._era_of[block] for block in running.block_ids[: -(-part.start // BLOCK_TOKENS)]), default=self.era
        )
        for index in range(part.start // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)):
            block = running.block_ids[index]
            is_whole = (index + 1) * BLOCK_TOKENS <= end and not is_garbage
            for rank, pages in enumerate(self.pages):
                pages.blocks[block][:] = kv_of(hashes[index], rank, era) if is_whole else _GARBAGE
            self._era_of[block] = era
            (self._spoiled.add if is_garbage and running.is_spoiled else self._spoiled.discard)(block)

    def _by_all(self, counts: Counter[str], names: set[str]) -> set[str]:
        """Return those of which every rank has said so by now."""
        counts.update(names)
        complete = {name for name in names if counts[name] == len(self.workers)}
        for name in complete:
            del counts[name]
        return complete

    # ------------------------------------------------------------ process

    def _process(self, output: Output) -> None:
        batch = output.batch
        self._processed = batch.number
        while self._free_later and self._free_later[0][0] <= self._processed:
            self._blocks.let_go(self._free_later.popleft()[1])
        taken_back = self._take_back(output)
        for part in batch.parts:
            running, request = part.running, part.running.request
            request.num_in_flight_tokens -= part.count
            is_stale = running.stale_tokens > 0
            if is_stale:
                running.stale_tokens -= part.count
            elif part.samples:
                running.placeholders -= 1
            if running in taken_back or running not in self.queue or running not in output.sampled:
                continue
            request.all_token_ids.append(output.sampled[running])
            running.output += 1
            if running.output == running.max_tokens:
                self.queue.remove(running)
                self.outputs[request.request_id] = request.all_token_ids[len(running.prompt) :]
                request.status = "FINISHED_LENGTH_CAPPED"
                self._finish(running)
        self.scheduler.end_step(output.news, output.stored)
        for name in output.loaded:
            if name in self._finished:
                self._release(self._finished.pop(name))
            else:
                (running,) = [each for each in self.queue if each.request.request_id == name]
                assert running.state == "loading"
                running.has_received = True
        for name in output.stored:
            self._release(self._finished.pop(name))

    def _take_back(self, output: Output) -> set[Running]:
        """Have what did not come computed again, as vLLM does; return the requests of which the step counts for
        nothing. Of several that share a block one computes it again, and the others go on as if it had come."""
        affected: set[Running] = set()
        counts = {part.running: part.count for part in output.batch.parts}
        marked: set[int] = set()
        for running in self.queue:
            if running.state == "waiting":
                continue
            computed = running.request.num_computed_tokens - counts.get(running, 0)
            has_marked = goes_over_others = False
            bad = [index for index in range(-(-computed // BLOCK_TOKENS)) if running.block_ids[index] in output.failed]
            if not bad:
                continue
            for index in bad:
                if running.block_ids[index] in marked:
                    goes_over_others |= not has_marked
                elif not has_marked:
                    has_marked = True
                    running.request.num_computed_tokens = index * BLOCK_TOKENS
                    self.recomputed += computed - index * BLOCK_TOKENS
                if running.state == "running":
                    marked.add(running.block_ids[index])
            if not has_marked:
                running.request.num_computed_tokens = computed
            running.is_spoiled |= goes_over_others
            running.has_failed = True
            if running.state == "running":
                affected.add(running)
        return affected

    def _finish(self, running: Running) -> None:
        request = running.request
        count = -(-request.num_computed_tokens // BLOCK_TOKENS)
        is_loading = running.state == "loading" and not running.has_received
        held = self.scheduler.finished(request, running.block_ids[:count])
        assert not (held and is_loading), "freed twice"
        if held or is_loading:
            self._finished[request.request_id] = running
        else:
            self._release(running)

    # ------------------------------------------------------------ blocks

    def _index(self, running: Running, num_tokens: int) -> None:
        hashes = running.request.block_hashes
        # Once, so that what was evicted does not come back.
        first = running.num_indexed
        running.num_indexed = max(first, min(num_tokens // BLOCK_TOKENS, len(running.block_ids), len(hashes)))
        for index in range(first, running.num_indexed):
            self._blocks.name(running.block_ids[index], hashes[index])

    def _blocks_for(self, running: Running, num_tokens: int) -> list[int] | None:
        count = max(0, -(-num_tokens // BLOCK_TOKENS) - len(running.block_ids))
        return self._blocks.take(count) if count <= self._blocks.num_free else None

    def _is_free_at_once(self, running: Running) -> bool:
        return running.last_step <= self._processed

    def _release(self, running: Running) -> None:
        if self._is_free_at_once(running):
            self._blocks.let_go(running.block_ids)
        elif running.block_ids:
            # A step under way may still write them.
            self._free_later.append((running.last_step, running.block_ids))
        running.block_ids = []


def start_engine(
    settings: Settings,
    make_client: Callable[[Namespace], Client],
    counters: Counters,
    *,
    num_blocks: int = 64,
    budget: int = 24,
    ranks: int = 1,
    depth: int = 1,
) -> FakeEngine:
    """Return an engine with the connector's both sides, in a process of its own as it were: its KV cache is empty."""
    spaces, pages = [namespace(rank, ranks) for rank in range(ranks)], [MemoryPages(num_blocks) for _ in range(ranks)]
    profile = blank_profile("model", "device", budget, BLOCK_TOKENS, pages[0].payload_bytes)
    workers = [
        Worker(settings, space, some, partial(make_client, space), counters)
        for space, some in zip(spaces, pages, strict=True)
    ]
    scheduler = Scheduler(
        settings,
        BLOCK_TOKENS,
        1,
        pages[0].payload_bytes,
        ranks,
        lambda: [Shard(space, make_client(space)) for space in spaces],
        Costs(profile, None, lambda: 0.0),
        counters,
        evict=lambda blocks: engine.evict(blocks),
        has_cached_blocks=lambda: engine.has_cached_blocks,
    )
    engine = FakeEngine(scheduler, workers, pages, budget, depth)
    return engine


def _output_of(parts: Sequence[Part]) -> Any:
    """Return vLLM's `SchedulerOutput`, as far as the connector reads it."""
    new = [part for part in parts if part.running.is_new]
    old = [part for part in parts if not part.running.is_new]
    resumed = {part.running.request.request_id for part in old if part.running.was_preempted}
    added = [list(part.running.block_ids) if part.running.was_preempted else part.added for part in old]
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=part.running.request.request_id,
                block_ids=(list(part.running.block_ids),),
                num_computed_tokens=part.start,
            )
            for part in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[part.running.request.request_id for part in old],
            new_block_ids=[(blocks,) if blocks else None for blocks in added],
            num_computed_tokens=[part.start for part in old],
            num_output_tokens=[part.running.output for part in old],
            resumed_req_ids=resumed,
        ),
        num_scheduled_tokens={part.running.request.request_id: part.count for part in parts},
        total_num_scheduled_tokens=sum(part.count for part in parts),
    )
