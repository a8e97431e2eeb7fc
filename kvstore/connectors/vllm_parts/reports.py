"""What a finished request has come to, for the daemon's statistics."""

from kvstore.connectors.vllm_parts.costs import Costs
from kvstore.connectors.vllm_parts.tracked import Tracked
from kvstore.core.outcome import TierKind
from kvstore.wire import Report

_LOADED = (TierKind.RAM, TierKind.SSD, TierKind.S3)


def report_of(tracked: Tracked, costs: Costs, tenant: str, block_tokens: int, now: float) -> Report | None:
    """Return the report, but for `last_block`. None: the request ended before anything of it was computed."""
    request = tracked.request
    match = tracked.match
    if request.num_computed_tokens <= 0 or tracked.is_loading:
        return None
    prompt = request.num_prompt_tokens
    hbm = min(tracked.local_tokens, prompt)
    loaded: dict[TierKind, int] = {}
    left = prompt - hbm
    for tier in _LOADED:
        loaded[tier] = min(tracked.served.get(tier, 0), left)
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
        request_id=request.request_id[-200:],
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
        decision=None if match is None else match.decision,
        output_tokens=max(0, request.num_tokens - prompt),
    )


def _why(tracked: Tracked) -> str:
    if tracked.plan in ("recompute", "cut"):
        return "plan"
    return tracked.why or "never_stored"
