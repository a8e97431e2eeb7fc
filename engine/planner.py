"""Each request's plan, and how it is carried out step by step: what to load, how far to compute, when to wait.

Covers choosing and deciding; the load itself is `engine/loading.py`, moving bytes is the movers'. Nothing here waits.
Not thread-safe: the step loop owns it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.counters import Counters
from engine.course import Course, why_of
from engine.jobs import FetchJob
from engine.layers import LayerGate
from engine.loading import Load
from engine.loads import Loads
from engine.mover import Movers
from engine.pool import BlockPool
from engine.request import Request, RequestState, wants_the_bytes
from engine.shape import Shape
from kvstore.core.outcome import Outcome
from policies.cost import CostModel, PrefillCost
from policies.hindsight import decided
from policies.interval import Question
from policies.plan import Backlog, Plan, Promise, choose, pinned
from policies.price import GpuPrice

# Who pins the plan to fetching wants the bytes, not the fastest answer; a silent daemon still ends it.
_PINNED_PATIENCE_S = 10.0
# How long to wait for a block that is being filled.
_FILLING_S = 0.002


@dataclass(frozen=True, slots=True)
class Ahead:
    """What is in front of a request: seconds of computing, and how many requests are decoding beside it."""

    gpu_s: float = 0.0
    num_decodes: int = 0


class Planner:
    """`movers` None: there is no kvstore, and nothing to load. `price` None: each request gets the plan that is best
    for itself, else what its GPU seconds cost the others counts as well."""

    def __init__(
        self,
        pool: BlockPool,
        shape: Shape,
        costs: CostModel,
        movers: Movers | None,
        counters: Counters,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        price: GpuPrice | None = None,
    ) -> None:
        self._pool = pool
        self._shape = shape
        self._costs = costs
        self._movers = movers
        self._clock = clock
        self._wall_clock = wall_clock
        self._price = price
        self.loads = Loads(pool, costs, shape.namespace.block_bytes, counters, clock)

    # ------------------------------------------------------------ choosing

    def begin(self, request: Request, resident: int, usable: int, ahead: Callable[[], Ahead]) -> None:
        """Choose a plan for an admitted request, of which HBM has the first `resident` of `usable` full blocks, and
        begin its load. There is room in the pool for all of its blocks; those of the cached ones are taken here."""
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
        backlog = Backlog(self.loads.queues_s(), price)
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
            request.recomputed_though_cached = len(tiers) * shape.block_tokens
            request.count_miss("plan", request.recomputed_though_cached)

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
            None if plan is None else plan.asked_for,
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
        self.loads.begin(request.id, load)
        if not self._movers.fetch(job):
            job.outcome = Outcome.BUSY
            job.close(now)

    # ------------------------------------------------------------ carrying out

    @property
    def has_loads(self) -> bool:
        return len(self.loads) > 0

    def prefill_cost(self, num_decodes: int) -> PrefillCost:
        """Return what prefilling costs beside so many requests that are decoding."""
        cost = self._costs.prefill_cost()
        if not num_decodes:
            return cost
        per_decode_s = self._costs.step_coefficients()[3]
        return replace(cost, per_step_s=cost.per_step_s + num_decodes * per_decode_s)

    def catch_up(self, request: Request) -> None:
        """Go on over what was computed and what has landed: `num_computed` moves."""
        load = self.loads.of(request.id)
        if load is None:
            return
        self.loads.take_in(load)
        stride = self._shape.block_tokens
        load.advance(request.num_computed // stride)
        request.num_computed = max(request.num_computed, load.front * stride)
        if load.is_over:
            self._end_load(request, load)

    def allowance(self, request: Request, budget: int, ahead_s: float, prefill: PrefillCost | None) -> int:
        """Return how many tokens of an active request to compute in the next step, at most `budget` unless it is one.

        0 where it waits for its load: then it is FETCHING. `ahead_s` is the work in front of it; `prefill` may be None
        where there are no loads. `catch_up` came before.
        """
        load = self.loads.of(request.id)
        left = request.num_tokens - request.num_computed
        if load is None:
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

    def under_copy(self, request: Request) -> tuple[LayerGate, int] | None:
        """Where all that is missing of a request's cached blocks is being copied layer by layer this moment: return
        what to wait in, and how many tokens its cached blocks have."""
        load = self.loads.of(request.id)
        if load is None or load.job.layers is None:
            return None
        self.catch_up(request)
        gate = load.job.layers
        if load.is_over or gate is None or not load.comes_whole:
            return None
        return gate, load.cached * self._shape.block_tokens

    def copy_failed(self, request: Request) -> None:
        """Go back to where the request's KV is certain: of what was copied layer by layer not all has come."""
        load = self.loads.of(request.id)
        assert load is not None, "a load does not end while its blocks are being copied"
        load.job.layers = None
        request.num_computed = load.front * self._shape.block_tokens

    def claim(self, request: Request, num_tokens: int) -> int:
        """Return how many of the next tokens may be computed: no block that has landed or is being filled."""
        load = self.loads.of(request.id)
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
        load = self.loads.of(request.id)
        if load is not None:
            return load.work_s(request.num_tokens, self._shape.block_tokens, prefill)
        left = request.num_tokens - request.num_computed
        return prefill.predict(left, request.num_computed) if left > 1 else 0.0

    def drop(self, request: Request) -> None:
        """Take back what has not landed, before the request gives its pool blocks back."""
        self.loads.end(request.id)

    def fetched(self, job: FetchJob) -> None:
        """A mover is done with this job."""
        self.loads.ended(job)

    def next_deadline_s(self) -> float | None:
        """Return when to decide again about a request that waits; None: never."""
        return self.loads.next_look_s()

    def arrived(self) -> None:
        """A request has come."""
        if self._price is not None:
            self._price.arrived(self._clock())

    def computed(self, seconds: float) -> None:
        """A step took so long."""
        if self._price is not None:
            self._price.computed(seconds, self._clock())

    def _end_load(self, request: Request, load: Load) -> None:
        self.loads.end(request.id)
        stride = self._shape.block_tokens
        for tier, count in load.served.items():
            request.served[tier] = request.served.get(tier, 0) + count * stride
        request.recomputed_though_cached = sum(load.computed.values()) * stride
        for why, count in load.computed.items():
            request.count_miss(why, count * stride)
        gone_from = load.gone_from()
        if gone_from is not None:
            request.store_next = min(request.store_next, gone_from)
        request.plan_made = _name(load.runs, load.first, load.cached)
        if request.course is not None:
            request.course.loaded_up(load)


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
