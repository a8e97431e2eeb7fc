"""The scheduler's side: what of a prompt is to be loaded, which blocks a step completes, what a request has come to.

    new request ─► asked ─► answered, or too late ─► match ─► (load order) ─► computed ─► store orders ─► finished

Nothing here waits for the daemon, but for a moment in steps that have nothing to compute.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from kvstore.connectors.vllm_parts.consult import Answer, Consult, Inquiry, Shard
from kvstore.connectors.vllm_parts.costs import Costs
from kvstore.connectors.vllm_parts.orders import LoadOrder, News, Step, StoreOrder
from kvstore.connectors.vllm_parts.reports import report_of
from kvstore.connectors.vllm_parts.sessions import Sessions, Turn, tell_hints
from kvstore.connectors.vllm_parts.settings import Settings
from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.connectors.vllm_parts.tracked import Match, Request, Tracked
from kvstore.connectors.vllm_parts.wishes import read
from kvstore.core.outcome import TierKind
from policies.decision import Why
from policies.hindsight import decided
from policies.interval import Question
from policies.plan import UNKNOWN_PATIENCE_S

# A lookup may take this share of what computing the prompt would, within these bounds.
_LOOKUP_SHARE = 0.05
_MIN_LOOKUP_S, _MAX_LOOKUP_S = 0.05, 0.25
# Who pins the plan to fetching wants the bytes, not the fastest answer.
_PINNED_LOOKUP_S, _PINNED_PATIENCE_S = 2.0, 10.0
# A session that is new here may have to be asked of the bucket.
_SESSION_LOOKUP_S = 2.0
# The first token comes within so much of recomputing everything, and a silent load is given up after so much of it.
_MAX_SLOWDOWN, _MAX_SILENCE = 1.15, 0.1
# Threads of a busy process are late by so much though all is well.
_MIN_PATIENCE_S = 0.1
# An answer is of use for so long: a request may wait for room in the KV cache.
_ANSWER_AGE_S = 5.0
_MATCH_AGE_S = 0.5
_RETRY_STORE_S = 1.0
_IDLE_STEP_S = 0.001


class StepOutput(Protocol):
    """The part of `vllm.v1.core.sched.output.SchedulerOutput` that is used."""

    scheduled_new_reqs: Sequence[Any]
    scheduled_cached_reqs: Any
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int


class Scheduler:
    """`num_ranks` workers answer each order. `per_block`: vLLM's hashes for each block of `block_tokens` tokens. Owned
    by the scheduler's thread."""

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
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._block_tokens = block_tokens
        self._per_block = per_block
        self._block_bytes = block_bytes
        self._num_ranks = num_ranks
        self._costs = costs
        self._counters = counters
        self._clock = clock
        self._wall_clock = wall_clock
        self._sessions = Sessions(settings.tenant, counters, clock)
        self._consult = Consult(make_shards, self._sessions.greet, counters, clock)
        self._requests: dict[str, Tracked] = {}
        self._loads: list[LoadOrder] = []
        self._stores: list[StoreOrder] = []
        self._held: list[str] = []
        self._holding: set[str] = set()
        self._salt = b""
        self._step = 0

    # ------------------------------------------------------------ what to load

    def on_new_request(self, request: Request) -> None:
        """Ask at once: the answer is there by the time the request's turn comes."""
        tracked = self._of(request)
        if self._usable(tracked) > 0:
            self._ask(tracked, 0)

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As `get_num_new_matched_tokens`."""
        tracked = self._of(request)
        if request.num_preemptions != tracked.num_preemptions:
            tracked.num_preemptions = request.num_preemptions
            tracked.inquiry, tracked.match, tracked.num_inquiries, tracked.may_load = None, None, 0, True
        local = num_computed_tokens // self._block_tokens
        usable = self._usable(tracked)
        if local >= usable:
            return 0, False
        found = self._answer(tracked, local)
        if found is None:
            return None, False
        match = tracked.match
        now = self._clock()
        if match is None or match.num_local != local or now > match.decided_s + _MATCH_AGE_S:
            match = tracked.match = self._decide(tracked, found, local, usable)
        num_tokens = len(match.tiers) * self._block_tokens
        return num_tokens, self._settings.load == "async" and num_tokens > 0

    def allocated(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """As `update_state_after_alloc`: vLLM has made room for what is to be loaded."""
        tracked = self._of(request)
        match = tracked.match
        if match is None:
            return
        count = min(num_external_tokens // self._block_tokens, len(match.tiers))
        if num_external_tokens <= 0 or count <= 0:
            return
        first = match.num_local
        tiers = match.tiers[:count]
        patience_s, silence_s = self._patience(tracked, first, tiers)
        is_async = self._settings.load == "async"
        self._loads.append(
            LoadOrder(
                request.request_id,
                tuple(self._hashes(tracked)[first : first + count]),
                tuple(block_ids[first : first + count]),
                tuple(int(tier) for tier in tiers),
                patience_s,
                silence_s,
                is_async,
            )
        )
        tracked.is_loading = True
        tracked.first_load = first
        blocks: dict[TierKind, int] = {}
        for tier in tiers:
            blocks[tier] = blocks.get(tier, 0) + 1
        self._costs.load_begun(request.request_id, blocks)

    def sources(self, request_id: str) -> dict[TierKind, int]:
        """Return how many tokens of a request come from which tier."""
        tracked = self._requests.get(request_id)
        counts: dict[TierKind, int] = {}
        for tier in () if tracked is None or tracked.match is None else tracked.match.tiers:
            counts[tier] = counts.get(tier, 0) + self._block_tokens
        return counts

    # ------------------------------------------------------------ steps

    def begin_step(self, output: StepOutput) -> Step:
        """As `build_connector_meta`: return the orders of the step that was just scheduled."""
        written: list[int] = []
        prefills: list[tuple[int, int]] = []
        num_decodes = 0
        for tracked, computed, fresh in self._scheduled(output):
            count = output.num_scheduled_tokens.get(tracked.request.request_id, 0)
            written += fresh
            is_prefill = computed < tracked.request.num_prompt_tokens or count > 1
            if is_prefill:
                prefills.append((count, computed))
                tracked.computed_tokens += max(0, min(count, tracked.request.num_prompt_tokens - computed))
            else:
                num_decodes += 1
            self._offer(tracked, min(computed + count, tracked.request.num_tokens))
        if output.total_num_scheduled_tokens:
            self._costs.step_begun(self._step, prefills, num_decodes)
        else:
            self._consult.wait(_IDLE_STEP_S)
        step = Step(
            tuple(self._loads),
            tuple(self._stores),
            tuple(written),
            tuple(self._held),
            output.total_num_scheduled_tokens,
            self._step,
        )
        self._step += 1
        self._loads, self._stores, self._held = [], [], []
        if self._costs.wants_saving():
            costs = self._costs.snapshot()
            self._consult.tell(lambda _: self._costs.save(costs))
        return step

    def end_step(self, news: News | None, stored: set[str]) -> None:
        """As `update_connector_output`."""
        self._holding -= stored
        if news is None:
            return
        self._costs.learn(news)
        for request_id, count in news.settled.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.outstanding = max(0, tracked.outstanding - count)
        for request_id, depth in news.unstored.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.next_store = min(tracked.next_store, depth)
                tracked.retry_s = self._clock() + _RETRY_STORE_S
        for request_id, tiers in news.load_ends.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.is_loading = False
                for tier, blocks in tiers.items():
                    kind = TierKind(tier)
                    tracked.served[kind] = tracked.served.get(kind, 0) + blocks * self._block_tokens
        for request_id, index in news.failed_from.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                # It would fail again; what is computed instead is offered anew.
                tracked.may_load = False
                tracked.why = "failed"
                tracked.next_store = min(tracked.next_store, tracked.first_load + index)

    def finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        """As `request_finished`: whether vLLM is to keep the blocks until the workers say that they are stored."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        self._costs.load_ended(request.request_id)
        in_flight = getattr(request, "num_in_flight_tokens", 0)
        # The last token was sampled but never computed.
        computed = max(0, min(request.num_computed_tokens - in_flight, request.num_tokens - 1))
        if not tracked.is_loading:
            tracked.block_ids = list(block_ids)
            tracked.retry_s = 0.0
            self._offer(tracked, computed)
        self._tell(tracked, computed)
        # vLLM itself waits for a load that is under way.
        if not tracked.outstanding or tracked.is_loading:
            return False
        self._held.append(request.request_id)
        self._holding.add(request.request_id)
        return True

    @property
    def is_holding(self) -> bool:
        """Whether blocks of finished requests will come free soon."""
        return bool(self._holding)

    def reset(self) -> None:
        """Nothing that was stored up to now is found again by this engine, as after a change of its weights."""
        self._salt = hashlib.sha256(self._salt + str(time.time_ns()).encode()).digest()
        for tracked in self._requests.values():
            tracked.inquiry, tracked.match = None, None

    def close(self) -> None:
        costs = self._costs.snapshot()
        self._consult.close(self._settings.drain_s)
        self._costs.save(costs)

    # ------------------------------------------------------------ asking and deciding

    def _of(self, request: Request) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            wishes, wrong = read(request.kv_transfer_params)
            for name in wrong:
                self._counters.add("faults", f"bad_{name}" if name == "session_id" else "bad_hint")
            tracked = self._requests[request.request_id] = Tracked(request, wishes, self._clock())
        return tracked

    def _hashes(self, tracked: Tracked) -> Sequence[bytes]:
        hashes = tracked.hashes(self._per_block)
        if not self._salt:
            return hashes
        return [hashlib.sha256(self._salt + each).digest() for each in hashes]

    def _usable(self, tracked: Tracked) -> int:
        """How many leading blocks a load may bring. A load before the step leaves it a token to compute."""
        request = tracked.request
        if not tracked.may_load or self._settings.plan == "recompute" or request.skip_reading_prefix_cache:
            return 0
        tokens = request.num_tokens - (self._settings.load == "sync")
        return min(tokens // self._block_tokens, len(request.block_hashes) // self._per_block)

    def _ask(self, tracked: Tracked, first: int) -> None:
        now = self._clock()
        hashes = self._hashes(tracked)[first : self._usable(tracked)]
        wait_s = self._lookup_s(tracked)
        session_id = tracked.wishes.session_id if not tracked.num_inquiries else ""
        tracked.num_inquiries += 1
        tracked.inquiry = Inquiry(tracked.request.request_id, first, hashes, now, now + wait_s, session_id)
        self._consult.ask(tracked.inquiry)

    def _lookup_s(self, tracked: Tracked) -> float:
        if self._settings.plan == "fetch":
            wait_s = _PINNED_LOOKUP_S
        elif tracked.wishes.session_id and not tracked.num_inquiries:
            wait_s = _SESSION_LOOKUP_S
        else:
            predicted_s = self._costs.recompute_s(tracked.request.num_tokens, 0)
            share_s = _MAX_LOOKUP_S if predicted_s is None else _LOOKUP_SHARE * predicted_s
            wait_s = min(max(share_s, _MIN_LOOKUP_S), _MAX_LOOKUP_S)
        return wait_s if self._settings.deadline_s is None else min(wait_s, self._settings.deadline_s)

    def _answer(self, tracked: Tracked, local: int) -> Answer | None:
        """Return what is known of the blocks behind `local`; None while that may still come."""
        inquiry = tracked.inquiry
        now = self._clock()
        if inquiry is None or (inquiry.answer is not None and now > inquiry.deadline_s + _ANSWER_AGE_S):
            tracked.match = None
            self._ask(tracked, 0)
            inquiry = tracked.inquiry
            assert inquiry is not None
        answer = inquiry.answer
        if answer is None:
            if now < inquiry.deadline_s:
                return None
            inquiry.is_dropped = True
            inquiry.answer = answer = Answer(why="timed_out")
        end = answer.first + len(answer.tiers)
        is_out_of_reach = local < answer.first or end < local
        if is_out_of_reach and answer.asked and tracked.num_inquiries < 3:
            # vLLM itself has what kvstore lacks, and kvstore may have what comes then.
            self._ask(tracked, local)
            return None
        return answer

    def _decide(self, tracked: Tracked, answer: Answer, local: int, usable: int) -> Match:
        now = self._clock()
        tiers = answer.tiers[local - answer.first :] if local >= answer.first else ()
        tiers = tiers[: usable - local]
        tracked.local_tokens = local * self._block_tokens
        tracked.why = answer.why
        self._counters.add("consults", "hit" if tiers else answer.why or "miss")
        if answer.first == 0 and answer.asked:
            tracked.next_store = max(tracked.next_store, min(len(answer.tiers), usable))
        question = Question(
            tracked.request.num_tokens, self._block_tokens, self._block_bytes, local, tiers, self._gpu_queue_s(tracked)
        )
        if not tiers:
            tracked.plan = "hbm" if local else "prefill"
            why = Why.NOT_ASKED if not answer.asked else Why.ALL_IN_HBM if local else Why.NOTHING_CACHED
            decision = decided(tracked.request.request_id, self._wall_clock(), question, None, (0, 0), why)
            return Match(local, (), now, tracked.plan, decision)
        plan = self._costs.plan(question, self._settings.plan)
        count = plan.start if plan.is_cut else plan.num_blocks
        tracked.plan = "fetch" if count == len(tiers) else "cut" if count else "recompute"
        self._counters.add("planned_blocks", "load", count)
        self._counters.add("planned_blocks", "recompute", len(tiers) - count)
        why = Why.PINNED if self._settings.plan != "auto" else Why.LATENCY if plan.measured else Why.NOT_MEASURED
        decision = decided(
            tracked.request.request_id,
            self._wall_clock(),
            question,
            plan.compared,
            (plan.start, plan.end) if plan.is_cut else (0, 0),
            why,
            plan.measured,
            {tier: load.queue_s for tier, load in plan.loads.items()},
        )
        return Match(local, tiers[:count], now, tracked.plan, decision)

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

    def _patience(self, tracked: Tracked, first: int, tiers: Sequence[TierKind]) -> tuple[float, float]:
        """Return for how long a load may take, and for how long it may bring nothing."""
        if self._settings.plan == "fetch":
            return _PINNED_PATIENCE_S, _PINNED_PATIENCE_S
        total = tracked.request.num_tokens
        cached = first * self._block_tokens
        recompute_s = self._costs.recompute_s(total - cached, cached)
        if recompute_s is None:
            return UNKNOWN_PATIENCE_S, UNKNOWN_PATIENCE_S
        loaded = cached + len(tiers) * self._block_tokens
        rest_s = self._costs.prefill().predict(max(1, total - loaded), loaded)
        waited_s = self._clock() - tracked.arrival_s
        # The promise counts from the arrival; what was waited for room is nobody's fault, but not forgotten at once.
        patience_s = _MAX_SLOWDOWN * recompute_s - rest_s - min(waited_s, _MAX_LOOKUP_S)
        expected_s = self._costs.predicted_load_s(tiers[:1], self._block_bytes)
        silence_s = max(_MIN_PATIENCE_S, _MAX_SILENCE * recompute_s) + expected_s
        return max(_MIN_PATIENCE_S, patience_s), silence_s

    # ------------------------------------------------------------ following requests

    def _scheduled(self, output: StepOutput) -> "list[tuple[Tracked, int, Sequence[int]]]":
        """Return each request of the step, its computed tokens before it, and the blocks that it may write from here
        on and did not have before."""
        scheduled: list[tuple[Tracked, int, Sequence[int]]] = []
        for new in output.scheduled_new_reqs:
            tracked = self._requests.get(new.req_id)
            if tracked is not None:
                tracked.block_ids = list(new.block_ids[0])
                fresh = tracked.block_ids[new.num_computed_tokens // self._block_tokens :]
                scheduled.append((tracked, new.num_computed_tokens, fresh))
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
                fresh = fresh[computed // self._block_tokens :]
            else:
                tracked.block_ids += fresh
            if tracked.first_output_s is None and cached.num_output_tokens[i] > 0:
                tracked.first_output_s = self._clock()
            scheduled.append((tracked, computed, fresh))
        return scheduled

    def _offer(self, tracked: Tracked, num_tokens: int) -> None:
        """Order what is complete with `num_tokens` computed tokens to be stored."""
        end = num_tokens // self._block_tokens
        if end <= tracked.next_store or self._clock() < tracked.retry_s:
            return
        order = tracked.store_order(self._hashes(tracked), end)
        if order is not None:
            self._stores.append(order)
            tracked.outstanding += len(order.hashes) * self._num_ranks

    def _tell(self, tracked: Tracked, num_computed: int) -> None:
        """Have the daemon told of a request that has ended."""
        wishes = tracked.wishes
        full = min(num_computed // self._block_tokens, len(tracked.request.block_hashes) // self._per_block)
        hashes = tuple(self._hashes(tracked)[:full])
        report = report_of(tracked, self._costs, self._settings.tenant, self._block_tokens, self._clock())
        looked_up = tuple(self._hashes(tracked)[: self._usable(tracked)][-1:])
        turn = None
        if wishes.session_id and hashes:
            turn = Turn(wishes, tuple(tracked.request.all_token_ids), hashes)

        def tell(shards: Sequence[Shard]) -> None:
            if turn is not None:
                self._sessions.save(shards, turn)
            elif wishes.has_hints:
                tell_hints(shards, wishes, hashes)
            if shards and report is not None:
                last = b"".join(shards[0].keys(looked_up[-1:]))
                shards[0].client.report(msgspec.structs.replace(report, last_block=last))

        self._consult.tell(tell)
