"""Scheduler, pool, fake model and fake kvstore put together, stepped by hand or by the real threads."""

import itertools
import threading
from collections import deque
from collections.abc import Sequence

import torch

from engine.caching import BlockCaching
from engine.counters import Counters
from engine.jobs import FetchJob, StoreJob
from engine.mover import MoverThreads
from engine.pool import BlockPool
from engine.request import Cached, PlanMode, Progress, Request
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.shape import Shape
from kvstore.core.key import chain_keys
from kvstore.core.outcome import Outcome, TierKind
from policies.cost import CostModel
from tests.engine.fakes import FakeHbm, FakeModel, FakeStore, fake_pool, namespace_of

_ids = itertools.count()


class Answer:
    """Listens to one request; `done` is set with its end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.error = ""
        self.done = threading.Event()

    def __call__(self, progress: Progress) -> None:
        assert self.finish is None, "an event after the end"
        if progress.token_id is not None:
            self.tokens.append(progress.token_id)
        if progress.finish is not None:
            self.finish, self.error = progress.finish, progress.error
            self.done.set()


class HandMovers:
    """Movers that keep their jobs until the test says what became of them."""

    def __init__(self) -> None:
        self.fetches: deque[FetchJob] = deque()
        self.stores: deque[StoreJob] = deque()
        self.full = False

    def fetch(self, job: FetchJob) -> bool:
        if not self.full:
            self.fetches.append(job)
        return not self.full

    def store(self, job: StoreJob) -> bool:
        if not self.full:
            self.stores.append(job)
        return not self.full


class Rig:
    """Everything but the threads. `now` is the clock."""

    def __init__(
        self,
        num_pool_blocks: int = 16,
        pool_block_tokens: int = 4,
        block_tokens: int = 4,
        chunk_tokens: int = 16,
        max_batch: int = 4,
        movers: bool = True,
    ) -> None:
        self.now = 100.0
        self.namespace = namespace_of(block_tokens)
        self.shape = Shape(self.namespace, pool_block_tokens)
        self.pool = BlockPool(num_pool_blocks, self.shape.pool_blocks_per_block)
        self.tensor = fake_pool(num_pool_blocks, pool_block_tokens)
        self.hbm = FakeHbm(self.tensor)
        self.model = FakeModel(pool_block_tokens)
        self.costs = CostModel(chunk_tokens, self.clock)
        self.counters = Counters()
        self.faults = Counters()
        self.movers = HandMovers()
        self.caching = BlockCaching(
            self.pool, self.shape, self.costs, self.movers if movers else None, self.counters, self.clock
        )
        self.scheduler = Scheduler(self.pool, self.shape, self.caching, chunk_tokens, max_batch)
        self.runner = Runner(self.model, self.tensor, self.scheduler, self.costs, self.counters, self.clock)

    def clock(self) -> float:
        return self.now

    def request(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 4,
        *,
        plan: PlanMode = "auto",
        cached: Cached | None = None,
        cache: bool = True,
        stop: frozenset[int] = frozenset(),
    ) -> tuple[Request, Answer]:
        answer = Answer()
        request = Request(
            id=f"r{next(_ids)}",
            tenant="",
            prompt=list(prompt),
            max_new_tokens=max_new_tokens,
            arrival_s=self.now,
            listener=answer,
            stop_token_ids=stop,
            plan=plan,
            cache=cache,
            root=self.namespace.root(),
            keys=chain_keys(self.namespace, list(prompt)),
            cached=cached or Cached(),
        )
        return request, answer

    def submit(self, prompt: Sequence[int], max_new_tokens: int = 4, **options: object) -> tuple[Request, Answer]:
        request, answer = self.request(prompt, max_new_tokens, **options)  # type: ignore[arg-type]
        self.scheduler.add(request)
        return request, answer

    def step(self) -> bool:
        """Compute one step; False where there was none to compute."""
        pieces = self.scheduler.next_step()
        if pieces:
            self.runner._compute(pieces)
        self.pool.check_integrity()
        return bool(pieces)

    def run(self, max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError("the scheduler does not come to an end")

    def fill(self, request: Request, job: FetchJob, index: int) -> None:
        """Write the KV of a block as the fake model computes it."""
        first = request.keys.index(job.keys[index]) * self.shape.block_tokens
        stride = self.shape.pool_block_tokens
        for number, block in enumerate(job.pool_blocks[index]):
            positions = range(first + number * stride, first + (number + 1) * stride)
            self.tensor[block, 0, 0, :, 0, 0] = torch.tensor([float(request.prompt[at]) for at in positions])
            self.tensor[block, 0, 1, :, 0, 0] = torch.tensor([float(at) for at in positions])

    def land(
        self, request: Request, job: FetchJob, blocks: Sequence[int], source: TierKind, outcome: Outcome = Outcome.OK
    ) -> None:
        """Be a mover that has copied these blocks of the prompt, or failed to."""
        if job.began_s is None:
            assert job.claim(self.now)
        for block in blocks:
            index = job.keys.index(request.keys[block])
            assert job.begin(index), f"block {block} must not be touched any more"
            if outcome is Outcome.OK:
                self.fill(request, job, index)
            job.end(index, outcome, source, self.now)

    def end(self, job: FetchJob, outcome: Outcome = Outcome.OK) -> None:
        """Be a mover at its end."""
        job.outcome = outcome
        job.close(self.now)
        self.scheduler.fetched(job)

    def acknowledge_stores(self) -> int:
        """Answer all waiting stores with success; return how many blocks that were."""
        count = 0
        while self.movers.stores:
            job = self.movers.stores.popleft()
            job.num_stored = len(job.keys)
            count += len(job.keys)
            self.scheduler.stored(job)
        return count


def threaded(rig: Rig, store: FakeStore, max_jobs: int = 8, layer_ends: Sequence[int] = ()) -> MoverThreads:
    """Put real mover threads and the real step loop around `rig`, over `store`; the caller starts and ends them."""
    from engine.link import Roots
    from tests.engine.fakes import FakeClient

    movers = MoverThreads(
        Roots(lambda tenant: FakeClient(store, tenant)),
        rig.hbm,
        lambda: rig.runner.post(lambda: None),
        lambda job: rig.runner.post(lambda: rig.scheduler.fetched(job)),
        lambda job: rig.runner.post(lambda: rig.scheduler.stored(job)),
        rig.counters,
        rig.faults,
        max_jobs=max_jobs,
        layer_ends=layer_ends,
        clock=rig.clock,
    )
    rig.caching._movers = rig.caching.planner._movers = movers
    return movers
