"""What happens to a request's blocks: found in HBM, fetched, indexed once computed, offered to kvstore, given back.

Covers the decisions of the step loop; moving bytes is the movers'. Nothing here waits. Not thread-safe: the step
loop owns it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.counters import Counters
from engine.course import Course, why_of
from engine.jobs import FetchJob, StoreJob
from engine.pool import BlockPool
from engine.request import Request, RequestState, Served, wants_the_bytes
from kvstore.core.key import Namespace, chain_keys
from kvstore.core.outcome import Outcome, TierKind
from policies.cost import CostModel
from policies.hindsight import decided
from policies.interval import Question
from policies.plan import Plan, choose, patience

_MAX_STORE_BLOCKS = 64
# Who pins the plan to fetching wants the bytes, not the fastest answer; a silent daemon still ends it.
_PINNED_PATIENCE_S = 10.0


class Movers(Protocol):
    """The threads that move blocks, as the step loop sees them: both calls return at once, False where full."""

    def fetch(self, job: FetchJob) -> bool: ...

    def store(self, job: StoreJob) -> bool: ...


@dataclass(frozen=True, slots=True)
class Shape:
    """How tokens, pool blocks and blocks relate. `namespace` gives the hash; its root is each request's own."""

    namespace: Namespace
    pool_block_tokens: int

    def __post_init__(self) -> None:
        if self.pool_block_tokens < 1 or self.namespace.block_tokens % self.pool_block_tokens:
            raise ValueError("block_tokens must be a whole number of pool blocks")

    @property
    def block_tokens(self) -> int:
        return self.namespace.block_tokens

    @property
    def pool_blocks_per_block(self) -> int:
        return self.block_tokens // self.pool_block_tokens

    def pool_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool_block_tokens)


