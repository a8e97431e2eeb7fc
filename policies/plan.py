"""What the engine does with the blocks that are cached for a prompt, and how long it waits for them.

Covers prefix cuts, the plans that the engine can carry out: blocks [resident, cut) are fetched, then everything from
the cut on is computed. `interval.py` compares them with all other plans.

    0          resident            cut               cached            prompt
    | in HBM   | fetched           | computed though cached | computed  |

Pure: equal costs and equal questions give equal plans.
"""

from dataclasses import dataclass
from typing import Protocol

from kvstore.core.outcome import TierKind
from policies.cost import LoadCost, PrefillCost
from policies.interval import Comparison, Question, compare

# Promised is 1.2 times the time of recomputing everything; the rest is room for what the model gets wrong.
_MAX_SLOWDOWN = 1.15
# Shorter waits would give up on healthy fetches: a thread may have to wait for the interpreter that long.
_MIN_PATIENCE_S = 0.05
UNKNOWN_PATIENCE_S = 2.0


class Costs(Protocol):
    """What a plan asks of the cost model, see `policies/cost.py`."""

    @property
    def prefill_known(self) -> bool: ...

    def load_known(self, tier: TierKind) -> bool: ...

    def prefill_cost(self) -> PrefillCost: ...

    def load_cost(self, tier: TierKind) -> LoadCost: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """Fetch the first `fetch_blocks` of the blocks that are not resident; seconds are predictions from now.
    `compared` is what it was chosen from."""

    fetch_blocks: int
    predicted_s: float
    recompute_s: float
    measured: bool
    compared: Comparison


def choose(question: Question, costs: Costs) -> Plan:
    """Return the prefix cut with the least predicted time to first token.

    Until both times were measured, everything cached is fetched: that is what makes the first measurements, and
    the patience of a fetch bounds what a wrong guess can cost.
    """
    tiers = set(question.tiers)
    measured = costs.prefill_known and all(costs.load_known(tier) for tier in tiers)
    plans = compare(question, costs.prefill_cost(), {tier: costs.load_cost(tier) for tier in tiers})
    chosen = plans.prefix_cut if measured else plans.load_all
    return Plan(chosen.start, chosen.seconds, plans.recompute_all.seconds, measured, plans)


def patience(question: Question, fetch_blocks: int, costs: Costs) -> list[float]:
    """Return for j = 0 … fetch_blocks - 1 how many seconds after the request's arrival a fetch is given up that has
    brought j leading blocks so far: just early enough to compute the rest and still keep the promise."""
    if not costs.prefill_known:
        return [UNKNOWN_PATIENCE_S] * fetch_blocks
    prefill = costs.prefill_cost()
    rest_s = [_prefill_from(question, prefill, question.resident_blocks + landed) for landed in range(fetch_blocks)]
    limit_s = _MAX_SLOWDOWN * _prefill_from(question, prefill, question.resident_blocks)
    return [max(_MIN_PATIENCE_S, limit_s - seconds) for seconds in rest_s]


def _prefill_from(question: Question, prefill: PrefillCost, blocks: int) -> float:
    cached_tokens = blocks * question.block_tokens
    return prefill.predict(question.prompt_tokens - cached_tokens, cached_tokens)
