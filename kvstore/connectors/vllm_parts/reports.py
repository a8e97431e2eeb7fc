"""What a finished request has come to, for the daemon's statistics and for `kvstore explain`."""

from dataclasses import replace

from kvstore.connectors.vllm_parts.costs import Costs
from kvstore.connectors.vllm_parts.tracked import Match, Tracked
from kvstore.core.outcome import TierKind
from kvstore.wire import Report
from policies.decision import Decision, Happened

_MAX_ID_CHARS = 200


def report_of(tracked: Tracked, costs: Costs, tenant: str, block_tokens: int, now: float) -> Report:
    """Return the report of a request of which something was computed, but for `last_block`."""
    request = tracked.request
    prompt = request.num_prompt_tokens
    hbm = min(tracked.local_tokens, prompt)
    blocks = _of_use(tracked)
    loaded = dict.fromkeys(TierKind, 0)
    left = prompt - hbm
    for tier, count in blocks.items():
        # A prompt that was loaded whole has its last token computed again.
        loaded[tier] = min(count * block_tokens, left)
        left -= loaded[tier]
    num_loaded = sum(loaded.values())
    recomputed = prompt - hbm - num_loaded
    # What is in no full block can be in no cache.
    partial = min(recomputed, prompt % block_tokens)
    miss = {"partial_block": partial} if partial else {}
    if recomputed > partial:
        miss[_why(tracked)] = recomputed - partial
    saved_s = costs.prefill().predict(num_loaded, hbm) if num_loaded else 0.0
    first_s = now if tracked.first_output_s is None else tracked.first_output_s
    return Report(
        request_id=request.request_id[-_MAX_ID_CHARS:],
        prompt_tokens=prompt,
        hbm=hbm,
        ram=loaded[TierKind.RAM],
        ssd=loaded[TierKind.SSD],
        s3=loaded[TierKind.S3],
        recomputed=recomputed,
        miss=miss,
        plan=tracked.plan,
        ttft_s=max(0.0, first_s - tracked.arrival_s),
        saved_prefill_s=saved_s,
        tenant=tenant,
        decision=_decision(tracked, blocks, first_s, saved_s),
        output_tokens=max(0, request.num_tokens - prompt),
    )


def _of_use(tracked: Tracked) -> dict[TierKind, int]:
    """Return how many blocks vLLM has got from which tier: what came behind one that did not is computed."""
    if tracked.failed_from is None or tracked.match is None:
        return tracked.loaded
    counts: dict[TierKind, int] = {}
    for tier in tracked.match.tiers[: tracked.failed_from]:
        counts[tier] = counts.get(tier, 0) + 1
    return counts


def _decision(tracked: Tracked, blocks: dict[TierKind, int], first_s: float, saved_prefill_s: float) -> Decision | None:
    """Return the record with what happened. It is not judged: the best plan may be one that vLLM cannot carry out."""
    match = tracked.match
    # What was decided after a preemption says nothing of the first token.
    if match is None or match.decision is None or tracked.num_preemptions:
        return None
    return replace(match.decision, happened=_happened(tracked, match, match.decision, blocks, first_s, saved_prefill_s))


def _happened(
    tracked: Tracked,
    match: Match,
    decision: Decision,
    blocks: dict[TierKind, int],
    first_s: float,
    saved_prefill_s: float,
) -> Happened:
    num_cached = decision.situation.num_cached
    num_loaded = sum(blocks.values())
    ready_s = match.decided_s if tracked.load_end_s is None else max(match.decided_s, tracked.load_end_s)
    return Happened(
        ttft_s=max(0.0, first_s - tracked.arrival_s),
        waited_s=max(0.0, match.decided_s - tracked.arrival_s),
        start=min(num_loaded, num_cached),
        end=num_cached,
        loaded={tier: count for tier, count in blocks.items() if count},
        load_s={tier: ready_s - match.decided_s for tier, count in blocks.items() if count},
        compute_s=max(0.0, first_s - ready_s),
        failed=max(0, len(match.tiers) - num_loaded),
        usable=num_cached if tracked.failed_from is None else min(tracked.failed_from, num_cached),
        saved_prefill_s=saved_prefill_s,
    )


def _why(tracked: Tracked) -> str:
    if tracked.failed_from is not None:
        return "failed"
    if tracked.plan in ("recompute", "cut"):
        return "plan"
    return tracked.why or "never_stored"
