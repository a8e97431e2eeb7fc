"""A reported request and its decision as JSON, the same for `kvstore explain --json` and HTTP (docs/http.md)."""

from typing import Any

import msgspec

from kvstore.core.outcome import TierKind
from kvstore.wire import DecisionView
from policies.decision import Decision


def as_json(view: DecisionView) -> dict[str, Any]:
    """Return the view with tiers by name instead of number."""
    fields = msgspec.structs.asdict(view)
    fields["decision"] = None if view.decision is None else _decision(view.decision)
    return fields


def _decision(decision: Decision) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(decision)
    # Said one level above.
    del fields["request_id"]
    situation, happened = decision.situation, decision.happened
    fields["situation"]["cached"] = [{"tier": run.tier.label, "blocks": run.blocks} for run in situation.cached]
    fields["situation"]["tier_queue_s"] = _by_label(situation.tier_queue_s)
    if happened is not None:
        fields["happened"]["loaded"] = _by_label(happened.loaded)
        fields["happened"]["load_s"] = _by_label(happened.load_s)
    return fields


def _by_label(values: dict[TierKind, Any]) -> dict[str, Any]:
    return {tier.label: value for tier, value in sorted(values.items())}
