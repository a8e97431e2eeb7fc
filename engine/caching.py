"""What happens to a request's blocks: found in HBM, fetched, indexed once computed, offered to kvstore, given back.

Covers the decisions of the step loop; moving bytes is the movers'. Nothing here waits. Not thread-safe: the step
loop owns it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from engine.counters import Counters
from engine.course import Course, why_of
from engine.jobs import FetchJob, StoreJob
from engine.loading import Load
from engine.loads import Loads
from engine.pool import BlockPool
from engine.request import Request, RequestState, Served, wants_the_bytes
from kvstore.core.key import Namespace, chain_keys
from kvstore.core.outcome import Outcome, TierKind
from policies.cost import CostModel, PrefillCost
from policies.hindsight import decided
from policies.interval import Question
from policies.plan import Backlog, Plan, Promise, choose, pinned
from policies.price import GpuPrice

_MAX_STORE_BLOCKS = 64
# Who pins the plan to fetching wants the bytes, not the fastest answer; a silent daemon still ends it.
_PINNED_PATIENCE_S = 10.0
# How long to wait for a block that is being filled.
_FILLING_S = 0.002


@dataclass(frozen=True, slots=True)
class Ahead:
    """What is in front of a request: seconds of computing, and how many requests are decoding beside it."""

    gpu_s: float = 0.0
    num_decodes: int = 0


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
    """The life of each request's blocks. `movers` None: there is no kvstore, HBM is the only cache. `price` None: each
    request gets the plan that is best for itself, else what its GPU seconds cost the others counts as well."""

    def __init__(
        self,
        pool: BlockPool,
        shape: Shape,
        costs: CostModel,
        movers: Movers | None,
        counters: Counters,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
        price: GpuPrice | None = None,
    ) -> None:
        self._pool = pool
        self._shape = shape
        self._costs = costs
        self._movers = movers
        self._counters = counters
        self._clock = clock
        self._wall_clock = wall_clock
        self._price = price
        self._loads = Loads(pool, costs, shape.namespace.block_bytes, counters, clock)
        self._pool_blocks_in_stores = 0
        # Beyond this, new blocks are not offered: a slow daemon must not keep the pool from new requests.
        self._max_pool_blocks_in_stores = max(pool.num_pool_blocks // 2, shape.pool_blocks_per_block)

    # ------------------------------------------------------------ admission

    def admit(self, request: Request, spare_pool_blocks: int, ahead: Callable[[], Ahead]) -> bool:
        """Give a waiting request its cached prefix: what HBM has at once, what is further away by a load.

        Afterwards it is RUNNING. False, with nothing changed, where the pool has no room for all of its tokens and
        `spare_pool_blocks` more. `ahead` is asked where it matters.
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
        self._plan(request, resident, usable, ahead)
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

    def _plan(self, request: Request, resident: int, usable: int, ahead: Callable[[], Ahead]) -> None:
        tiers = () if self._movers is None else request.cached.tiers[resident:usable]
        shape = self._shape
        question = Question(request.num_tokens, shape.block_tokens, shape.namespace.block_bytes, resident, tiers)
        if request.plan == "recompute" or not tiers:
            request.plan_made = "recompute" if request.plan == "recompute" else "hbm" if resident else "prefill"
            self._decided(request, question, None)
            return
        front = ahead()
        question = replace(question, gpu_queue_s=front.gpu_s)
        prefill = self.prefill_cost(front.num_decodes)
        alone_s = prefill.predict(request.num_tokens - request.num_computed, request.num_computed)
        price = 0.0 if self._price is None else self._price.ask(front.gpu_s + alone_s, self._clock())
        backlog = Backlog(self._loads.queues_s(), price)
        if request.plan == "auto":
            plan = choose(question, prefill, self._costs, backlog)
        else:
            first, last = (usable, usable) if request.plan == "fetch" else request.plan
            plan = pinned(question, prefill, self._costs, backlog, first - resident, last - resident)
        request.plan_made = _name(plan.runs(), 0, len(tiers))
        self._decided(request, question, plan)
        if plan.order():
            recompute_s = front.gpu_s + alone_s if self._costs.prefill_known else None
            self._begin_load(request, resident, plan, recompute_s, price)
        else:
            self._count_miss(request, "plan", len(tiers))

    def _decided(self, request: Request, question: Question, plan: Plan | None) -> None:
        """Write the choice down; not again where a request that was preempted comes back after its first token."""
        if request.output:
            return
        num_cached = len(question.tiers)
        start, end = (0, num_cached) if plan is None else (plan.start, plan.end)
        request.decision = decided(
            request.id,
            self._wall_clock(),
            question,
            None if plan is None else plan.compared,
            (start, end),
            why_of(request.plan != "auto", request.cached.asked, question, plan, self._price is not None),
            plan is not None and plan.measured,
            None if plan is None else {tier: load.queue_s for tier, load in plan.loads.items()},
        )
        request.course = Course(self._clock(), start, end, num_cached)

    def _begin_load(
        self, request: Request, resident: int, plan: Plan, recompute_s: float | None, gpu_price: float
    ) -> None:
        assert self._movers is not None
        per_block = self._shape.pool_blocks_per_block
        tiers = list(request.cached.tiers[resident : resident + plan.num_blocks])
        fresh = self._pool.allocate(len(tiers) * per_block)
        assert fresh is not None, "admission made sure of the room"
        request.block_table += fresh
        now = self._clock()
        began_s = now - request.asking_s
        is_pinned = wants_the_bytes(request.plan)
        order = plan.order()
        job = FetchJob(
            request_id=request.id,
            tenant=request.tenant,
            keys=[request.keys[resident + block] for block in order],
            pool_blocks=[fresh[block * per_block : (block + 1) * per_block] for block in order],
            expected=[tiers[block] for block in order],
            deadline_s=began_s + max(_PINNED_PATIENCE_S, 3 * (recompute_s or 0.0)),
        )
        load = Load(
            job,
            plan,
            Promise(began_s, recompute_s),
            resident,
            tiers,
            self._shape.namespace.block_bytes,
            now,
            gpu_price=gpu_price,
            give_up_at_s=began_s + _PINNED_PATIENCE_S if is_pinned else None,
        )
        self._loads.begin(request.id, load)
        if not self._movers.fetch(job):
            job.outcome = Outcome.BUSY
            job.close(now)

    # ------------------------------------------------------------ loads

    @property
    def has_loads(self) -> bool:
        return len(self._loads) > 0

    def prefill_cost(self, num_decodes: int) -> PrefillCost:
        """Return what prefilling costs beside so many requests that are decoding."""
        cost = self._costs.prefill_cost()
        if not num_decodes:
            return cost
        per_decode_s = self._costs.step_coefficients()[3]
        return replace(cost, per_step_s=cost.per_step_s + num_decodes * per_decode_s)

    def allowance(self, request: Request, budget: int, ahead_s: float, prefill: PrefillCost | None) -> int:
        """Return how many tokens of an active request to compute in the next step, at most `budget` unless it is one.

        0 where it waits for its load: then it is FETCHING. `ahead_s` is the work in front of it; `prefill` may be None
        where there are no loads.
        """
        load = self._loads.of(request.id)
        if load is not None:
            self._loads.take_in(load)
            self._advance(request, load)
        left = request.num_tokens - request.num_computed
        if load is None or load.is_over:
            request.state = RequestState.RUNNING
            return left if left == 1 else min(left, budget)
        assert prefill is not None
        stride = self._shape.block_tokens
        goal = load.decide(request.num_tokens, stride, prefill, ahead_s, self._clock())
        request.state = RequestState.FETCHING if goal == load.front else RequestState.RUNNING
        end = request.num_computed + min(left, budget)
        if goal < load.cached:
            end = min(end, goal * stride)
        whole = end // stride * stride
        if request.num_computed < whole and end < load.cached * stride:
            # What of a block is computed is lost to the mover.
            end = whole
        return max(0, end - request.num_computed)

    def claim(self, request: Request, num_tokens: int) -> int:
        """Return how many of the next tokens may be computed: no block that has landed or is being filled."""
        load = self._loads.of(request.id)
        if load is None or not num_tokens:
            return num_tokens
        stride = self._shape.block_tokens
        end = load.claim(request.num_computed // stride, -(-(request.num_computed + num_tokens) // stride))
        count = max(0, min(num_tokens, end * stride - request.num_computed))
        if not count:
            # The mover has just been there: its word may have come already.
            load.look_again_s = self._clock() + _FILLING_S
        return count

    def work_s(self, request: Request, prefill: PrefillCost) -> float:
        """Return how many seconds of computing an active request still takes up to its next token."""
        load = self._loads.of(request.id)
        if load is not None:
            return load.work_s(request.num_tokens, self._shape.block_tokens, prefill)
        left = request.num_tokens - request.num_computed
        return prefill.predict(left, request.num_computed) if left > 1 else 0.0

    def fetched(self, job: FetchJob) -> None:
        """A mover is done with this job."""
        self._loads.ended(job)

    def next_deadline_s(self) -> float | None:
        """Return when to decide again about a request that waits; None: never."""
        return self._loads.next_look_s()

    def arrived(self) -> None:
        """A request has come."""
        if self._price is not None:
            self._price.arrived(self._clock())

    def computed(self, seconds: float) -> None:
        """A step took so long."""
        if self._price is not None:
            self._price.computed(seconds, self._clock())

    def _advance(self, request: Request, load: Load) -> None:
        """Go on over what has landed, and end the load where nothing of it is left."""
        stride = self._shape.block_tokens
        load.advance(request.num_computed // stride)
        if load.front * stride > request.num_computed:
            request.num_computed = load.front * stride
            self._index(request)
        if load.is_over:
            self._end_load(request, load)

    def _end_load(self, request: Request, load: Load) -> None:
        self._loads.end(request.id)
        stride = self._shape.block_tokens
        for tier, count in load.served.items():
            request.served[tier] = request.served.get(tier, 0) + count * stride
        for why, count in load.computed.items():
            self._count_miss(request, why, count)
        gone_from = load.gone_from()
        if gone_from is not None:
            request.store_next = min(request.store_next, gone_from)
        request.plan_made = _name(load.runs, load.first, load.cached)
        if request.course is not None:
            request.course.loaded_up(load)

    # ------------------------------------------------------------ computed blocks

    def publish(self, request: Request) -> None:
        """Index the blocks that became full and offer them to kvstore."""
        load = self._loads.of(request.id)
        if load is not None:
            self._loads.take_in(load)
            self._advance(request, load)
        if request.cache:
            self._index(request)
            self._offer(request)

    def release(self, request: Request) -> None:
        """Give the request's pool blocks back; what is indexed can be found until its room is needed."""
        self._loads.end(request.id)
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


def _name(runs: Sequence[tuple[int, int]], first: int, cached: int) -> str:
    """Return what computing these runs of the cached blocks [first, cached) is called."""
    if not runs:
        return "fetch"
    start, end = runs[0][0], runs[-1][1]
    if len(runs) > 1 or (first < start and end < cached):
        return "interval"
    if start == first:
        return "recompute" if end == cached else "two_ended"
    return "cut"