class BlockCaching:
    """The life of each request's blocks. `movers` None: there is no kvstore, HBM is the only cache."""

    def __init__(
        self,
        pool: BlockPool,
        shape: Shape,
        costs: CostModel,
        movers: Movers | None,
        counters: Counters,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._pool = pool
        self._shape = shape
        self._costs = costs
        self._movers = movers
        self._counters = counters
        self._clock = clock
        self._wall_clock = wall_clock
        self._fetches: dict[str, FetchJob] = {}
        self._pool_blocks_in_stores = 0
        # Beyond this, new blocks are not offered: a slow daemon must not keep the pool from new requests.
        self._max_pool_blocks_in_stores = max(pool.num_pool_blocks // 2, shape.pool_blocks_per_block)

    # ------------------------------------------------------------ admission

    def admit(self, request: Request, spare_pool_blocks: int) -> bool:
        """Give a waiting request its cached prefix: what HBM has at once, what is further away by a fetch.

        Afterwards it is RUNNING or FETCHING. False, with nothing changed, where the pool has no room for all of its
        tokens and `spare_pool_blocks` more.
        """
        usable = min(len(request.keys), (request.num_tokens - 1) // self._shape.block_tokens)
        table = [] if request.plan == "recompute" else self._pool.acquire_prefix(request.keys[:usable])
        missing = self._shape.pool_blocks_for(request.num_tokens) - len(table)
        if missing + spare_pool_blocks > self._pool.num_available:
            self._pool.release(table)
            return False
        resident = len(table) // self._shape.pool_blocks_per_block
        first_time = not request.plan_made
        request.block_table = table
        request.num_computed = resident * self._shape.block_tokens
        request.num_indexed = resident
        request.state = RequestState.RUNNING
        self._begin_account(request, resident, usable)
        if first_time:
            # Blocks that HBM has and kvstore has not (any more) are offered again; if nobody was asked, only new ones.
            request.store_next = min(len(request.cached.tiers), usable) if request.cached.asked else resident
            self._offer(request)
        self._plan(request, resident, usable)
        return True

    def _begin_account(self, request: Request, resident: int, usable: int) -> None:
        stride = self._shape.block_tokens
        request.served = {TierKind.HBM: resident * stride}
        known = max(resident, min(len(request.cached.tiers), usable))
        why = request.cached.why
        if request.plan == "recompute":
            known, why = 0, "plan"
        request.miss = {"partial_block": request.num_tokens - usable * stride}
        if usable > known:
            request.miss[why] = (usable - known) * stride

    def _plan(self, request: Request, resident: int, usable: int) -> None:
        tiers = () if self._movers is None else request.cached.tiers[resident:usable]
        question = Question(
            request.num_tokens, self._shape.block_tokens, self._shape.namespace.block_bytes, resident, tiers
        )
        if request.plan == "recompute" or not tiers:
            request.plan_made = "recompute" if request.plan == "recompute" else "hbm" if resident else "prefill"
            self._decided(request, question, None, 0)
            return
        plan = choose(question, self._costs)
        cut = plan.fetch_blocks
        if request.plan == "fetch":
            cut = len(tiers)
        elif isinstance(request.plan, tuple):
            cut = min(max(request.plan[0] - resident, 0), len(tiers))
        request.plan_made = "recompute" if cut == 0 else "fetch" if cut == len(tiers) else "cut"
        self._decided(request, question, plan, cut)
        self._count_miss(request, "plan", len(tiers) - cut)
        if cut:
            waits_s = (
                [_PINNED_PATIENCE_S] * cut if wants_the_bytes(request.plan) else patience(question, cut, self._costs)
            )
            self._begin_fetch(request, resident, waits_s)

    def _decided(self, request: Request, question: Question, plan: Plan | None, cut: int) -> None:
        """Write the choice down; not again where a request that was preempted comes back after its first token."""
        if request.output:
            return
        num_cached = len(question.tiers)
        request.decision = decided(
            request.id,
            self._wall_clock(),
            question,
            None if plan is None else plan.compared,
            (cut, num_cached),
            why_of(request.plan != "auto", request.cached.asked, question, plan is not None and plan.measured),
            plan is not None and plan.measured,
        )
        request.course = Course(self._clock(), cut, num_cached, num_cached)

    def _begin_fetch(self, request: Request, resident: int, waits_s: Sequence[float]) -> None:
        assert self._movers is not None
        per_block = self._shape.pool_blocks_per_block
        fresh = self._pool.allocate(len(waits_s) * per_block)
        assert fresh is not None, "admission made sure of the room"
        request.block_table += fresh
        began_s = self._clock() - request.asking_s
        job = FetchJob(
            request_id=request.id,
            tenant=request.tenant,
            keys=request.keys[resident : resident + len(waits_s)],
            pool_blocks=[fresh[i : i + per_block] for i in range(0, len(fresh), per_block)],
            give_up_at_s=[began_s + wait_s for wait_s in waits_s],
            expected=request.cached.tiers[resident : resident + len(waits_s)],
            block_bytes=self._shape.namespace.block_bytes,
        )
        request.state = RequestState.FETCHING
        self._fetches[request.id] = job
        if not self._movers.fetch(job):
            job.outcome = Outcome.BUSY
            self.fetched(request, job)

    # ------------------------------------------------------------ fetches

    def fetched(self, request: Request, job: FetchJob) -> None:
        """Take over what a fetch brought; the rest of its blocks will be computed. The request is RUNNING then."""
        del self._fetches[request.id]
        for tier, num_bytes, seconds in job.loads:
            self._costs.observe_load(tier, num_bytes, seconds)
        resident = request.num_computed // self._shape.block_tokens
        for source in job.sources[: job.landed]:
            request.served[source] = request.served.get(source, 0) + self._shape.block_tokens
        request.num_computed += job.landed * self._shape.block_tokens
        request.state = RequestState.RUNNING
        if request.course is not None:
            request.course.fetched(job, self._clock())
        self._index(request)
        if job.landed < len(job.keys):
            self._counters.add(f"fetch_{job.outcome.label}")
            self._count_miss(request, job.outcome.label, len(job.keys) - job.landed)
            request.store_next = min(request.store_next, resident + job.landed)

    def give_up_late_fetches(self) -> list[tuple[str, FetchJob]]:
        """Take back the fetches that no mover has begun in time and return them, with their requests' ids."""
        now = self._clock()
        late = [(rid, job) for rid, job in self._fetches.items() if job.give_up_at_s[0] <= now and job.take_back()]
        for _, job in late:
            job.outcome = Outcome.TIMED_OUT
        return late

    def next_deadline_s(self) -> float | None:
        """Return when `give_up_late_fetches` may have something to do; None: never."""
        # A mover reports by itself. One that has passed meanwhile counts, else nobody might wake up for it.
        return min((job.give_up_at_s[0] for job in self._fetches.values() if not job.claimed), default=None)

    def cancel_fetch(self, request: Request) -> bool:
        """Ask the request's fetch to end. True: it has not begun and is gone; False: it ends soon and reports."""
        if not self._fetches[request.id].cancel():
            return False
        del self._fetches[request.id]
        return True

    # ------------------------------------------------------------ computed blocks

    def publish(self, request: Request) -> None:
        """Index the blocks that became full and offer them to kvstore."""
        if request.cache:
            self._index(request)
            self._offer(request)

    def release(self, request: Request) -> None:
        """Give the request's pool blocks back; what is indexed can be found until its room is needed."""
        self._pool.release(request.block_table)
        request.block_table = []
        request.num_computed = request.num_indexed = 0

    def count_skipped(self, request: Request) -> None:
        """Count the blocks of a finished request that never made it into the store queue."""
        if self._movers is not None and request.cache and not request.store_stopped:
            self._counters.add("store_skipped_blocks", max(0, request.num_indexed - request.store_next))

    def stored(self, request: Request | None, job: StoreJob) -> None:
        """End the holds of a store that is done; `request` is None where it has finished."""
        blocks = job.all_pool_blocks()
        self._pool.unhold(blocks)
        self._pool_blocks_in_stores -= len(blocks)
        if request is not None and job.num_stored < len(job.keys):
            # Its later blocks would have no parent there. The next turn offers what HBM still has.
            request.store_stopped = True

    def served(self, request: Request) -> Served:
        """Sum up, at the first token, where the prompt's KV came from."""
        prompt = len(request.prompt)
        served = sum(request.served.values())
        full_s, rest_s = self._costs.prefill(prompt, 0), self._costs.prefill(prompt - served, served)
        now, saved_s = self._clock(), max(0.0, full_s - rest_s)
        if request.course is not None and request.decision is not None:
            request.decision = request.course.ended(request.decision, now, request.arrival_s, saved_s, self._costs)
        return Served(
            prompt_tokens=prompt,
            tokens=dict(request.served),
            recomputed=prompt - served,
            miss={why: count for why, count in request.miss.items() if count},
            plan=request.plan_made,
            ttft_s=now - request.arrival_s,
            saved_prefill_s=saved_s,
        )

    def _index(self, request: Request) -> None:
        per_block, stride = self._shape.pool_blocks_per_block, self._shape.block_tokens
        full = request.num_computed // stride
        known = len(request.keys)
        if full > known:
            tokens = request.tokens(known * stride, full * stride)
            request.keys += chain_keys(self._shape.namespace, tokens, request.parent_of(known))
        for block in range(request.num_indexed, full):
            pool_blocks = request.block_table[block * per_block : (block + 1) * per_block]
            self._pool.index(request.keys[block], request.parent_of(block), pool_blocks)
        request.num_indexed = full

    def _offer(self, request: Request) -> None:
        if self._movers is None or request.store_stopped or not request.cache:
            return
        per_block = self._shape.pool_blocks_per_block
        while request.store_next < request.num_indexed:
            room = (self._max_pool_blocks_in_stores - self._pool_blocks_in_stores) // per_block
            first = request.store_next
            end = min(request.num_indexed, first + min(room, _MAX_STORE_BLOCKS))
            if end <= first:
                return
            table = request.block_table
            groups = [table[i * per_block : (i + 1) * per_block] for i in range(first, end)]
            keys = request.keys[first:end]
            job = StoreJob(request.id, request.tenant, keys, request.parent_of(first), first, groups)
            blocks = job.all_pool_blocks()
            self._pool.hold(blocks)
            if not self._movers.store(job):
                self._pool.unhold(blocks)
                return
            self._pool_blocks_in_stores += len(blocks)
            request.store_next = end

    def _count_miss(self, request: Request, why: str, num_blocks: int) -> None:
        if num_blocks > 0:
            request.miss[why] = request.miss.get(why, 0) + num_blocks * self._shape.block_tokens
