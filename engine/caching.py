"""What happens to a request's blocks: found in HBM, loaded, indexed once computed, offered to kvstore, given back.

Covers the decisions of the step loop; moving bytes is the movers'. Nothing here waits. Not thread-safe: the step
loop owns it.
"""

import time
from collections.abc import Callable

from engine.counters import Counters
from engine.jobs import StoreJob
from engine.mover import Movers
from engine.planner import Ahead, Planner
from engine.pool import BlockPool
from engine.request import Request, RequestState, Served
from engine.shape import Shape
from kvstore.core.key import chain_keys
from kvstore.core.outcome import TierKind
from policies.cost import CostModel, PrefillCost
from policies.price import GpuPrice

_MAX_STORE_BLOCKS = 64


class BlockCaching:
    """The life of each request's blocks. `movers` None: there is no kvstore, HBM is the only cache. `price`: see
    `Planner`."""

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
        self.planner = Planner(pool, shape, costs, movers, counters, clock, wall_clock, price)
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
        self.planner.begin(request, resident, usable, ahead)
        return True

    def _begin_account(self, request: Request, resident: int, usable: int) -> None:
        stride = self._shape.block_tokens
        request.served = {TierKind.HBM: resident * stride}
        request.recomputed_though_cached = 0
        known = max(resident, min(len(request.cached.tiers), usable))
        why = request.cached.why
        if request.plan == "recompute":
            known, why = 0, "plan"
        request.miss = {"partial_block": request.num_tokens - usable * stride}
        if usable > known:
            request.miss[why] = (usable - known) * stride

    def allowance(self, request: Request, budget: int, ahead_s: float, prefill: PrefillCost | None) -> int:
        """As `Planner.allowance`; what has landed meanwhile can be found from now on."""
        self.planner.catch_up(request)
        if request.cache:
            self._index(request)
        return self.planner.allowance(request, budget, ahead_s, prefill)

    # ------------------------------------------------------------ computed blocks

    def publish(self, request: Request) -> None:
        """Index the blocks that became full and offer them to kvstore."""
        self.planner.catch_up(request)
        if request.cache:
            self._index(request)
            self._offer(request)

    def release(self, request: Request) -> None:
        """Give the request's pool blocks back; what is indexed can be found until its room is needed."""
        self.planner.drop(request)
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
            recomputed_though_cached=request.recomputed_though_cached,
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
