"""Which of the cached blocks to fetch and which tokens to compute: the plan with the least time to first token.

Covers prefix cuts: blocks [resident, cut) are fetched, then everything from the cut on is computed.

    0          resident            cut               cached            prompt
    | in HBM   | fetched           | computed though cached | computed  |

Pure: equal costs and equal questions give equal plans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.core.outcome import TierKind

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

    def prefill(self, new_tokens: int, cached_tokens: int) -> float: ...

    def load(self, num_bytes: Mapping[TierKind, int]) -> float: ...


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt: its first `resident_blocks` are in HBM, block resident_blocks + i is in `tiers[i]`."""

    prompt_tokens: int
    block_tokens: int
    block_bytes: int
    resident_blocks: int
    tiers: Sequence[TierKind]


@dataclass(frozen=True, slots=True)
class Plan:
    """Fetch the first `fetch_blocks` of the blocks that are not resident; seconds are predictions from now."""

    fetch_blocks: int
    predicted_s: float
    recompute_s: float
    measured: bool


def choose(question: Question, costs: Costs) -> Plan:
    """Return the prefix cut with the least predicted time to first token.

    Until both times were measured, everything cached is fetched: that is what makes the first measurements, and
    the patience of a fetch bounds what a wrong guess can cost.
    """
    times_s = _times_of_cuts(question, costs)
    everything = len(question.tiers)
    measured = costs.prefill_known and all(costs.load_known(tier) for tier in set(question.tiers))
    # Of equal times the longer fetch: it leaves the engine to others.
    cut = min(range(everything + 1), key=lambda cut: (times_s[cut], -cut)) if measured else everything
    return Plan(cut, times_s[cut], times_s[0], measured)


def patience(question: Question, fetch_blocks: int, costs: Costs) -> list[float]:
    """Return for j = 0 … fetch_blocks - 1 how many seconds after the request's arrival a fetch is given up that has
    brought j leading blocks so far: just early enough to compute the rest and still keep the promise."""
    if not costs.prefill_known:
        return [UNKNOWN_PATIENCE_S] * fetch_blocks
    limit_s = _MAX_SLOWDOWN * _prefill_from(question, costs, question.resident_blocks)
    return [
        max(_MIN_PATIENCE_S, limit_s - _prefill_from(question, costs, question.resident_blocks + landed))
        for landed in range(fetch_blocks)
    ]


def _times_of_cuts(question: Question, costs: Costs) -> list[float]:
    """Return the predicted time to first token of fetching the first 0, 1, … all blocks."""
    num_bytes: dict[TierKind, int] = {}
    times_s = [_prefill_from(question, costs, question.resident_blocks)]
    for cut, tier in enumerate(question.tiers, start=1):
        num_bytes[tier] = num_bytes.get(tier, 0) + question.block_bytes
        times_s.append(costs.load(num_bytes) + _prefill_from(question, costs, question.resident_blocks + cut))
    return times_s


def _prefill_from(question: Question, costs: Costs, blocks: int) -> float:
    cached_tokens = blocks * question.block_tokens
    return costs.prefill(question.prompt_tokens - cached_tokens, cached_tokens)
