"""The scheduler's side: what of a prompt is to be loaded, which blocks a step completes, what a request has come to.

    new request ─► asked ─► answered, or too late ─► match ─► (load order) ─► computed ─► store orders ─► finished

Nothing here waits for the daemon, but for a moment in steps that have nothing to compute.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from kvstore.connectors.vllm_parts.adapters import Adapters
from kvstore.connectors.vllm_parts.consult import Consult, Shard
from kvstore.connectors.vllm_parts.costs import Costs
from kvstore.connectors.vllm_parts.matching import Matcher
from kvstore.connectors.vllm_parts.orders import LoadOrder, News, Step, StoreOrder, most_by_tier
from kvstore.connectors.vllm_parts.reports import report_of
from kvstore.connectors.vllm_parts.sessions import Sessions
from kvstore.connectors.vllm_parts.settings import Settings
from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.connectors.vllm_parts.step_output import StepOutput, written
from kvstore.connectors.vllm_parts.telling import telling
from kvstore.connectors.vllm_parts.tracked import Request, Tracked
from kvstore.connectors.vllm_parts.unfilled import Unfilled
from kvstore.connectors.vllm_parts.wishes import of_salt, read
from kvstore.core.outcome import TierKind

_log = logging.getLogger("vllm.kvstore")

_RETRY_STORE_S = 1.0
_IDLE_STEP_S = 0.001
_SOON_S = 0.05


class Scheduler:
    """`num_ranks` workers answer each order. `per_block`: vLLM's hashes for each block of `block_tokens` tokens.
    `evict` takes blocks out of vLLM's prefix cache, `has_cached_blocks` says whether any is in it. Owned by the
    scheduler's thread."""

    def __init__(
        self,
        settings: Settings,
        block_tokens: int,
        per_block: int,
        block_bytes: int,
        num_ranks: int,
        make_shards: Callable[[], Sequence[Shard]],
        costs: Costs,
        counters: Counters,
        *,
        may_store: bool = True,
        evict: Callable[[set[int]], None] = lambda _: None,
        has_cached_blocks: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._block_tokens = block_tokens
        self._per_block = per_block
        self._num_ranks = num_ranks
        self._may_store = may_store
        self._costs = costs
        self._counters = counters
        self._clock = clock
        self._adapters = Adapters(counters)
        self._sessions = Sessions(settings.tenant, counters, clock)
        self._consult = Consult(make_shards, self._sessions, counters, clock)
        self._matcher = Matcher(
            settings,
            block_tokens,
            per_block,
            block_bytes,
            self._consult,
            costs,
            counters,
            self._gpu_queue_s,
            clock,
            wall_clock,
        )
        self._requests: dict[str, Tracked] = {}
        self._loads: list[LoadOrder] = []
        self._stores: list[StoreOrder] = []
        self._held: list[str] = []
        # Since when, the oldest first.
        self._holding: dict[str, float] = {}
        self._step = 0
        # Steps that began with loads of which it is not known yet whether they came.
        self._unsure_steps: set[int] = set()
        self._unfilled = Unfilled(evict)
        self._has_cached_blocks = has_cached_blocks
        # Whether vLLM's prefix cache may have blocks that are not what their hashes say: of before the last reset, or
        # computed over what did not come.
        self._has_wrong_blocks = False
        self._has_told_of_hints = False

    def begin(self) -> None:
        """Attach to the daemon, beside whatever comes: else the first request does."""
        self._consult.begin()

    # ------------------------------------------------------------ what to load

    def on_new_request(self, request: Request) -> None:
        self._matcher.begin(self._of(request))

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As `get_num_new_matched_tokens`."""
        tracked = self._of(request)
        if request.num_preemptions != tracked.num_preemptions:
            self._let_go(tracked)
            tracked.begin_again(request.num_preemptions)
        if self._has_wrong_blocks and num_computed_tokens:
            tracked.may_store = False
        match = self._matcher.match(tracked, num_computed_tokens // self._block_tokens)
        if match is None:
            return None, False
        num_tokens = len(match.tiers) * self._block_tokens
        return num_tokens, self._settings.load == "async" and num_tokens > 0

    def allocated(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """As `update_state_after_alloc`: vLLM has made room for what is to be loaded."""
        tracked = self._of(request)
        match = tracked.match
        count = num_external_tokens // self._block_tokens
        if not count:
            return
        assert match is not None and count <= len(match.tiers), "vLLM loads what was matched, or less"
        self._matcher.count(tracked)
        first = match.num_local
        tiers = match.tiers[:count]
        patience_s, silence_s = self._matcher.patience(tracked, first, tiers)
        is_async = self._settings.load == "async"
        self._loads.append(
            LoadOrder(
                request.request_id,
                tuple(self._matcher.hashes(tracked)[first : first + count]),
                tuple(block_ids[first : first + count]),
                tuple(int(tier) for tier in tiers),
                patience_s,
                silence_s,
                is_async,
            )
        )
        if not is_async:
            self._unfilled.begun(request.request_id, self._loads[-1].block_ids)
        tracked.num_loading = self._num_ranks
        tracked.loaded, tracked.load_end_s, tracked.failed_from = {}, None, None
        tracked.first_load = first
        self._costs.load_begun(request.request_id, Counter(tiers))

    def sources(self, request_id: str) -> dict[TierKind, int]:
        """Return how many tokens of a request come from which tier."""
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.match is None:
            return {}
        return {tier: count * self._block_tokens for tier, count in Counter(tracked.match.tiers).items()}

    # ------------------------------------------------------------ steps

    def begin_step(self, output: StepOutput) -> Step:
        """As `build_connector_meta`: return the orders of the step that was just scheduled."""
        if self._costs.wants_saving():
            costs = self._costs.snapshot()
            self._consult.tell(lambda _: self._costs.save(costs))
        prefills: list[tuple[int, int]] = []
        num_decodes = 0
        for tracked, computed in self._scheduled(output):
            self._matcher.count(tracked)
            count = output.num_scheduled_tokens.get(tracked.request.request_id, 0)
            is_prefill = computed < tracked.request.num_prompt_tokens or count > 1
            if is_prefill:
                prefills.append((count, computed))
            else:
                num_decodes += 1
            first, end = computed // self._block_tokens, (computed + count) // self._block_tokens
            self._unfilled.computed(tracked.request.request_id, tracked.block_ids[first:end])
            self._offer(tracked, min(computed + count, tracked.request.num_tokens))
        if output.total_num_scheduled_tokens:
            self._costs.step_begun(self._step, prefills, num_decodes)
        else:
            self._consult.wait(_IDLE_STEP_S)
        return self._order(output, tuple(self._stores), written(output, self._block_tokens))

    def begin_step_after_fault(self, output: StepOutput) -> Step:
        """Return the orders of a step of which `begin_step` has failed: what vLLM waits for is done all the same, and
        nothing is stored of blocks that this step may overwrite or of which it is not known any more whose they are."""
        for tracked in self._requests.values():
            tracked.may_store = False
        return self._order(output, (), (), writes_anywhere=True)

    def _order(
        self,
        output: StepOutput,
        stores: tuple[StoreOrder, ...],
        written: tuple[int, ...],
        *,
        writes_anywhere: bool = False,
    ) -> Step:
        step = Step(
            tuple(self._loads),
            stores,
            written,
            tuple(self._held),
            output.total_num_scheduled_tokens,
            self._step,
            writes_anywhere,
        )
        if any(not load.is_async for load in self._loads):
            self._unsure_steps.add(self._step)
        self._step += 1
        self._loads, self._stores, self._held = [], [], []
        return step

    def end_step(self, news: News | None, stored: set[str]) -> None:
        """As `update_connector_output`."""
        for request_id in stored:
            self._holding.pop(request_id, None)
        self._unfilled.ended(news, self._requests.values())
        if news is None:
            return
        self._costs.learn(news)
        self._unsure_steps.difference_update(news.steps)
        for request_id, count in news.settled.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.outstanding = max(0, tracked.outstanding - count)
        for request_id, depth in news.unstored.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.next_store = min(tracked.next_store, depth)
                tracked.retry_s = self._clock() + _RETRY_STORE_S
        for request_id, count in news.num_ended.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                self._load_ended(tracked, count, news.load_ends.get(request_id, {}))
        for request_id, index in news.failed_from.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                # It would fail again; what is computed instead is offered anew.
                tracked.may_load = False
                tracked.why = "failed"
                tracked.failed_from = index
                tracked.next_store = min(tracked.next_store, tracked.first_load + index)

    def _load_ended(self, tracked: Tracked, num_ranks: int, tiers: Mapping[int, int]) -> None:
        """Only when all ranks have ended it is a load over for vLLM too. Taken for over before, a request that is
        aborted meanwhile would be freed twice, and blocks would be stored that are still written."""
        most_by_tier(tracked.loaded, {TierKind(tier): count for tier, count in tiers.items()})
        tracked.num_loading = max(0, tracked.num_loading - num_ranks)
        if not tracked.num_loading:
            tracked.load_end_s = self._clock()
            self._costs.load_ended(tracked.request.request_id)

    def finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        """As `request_finished`: whether vLLM is to keep the blocks until the workers say that they are stored."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        self._unfilled.left(block_ids)
        self._let_go(tracked)
        self._costs.load_ended(request.request_id)
        # A load before a step is over with it, though its news come behind those of who ends in it.
        is_loading = tracked.is_loading and self._settings.load == "async"
        if tracked.is_loading and not is_loading and tracked.match is not None:
            tracked.loaded = Counter(tracked.match.tiers)
        in_flight = getattr(request, "num_in_flight_tokens", 0)
        # The last token was sampled but never computed.
        computed = max(0, min(request.num_computed_tokens - in_flight, request.num_tokens - 1))
        if not is_loading and not _is_broken(request):
            tracked.block_ids = list(block_ids)
            tracked.retry_s = 0.0
            # It got here past all failures of the steps that it comes from, unless it was aborted beside one.
            self._offer(tracked, computed, is_sure=not _is_aborted(request))
        self._tell(tracked, computed, has_computed=not is_loading and request.num_computed_tokens > 0)
        if tracked.inquiry is not None:
            tracked.inquiry.is_dropped = True
        # vLLM itself waits for a load that is under way.
        if not tracked.outstanding or is_loading:
            return False
        self._held.append(request.request_id)
        self._holding[request.request_id] = self._clock()
        return True

    @property
    def is_holding(self) -> bool:
        """Whether blocks of finished requests will come free soon. vLLM lets running requests stand still as long as
        they do, so what is late is not spoken of: then it preempts one."""
        oldest_s = next(iter(self._holding.values()), None)
        return oldest_s is not None and self._clock() < oldest_s + _SOON_S

    def reset(self) -> None:
        """Nothing that was stored up to now is found again by this engine, as after a change of its weights.

        Requests under way go on with KV of before, which must not be stored under the keys of afterwards; nor must
        what vLLM's own prefix cache has, which it does not empty while blocks are in use: by requests under way, or by
        ones that have ended, whose blocks are held or still being loaded.
        """
        self._matcher.reset()
        self._has_wrong_blocks = self._has_cached_blocks()
        for tracked in self._requests.values():
            tracked.inquiry, tracked.match = None, None
            if tracked.request.num_computed_tokens > 0:
                tracked.may_store = False
                self._has_wrong_blocks = True

    def close(self) -> None:
        costs = self._costs.snapshot()
        self._consult.close(self._settings.drain_s)
        self._costs.save(costs)

    # ------------------------------------------------------------ following requests

    def _of(self, request: Request) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            wishes, wrong = read(request.kv_transfer_params)
            wishes = of_salt(wishes, str(getattr(request, "cache_salt", None) or ""))
            for name in wrong:
                self._counters.add("faults", f"bad_{name}" if name == "session_id" else "bad_hint")
            self._say_once(wrong)
            adapter = self._adapters.digest_of(request)
            tracked = self._requests[request.request_id] = Tracked(request, wishes, self._clock(), adapter)
        return tracked

    def _say_once(self, wrong: Sequence[str]) -> None:
        """Name what of a request's wishes is of no use; never a value."""
        if wrong and not self._has_told_of_hints:
            self._has_told_of_hints = True
            _log.warning(
                "kvstore: what a request said of itself was of no use and was ignored: %s; this is said once, and "
                "counted as vllm:kvstore_faults_total each time",
                ", ".join(sorted(wrong)),
            )

    def _tell(self, tracked: Tracked, num_computed: int, *, has_computed: bool) -> None:
        """Have the daemon told of a request that has ended; reported are those of which anything was computed."""
        full = min(num_computed // self._block_tokens, len(tracked.request.block_hashes) // self._per_block)
        hashes = self._matcher.hashes(tracked)
        report = None
        if has_computed:
            report = report_of(tracked, self._costs, self._settings.tenant, self._block_tokens, self._clock())
        last = tuple(hashes[: self._matcher.usable(tracked)][-1:])
        self._consult.tell(telling(self._sessions, tracked, tuple(hashes[:full]), last, report))

    def _let_go(self, tracked: Tracked) -> None:
        """The request has no blocks any more."""
        others = (each for each in self._requests.values() if each is not tracked)
        if self._unfilled.leaves(tracked.request.request_id, others):
            self._has_wrong_blocks = True

    def _gpu_queue_s(self, newest: Tracked) -> float:
        """Seconds of prefill that running requests have still in front of them."""
        prefill = self._costs.prefill()
        total = 0.0
        for tracked in self._requests.values():
            request = tracked.request
            left = request.num_prompt_tokens - request.num_computed_tokens
            if tracked is not newest and tracked.block_ids and left > 0:
                total += prefill.predict(left, request.num_computed_tokens)
        return total

    def _scheduled(self, output: StepOutput) -> list[tuple[Tracked, int]]:
        """Return each request of the step that is followed, and its computed tokens before it."""
        scheduled: list[tuple[Tracked, int]] = []
        for new in output.scheduled_new_reqs:
            tracked = self._requests.get(new.req_id)
            if tracked is not None:
                tracked.block_ids = list(new.block_ids[0])
                if self._has_wrong_blocks and new.num_computed_tokens and not tracked.num_inquiries:
                    # Nothing was asked for it, so all this is from vLLM's own prefix cache.
                    tracked.may_store = False
                scheduled.append((tracked, new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            computed = cached.num_computed_tokens[i]
            added = cached.new_block_ids[i]
            fresh = [] if added is None else list(added[0])
            if request_id in cached.resumed_req_ids:
                tracked.block_ids = fresh
            else:
                tracked.block_ids += fresh
            if tracked.first_output_s is None and cached.num_output_tokens[i] > 0:
                tracked.first_output_s = self._clock()
            scheduled.append((tracked, computed))
        return scheduled

    def _offer(self, tracked: Tracked, num_tokens: int, *, is_sure: bool = False) -> None:
        """Order what is complete with `num_tokens` computed tokens to be stored.

        Not while a step may have computed over a block that did not come (only loads before a step can do that): vLLM
        takes such a step back, and a stored block cannot be. It is offered a step later.
        """
        end = num_tokens // self._block_tokens
        if not (self._may_store and tracked.may_store) or end <= tracked.next_store or self._clock() < tracked.retry_s:
            return
        if not is_sure and (self._unsure_steps or any(not load.is_async for load in self._loads)):
            return
        is_told = self._consult.wants_tokens and tracked.is_plain
        order = tracked.store_order(self._matcher.hashes(tracked), end, self._block_tokens if is_told else 0)
        if order is not None:
            self._stores.append(order)
            tracked.outstanding += len(order.hashes) * self._num_ranks


def _is_broken(request: Request) -> bool:
    """Whether the request ended by a fault, such as a load that did not come under the policy `fail`."""
    return "ERROR" in str(getattr(request, "status", ""))


def _is_aborted(request: Request) -> bool:
    return "ABORT" in str(getattr(request, "status", ""))
