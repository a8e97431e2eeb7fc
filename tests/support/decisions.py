"""A decision as an engine reports it: seven blocks in two tiers, of which the middle was computed."""

from typing import Any

from kvstore.core.outcome import TierKind
from kvstore.wire import DecisionView
from policies.decision import Decision, Happened, PlanKind, PlanSeconds, Run, Situation, Why

PLANS = (
    PlanSeconds(PlanKind.LOAD_ALL, 7, 7, 0.9, 0.1),
    PlanSeconds(PlanKind.RECOMPUTE_ALL, 0, 7, 1.5, 1.5),
    PlanSeconds(PlanKind.PREFIX_CUT, 3, 7, 0.8, 0.8),
    PlanSeconds(PlanKind.TWO_ENDED, 0, 4, 0.7, 0.7),
    PlanSeconds(PlanKind.INTERVAL, 3, 5, 0.5, 0.45),
)
SITUATION = Situation(200, 16, 1000, 3, (Run(TierKind.RAM, 3), Run(TierKind.S3, 4)), 0.1, {TierKind.S3: 0.2}, True)
HAPPENED = Happened(
    ttft_s=0.6,
    waited_s=0.01,
    start=3,
    end=6,
    loaded={TierKind.RAM: 3, TierKind.S3: 1},
    load_s={TierKind.RAM: 0.05, TierKind.S3: 0.4},
    compute_s=0.45,
    abandoned=1,
    usable=7,
    saved_prefill_s=2.0,
)


def decision(request_id: str = "chatcmpl-1", **changes: Any) -> Decision:
    fields: dict[str, Any] = {
        "unix_s": 1_700_000_000.0,
        "situation": SITUATION,
        "plans": PLANS,
        "chosen": PLANS[-1],
        "why": Why.LATENCY,
        "happened": HAPPENED,
        "regret_s": 0.08,
        "best_afterwards": PLANS[-1],
    }
    return Decision(request_id, **(fields | changes))


def decision_view(request_id: str = "chatcmpl-1", **changes: Any) -> DecisionView:
    fields: dict[str, Any] = {
        "tenant": "",
        "model": "model",
        "reported_s": 1_700_000_001.0,
        "prompt_tokens": 200,
        "served_tokens": {"hbm": 48, "ram": 48, "ssd": 0, "s3": 16},
        "recomputed_tokens": 88,
        "miss": {"plan": 48, "never_stored": 40},
        "plan": "interval",
        "ttft_s": 0.6,
        "saved_prefill_s": 2.0,
        "decision": decision(request_id),
    }
    return DecisionView(request_id, **(fields | changes))
