"""How much of a prompt is loaded: asking, waiting no longer than is worth it, and the plan.

    0        local           …           known        prompt
    | vLLM's | loaded (plan)  | computed  | computed  |

Owned by the scheduler's thread.
"""

import hashlib
import time
from collections.abc import Callable, Sequence

from kvstore.connectors.vllm_parts.consult import Answer, Consult, Inquiry
from kvstore.connectors.vllm_parts.costs import Costs
from kvstore.connectors.vllm_parts.settings import Settings
from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.connectors.vllm_parts.tracked import Match, Tracked
from kvstore.core.key import engine_keys
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
# A session that is new here may have to be asked of the bucket, for no longer than computing the prompt takes.
_SESSION_LOOKUP_S = 2.0
# The first token comes within so much of recomputing everything, and a silent load is given up after so much of it.
_MAX_SLOWDOWN, _MAX_SILENCE = 1.15, 0.1
# A load may take so many times what was predicted.
_MAX_LATENESS = 1.5
# Threads of a busy process are late by so much though all is well.
_MIN_PATIENCE_S = 0.25
# A question is asked for so long at least: its request may not have had its turn yet.
_ASKED_FOR_S = 1.0
# An answer is of use for so long: a request may wait for room in the KV cache.
_ANSWER_AGE_S = 5.0
_MATCH_AGE_S = 0.5


