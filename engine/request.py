"""One request on its way through the engine: what was asked, how far it is, and what its KV cost.

                      ┌── waits for its load ──┐
                      ▼                        │
    WAITING ──► FETCHING ── something to compute ──► RUNNING ── eos, length, cancel, fault ──► FINISHED
       ▲           │                                    │
       └───────────┴───────────── preempted ────────────┘

A request that is RUNNING may have a load under way as well: it computes from the front while blocks land behind. Which
it is, is decided anew before each step (`engine/loading.py`). A pool block that a mover is filling this moment is kept
until it has ended, whatever becomes of the request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from engine.course import Course
from kvstore.core.key import BlockKey
from kvstore.core.outcome import TierKind
from policies.decision import Decision

# A pair [start, end) pins the plan: these blocks of the prompt are computed though they are cached, the other cached
# ones are fetched.
PlanMode = Literal["auto", "fetch", "recompute"] | tuple[int, int]
FinishReason = Literal["stop", "length", "cancelled", "error"]


class RequestState(Enum):
    WAITING = "waiting"
    FETCHING = "fetching"
    RUNNING = "running"
    FINISHED = "finished"


def wants_the_bytes(plan: PlanMode) -> bool:
    """Whether the plan is pinned to something that kvstore must bring: then it is given more time than pays."""
    return plan not in ("auto", "recompute")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; temperature 0 is greedy and needs no seed."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Cached:
    """What the lookup said of a prompt: block i lies in `tiers[i]`; `why` says why the one after them is missing.

    `asked` is False where nobody was asked (no daemon, or it did not answer).
    """

    tiers: Sequence[TierKind] = ()
    why: str = "not_asked"
    asked: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """How the prompt's KV came to be; counts are tokens and, with `recomputed`, add up to the prompt.

    `recomputed_though_cached` are those of the recomputed ones that kvstore was said to have. `miss` divides
    `recomputed` by reason; seconds are as measured, `saved_prefill_s` as predicted.
    """

    prompt_tokens: int
    tokens: dict[TierKind, int]
    recomputed: int
    recomputed_though_cached: int
    miss: dict[str, int]
    plan: str
    ttft_s: float
    saved_prefill_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """One event of a request, in order: a token, or its end. The last one has `finish` set."""

    token_id: int | None = None
    finish: FinishReason | None = None
    error: str = ""


@dataclass(eq=False, slots=True)
class Request:
    """`listener` is called on the step loop's thread and must not block.

    Times are of the engine's monotonic clock. `cache` False leaves no trace: nothing is indexed or stored.
    """

    id: str
    tenant: str
    prompt: list[int]
    max_new_tokens: int
    arrival_s: float
    listener: Callable[[Progress], None]
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: frozenset[int] = frozenset()
    plan: PlanMode = "auto"
    cache: bool = True
    root: BlockKey = field(default_factory=lambda: BlockKey(b""))
    # Keys of the full blocks of prompt + output so far; the scheduler extends them.
    keys: list[BlockKey] = field(default_factory=list)
    cached: Cached = field(default_factory=Cached)
    # Seconds already spent on asking kvstore; they count against the patience of a fetch.
    asking_s: float = 0.0

    # From here on the scheduler's own.
    state: RequestState = RequestState.WAITING
    order: int = 0
    output: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_indexed: int = 0
    store_next: int = 0
    store_stopped: bool = False
    # Tokens of the prompt by where their KV came from, and those to compute by reason, as of the newest admission.
    served: dict[TierKind, int] = field(default_factory=dict)
    miss: dict[str, int] = field(default_factory=dict)
    plan_made: str = ""
    recomputed_though_cached: int = 0
    # The choice of the newest admission before the first token, and what has come of it so far.
    decision: Decision | None = None
    course: Course | None = None
    result: Served | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    def count_miss(self, why: str, num_tokens: int) -> None:
        if num_tokens > 0:
            self.miss[why] = self.miss.get(why, 0) + num_tokens

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the tokens [start, end) of prompt followed by output."""
        border = len(self.prompt)
        if end <= border:
            return self.prompt[start:end]
        if start >= border:
            return self.output[start - border : end - border]
        return self.prompt[start:] + self.output[: end - border]

    def parent_of(self, block: int) -> BlockKey:
        return self.keys[block - 1] if block else self.root
