"""The record of one request: what was known when its plan was chosen, what was compared, and what happened then.

Holds counts, seconds and names of plans, never tokens, keys or text, so that it can be kept and shown. A record may
come from any engine: `check` refuses one that is no sense or no bounded size. Its regret is worked out in
`hindsight.py`.

    0          resident          start           end           cached      prompt
    | in HBM   | loaded          | computed      | loaded      | computed  |

`start` and `end` count blocks from the first that is not resident, as in `interval.py`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Annotated, Final

import msgspec

from kvstore.core.outcome import TierKind

MAX_RUNS: Final = 64
MAX_PLANS: Final = 8
MAX_ID_CHARS: Final = 200
_MAX_COUNT: Final = 1 << 32
_MAX_SECONDS: Final = 1e6


class PlanKind(StrEnum):
    """What a compute interval comes to. NO_CHOICE: no block was cached beyond HBM."""

    LOAD_ALL = "load_all"
    RECOMPUTE_ALL = "recompute_all"
    PREFIX_CUT = "prefix_cut"
    TWO_ENDED = "two_ended"
    INTERVAL = "interval"
    NO_CHOICE = "no_choice"


class Why(StrEnum):
    """Why the chosen plan was chosen."""

    LATENCY = "latency"  # the least predicted time to first token
    THROUGHPUT = "throughput"  # the same, with a price on GPU seconds
    NOT_MEASURED = "not_measured"  # costs are not known well enough: the plan that is safe and lets them be measured
    PINNED = "pinned"  # the request named its plan
    NOTHING_CACHED = "nothing_cached"
    ALL_IN_HBM = "all_in_hbm"  # what is cached is in HBM already
    NOT_ASKED = "not_asked"  # no daemon, or it did not answer in time


@dataclass(frozen=True, slots=True)
class Run:
    """So many blocks after one another in the same tier."""

    tier: TierKind
    blocks: int


@dataclass(frozen=True, slots=True)
class PlanSeconds:
    """One plan that was compared: blocks [start, end) computed, `seconds` from the decision to the first token, of
    which `gpu_s` computing. Predictions."""

    kind: PlanKind
    start: int
    end: int
    seconds: float
    gpu_s: float


@dataclass(frozen=True, slots=True)
class Situation:
    """What the planner was asked. `cached` are the blocks beyond the resident ones, in order; `is_measured` tells
    whether all costs that decide were measured, else some are a guess. Queues are seconds of others' work in front."""

    prompt_tokens: int
    block_tokens: int
    block_bytes: int
    resident_blocks: int = 0
    # Lengths are looked at before a message is read any further: a long one would cost the daemon time.
    cached: Annotated[tuple[Run, ...], msgspec.Meta(max_length=MAX_RUNS)] = ()
    gpu_queue_s: float = 0.0
    tier_queue_s: dict[TierKind, float] = field(default_factory=dict)
    is_measured: bool = False

    @property
    def num_cached(self) -> int:
        return sum(run.blocks for run in self.cached)


@dataclass(frozen=True, slots=True)
class Happened:
    """How it went. `ttft_s` counts from the request's arrival, `waited_s` of it passed before the decision.

    Blocks [start, end) were computed and the other cached ones loaded: `loaded` blocks by tier, the last of which was
    in HBM `load_s` after the decision. `compute_s` is what computing took up to the first token, without the time that
    it waited for loads. Of the blocks that were to be loaded, `late` did not come in time, `failed` were not there or
    not valid, and `abandoned` were not needed any more, since computing was there first. `usable` is how many leading
    cached blocks could have been loaded.
    """

    ttft_s: float
    waited_s: float
    start: int
    end: int
    loaded: dict[TierKind, int] = field(default_factory=dict)
    load_s: dict[TierKind, float] = field(default_factory=dict)
    compute_s: float = 0.0
    late: int = 0
    failed: int = 0
    abandoned: int = 0
    usable: int = 0
    saved_prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """`unix_s` is when it was made. `plans` are the best of each kind, in no order; `chosen` is what was begun.

    `happened` is None until the first token, `regret_s` and `best_afterwards` until it was judged, and for ever where
    there was no choice.
    """

    request_id: str
    unix_s: float
    situation: Situation
    plans: Annotated[tuple[PlanSeconds, ...], msgspec.Meta(max_length=MAX_PLANS)]
    chosen: PlanSeconds
    why: Why
    happened: Happened | None = None
    regret_s: float | None = None
    best_afterwards: PlanSeconds | None = None