class Matcher:
    """`per_block`: vLLM's hashes for each block of `block_tokens` tokens. `gpu_queue_s` says how many seconds of
    computing stand in front of a request."""

    def __init__(
        self,
        settings: Settings,
        block_tokens: int,
        per_block: int,
        block_bytes: int,
        consult: Consult,
        costs: Costs,
        counters: Counters,
        gpu_queue_s: Callable[[Tracked], float],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._block_tokens = block_tokens
        self._per_block = per_block
        self._block_bytes = block_bytes
        self._consult = consult
        self._costs = costs
        self._counters = counters
        self._gpu_queue_s = gpu_queue_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._salt = b""

    def begin(self, tracked: Tracked) -> None:
        """Ask at once: the answer is there by the time the request's turn comes."""
        if self.usable(tracked) > 0:
            self._ask(tracked, 0)

    def match(self, tracked: Tracked, local: int) -> Match | None:
        """Return what to load after the first `local` blocks; None: it is not known yet."""
        usable = self.usable(tracked)
        tracked.local_tokens = local * self._block_tokens
        if local >= usable:
            inquiry = tracked.inquiry
            # After a load that failed the answer is no longer true, and what is computed instead is offered.
            if tracked.may_load and inquiry is not None and inquiry.answer is not None:
                self._heard(tracked, inquiry.answer)
            if not tracked.is_counted:
                # What was decided before is not carried out: vLLM has got all of it meanwhile.
                tracked.match = None
            if local and tracked.may_load:
                tracked.plan = "hbm"
            return Match(local, (), self._clock(), tracked.plan)
        answer = self._answer(tracked, local)
        if answer is None:
            return None
        match = tracked.match
        if match is None or match.num_local != local or self._clock() > match.decided_s + _MATCH_AGE_S:
            match = tracked.match = self._decide(tracked, answer, local, usable)
        return match

    def reset(self) -> None:
        """Make other keys from now on."""
        self._salt = hashlib.sha256(self._salt + str(time.time_ns()).encode()).digest()

    def hashes(self, tracked: Tracked) -> Sequence[bytes]:
        """Return what each full block is called; none where they must be neither loaded nor stored."""
        if tracked.adapter is None:
            return ()
        hashes = tracked.hashes(self._per_block)
        if tracked.adapter:
            # vLLM's hashes know nothing of its weights. As with the namespace, KV events keep their names.
            hashes = engine_keys(tracked.adapter, hashes)
        if not self._salt:
            return hashes
        return [hashlib.sha256(self._salt + each).digest() for each in hashes]

    def usable(self, tracked: Tracked) -> int:
        """How many leading blocks a load may bring. A load before the step leaves it a token to compute."""
        request = tracked.request
        if (
            not tracked.may_load
            or tracked.adapter is None
            or self._settings.plan == "recompute"
            or request.skip_reading_prefix_cache
        ):
            return 0
        tokens = request.num_tokens - (self._settings.load == "sync")
        return min(tokens // self._block_tokens, len(request.block_hashes) // self._per_block)

    def _ask(self, tracked: Tracked, first: int) -> None:
        now = self._clock()
        hashes = self.hashes(tracked)[first : self.usable(tracked)]
        patience_s = self._lookup_s(tracked)
        session_id = tracked.wishes.session_id if not tracked.num_inquiries else ""
        session_s = self._session_s(tracked, patience_s) if session_id and self._consult.awaits(session_id) else 0.0
        tracked.num_inquiries += 1
        tracked.waiting_s = None
        until_s = now + max(patience_s, session_s, _ASKED_FOR_S)
        tracked.inquiry = Inquiry(
            tracked.request.request_id,
            first,
            hashes,
            now,
            until_s,
            patience_s,
            max(patience_s, session_s),
            session_id,
        )
        self._consult.ask(tracked.inquiry)

    def _lookup_s(self, tracked: Tracked) -> float:
        if self._settings.plan == "fetch":
            wait_s = _PINNED_LOOKUP_S
        elif self._consult.gate.is_silent:
            wait_s = _MIN_LOOKUP_S
        else:
            predicted_s = self._costs.recompute_s(tracked.request.num_tokens, 0)
            share_s = _MAX_LOOKUP_S if predicted_s is None else _LOOKUP_SHARE * predicted_s
            wait_s = min(max(share_s, _MIN_LOOKUP_S), _MAX_LOOKUP_S)
        return wait_s if self._settings.deadline_s is None else min(wait_s, self._settings.deadline_s)

    def _session_s(self, tracked: Tracked, patience_s: float) -> float:
        """How long a request waits until its session was met, once it is known what is cached without."""
        predicted_s = self._costs.recompute_s(tracked.request.num_tokens, 0)
        wait_s = _SESSION_LOOKUP_S if predicted_s is None else min(predicted_s, _SESSION_LOOKUP_S)
        wait_s = max(wait_s, patience_s)
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
            if tracked.waiting_s is None:
                tracked.waiting_s = now
            # From its turn on: until then it waits for others.
            early = inquiry.early
            patience_s = inquiry.patience_s if early is None else inquiry.session_patience_s
            if now < tracked.waiting_s + patience_s:
                return None
            inquiry.is_dropped = True
            inquiry.answer = answer = early or Answer(why="timed_out")
        end = answer.first + len(answer.tiers)
        is_out_of_reach = local < answer.first or end < local
        self._heard(tracked, answer)
        if is_out_of_reach and answer.asked and tracked.num_inquiries < 3:
            # vLLM itself has what kvstore lacks, and kvstore may have what comes then.
            self._ask(tracked, local)
            return None
        return answer

    def _heard(self, tracked: Tracked, answer: Answer) -> None:
        """What is stored is not offered again, and what was dropped meanwhile is."""
        if answer.first == 0 and answer.asked:
            tracked.next_store = len(answer.tiers)

    def _decide(self, tracked: Tracked, answer: Answer, local: int, usable: int) -> Match:
        now = self._clock()
        tiers = answer.tiers[local - answer.first :] if local >= answer.first else ()
        tiers = tiers[: usable - local]
        tracked.why = answer.why
        tracked.num_cached = len(tiers)
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

    def count(self, tracked: Tracked) -> None:
        """Count what was decided, once it is carried out: vLLM asks again as long as it lacks room."""
        match = tracked.match
        if match is None or tracked.is_counted:
            return
        tracked.is_counted = True
        self._counters.add("consults", "hit" if tracked.num_cached else tracked.why or "miss")
        if tracked.num_cached:
            self._counters.add("planned_blocks", "load", len(match.tiers))
            self._counters.add("planned_blocks", "recompute", tracked.num_cached - len(match.tiers))

    def patience(self, tracked: Tracked, first: int, tiers: Sequence[TierKind]) -> tuple[float, float]:
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
        if self._costs.are_known(tiers):
            # What then is still missing is computed, so the wait must not grow to that of computing everything.
            predicted_s = self._costs.predicted_load_s(tiers, self._block_bytes)
            patience_s = min(patience_s, _MAX_LATENESS * predicted_s + max(_MIN_PATIENCE_S, _MAX_SILENCE * recompute_s))
        expected_s = self._costs.predicted_load_s(tiers[:1], self._block_bytes)
        silence_s = max(_MIN_PATIENCE_S, _MAX_SILENCE * recompute_s) + expected_s
        return max(_MIN_PATIENCE_S, patience_s), silence_s
