"""Messages about requests that are over: what will become of their blocks, what came of them, what was decided."""

import msgspec

from kvstore.messages.base import Message, Priority
from policies.decision import Decision


class Hint(Message, frozen=True, tag=True):
    """What will become of a finished request's blocks. `keys` are joined block keys of one prefix, from its first on.

    `expect_followup`: another request will go on from it; `end`: none will, so it may go first. `priority` -2 … 2: goes
    earlier or later than others. After `ttl_s` seconds without use it is as with `end`; 0: never. For `pin_s` seconds
    the blocks are not evicted from RAM and SSD (0: unpinned), at most one pin for each engine and `pin_name`; Error
    (busy) where more would be pinned than is allowed. The rest holds until the blocks are used again. Answered by Done.
    """

    keys: bytes
    expect_followup: bool = False
    end: bool = False
    priority: Priority = 0
    ttl_s: float = 0.0
    pin_s: float | None = None
    pin_name: str = ""


class Report(Message, frozen=True, tag=True):
    """One finished request, for the statistics. Token counts partition the prompt; `hbm`, `ram`, `ssd`, `s3` were
    served from there. `miss` counts recomputed tokens by reason. Seconds as measured by the engine. `decision` is None
    where nobody wrote it down; whose request it was is `tenant`. `last_block` is the key that ended its lookup (b"":
    there was none), by which a recording of the load finds the prompt."""

    request_id: str
    prompt_tokens: int
    hbm: int
    ram: int
    ssd: int
    s3: int
    recomputed: int
    miss: dict[str, int]
    plan: str
    ttft_s: float
    saved_prefill_s: float = 0.0
    tenant: str = ""
    decision: Decision | None = None
    output_tokens: int = 0
    last_block: bytes = b""


class Observe(Message, frozen=True, tag=True):
    """Faults the engine met that the daemon cannot see, as counts by kind (unknown session, stale slot …)."""

    errors: dict[str, int]


class DecisionView(msgspec.Struct, frozen=True):
    """A reported request as consoles see it; `reported_s` is when (unix). Tokens and seconds as in Report."""

    id: str
    tenant: str
    model: str
    reported_s: float
    prompt_tokens: int
    served_tokens: dict[str, int]
    recomputed_tokens: int
    miss: dict[str, int]
    plan: str
    ttft_s: float
    saved_prefill_s: float
    decision: Decision | None


class DecisionGet(Message, frozen=True, tag=True):
    """What is known of this request, whose id may be cut short; `tenant` None: whosever it is."""

    request_id: str
    tenant: str | None = None


class DecisionList(Message, frozen=True, tag=True):
    """The last requests, newest first; `tenant` None: of all."""

    tenant: str | None = None
    limit: int = 1000


class Decisions(Message, frozen=True, tag=True):
    """Each is an encoded DecisionView, see `decision_view`; `total` is how many there are."""

    decisions: list[bytes]
    total: int