def kind_of(start: int, end: int, num_cached: int) -> PlanKind:
    """Return what computing the blocks [start, end) of so many cached ones is called."""
    if num_cached == 0:
        return PlanKind.NO_CHOICE
    if start == end:
        return PlanKind.LOAD_ALL
    if start == 0:
        return PlanKind.RECOMPUTE_ALL if end == num_cached else PlanKind.TWO_ENDED
    return PlanKind.PREFIX_CUT if end == num_cached else PlanKind.INTERVAL


def runs_of(tiers: Sequence[TierKind]) -> tuple[Run, ...]:
    """Return the blocks' tiers as runs. Where they alternate too often the order of the last ones is not kept, only
    how many lie where."""
    runs = [Run(tier, sum(1 for _ in group)) for tier, group in groupby(tiers)]
    if len(runs) <= MAX_RUNS:
        return tuple(runs)
    kept, rest = runs[: MAX_RUNS - len(TierKind)], runs[MAX_RUNS - len(TierKind) :]
    counts = {tier: sum(run.blocks for run in rest if run.tier is tier) for tier in TierKind}
    return (*kept, *(Run(tier, count) for tier, count in counts.items() if count))


def check(decision: Decision) -> None:
    """Raises ValueError, saying what is wrong, where the record makes no sense or has no bounded size."""
    if not 0 < len(decision.request_id) <= MAX_ID_CHARS or not decision.request_id.isprintable():
        raise ValueError("the request's id is empty, too long, or cannot be printed")
    situation, happened = decision.situation, decision.happened
    if len(situation.cached) > MAX_RUNS or len(decision.plans) > MAX_PLANS:
        raise ValueError(f"more than {MAX_RUNS} runs of blocks or {MAX_PLANS} plans")
    _check_counts(
        [situation.prompt_tokens, situation.block_tokens, situation.block_bytes, situation.resident_blocks],
        (run.blocks for run in situation.cached),
    )
    _check_seconds([situation.gpu_queue_s], situation.tier_queue_s)
    if not 0 <= decision.unix_s < 1e11:
        raise ValueError("the decision's time is none")
    num_cached = situation.num_cached
    if (situation.resident_blocks + num_cached) * situation.block_tokens > situation.prompt_tokens:
        raise ValueError("more blocks than the prompt has")
    afterwards = [] if decision.best_afterwards is None else [decision.best_afterwards]
    for plan in (*decision.plans, decision.chosen, *afterwards):
        _check_interval(plan.start, plan.end, num_cached)
        _check_seconds([plan.seconds, plan.gpu_s], {})
    if happened is not None:
        _check_happened(happened, num_cached)
    if decision.regret_s is not None and not abs(decision.regret_s) < _MAX_SECONDS:
        raise ValueError("the regret is no number of seconds")


def _check_happened(happened: Happened, num_cached: int) -> None:
    _check_interval(happened.start, happened.end, num_cached)
    counts = [happened.late, happened.failed, happened.abandoned, happened.usable, *happened.loaded.values()]
    _check_counts(counts, [])
    if max(counts) > num_cached or sum(happened.loaded.values()) > num_cached:
        raise ValueError("more blocks came or failed than were cached")
    seconds = [happened.ttft_s, happened.waited_s, happened.compute_s, happened.saved_prefill_s]
    _check_seconds(seconds, happened.load_s)


def _check_interval(start: int, end: int, num_cached: int) -> None:
    if not 0 <= start <= end <= num_cached:
        raise ValueError("an interval lies outside of the cached blocks")


def _check_counts(counts: Iterable[int], more: Iterable[int]) -> None:
    for group in (counts, more):
        if not all(0 <= count <= _MAX_COUNT for count in group):
            raise ValueError("a count lies outside of any request's")


def _check_seconds(seconds: Iterable[float], by_tier: Mapping[TierKind, float]) -> None:
    for group in (seconds, by_tier.values()):
        if not all(math.isfinite(value) and 0 <= value < _MAX_SECONDS for value in group):
            raise ValueError("seconds lie outside of any request's")
