"""What engines report of their requests: how much was served from where, what was missed and why."""

import math
from collections import deque
from statistics import median

from kvstore.core.counts import Counts
from kvstore.core.outcome import TierKind
from kvstore.wire import Report

_RECENT = 512


class RequestStats:
    """Sums over the requests that engines reported."""

    def __init__(self) -> None:
        self._count = 0
        self._prompt_tokens = 0
        self._recomputed_tokens = 0
        self._hit_tokens = dict.fromkeys(TierKind, 0)
        self._miss = Counts()
        self._plans = Counts()
        self._saved_prefill_s = 0.0
        self._ttft_s: deque[float] = deque(maxlen=_RECENT)
        self._ttft_sum_s = 0.0

    def add(self, report: Report) -> None:
        """Raises ValueError, and counts nothing, where the token counts do not make up the prompt."""
        served = (report.hbm, report.ram, report.ssd, report.s3)
        parts = (*served, report.recomputed)
        if min(parts) < 0 or sum(parts) != report.prompt_tokens or report.prompt_tokens > 1 << 32:
            raise ValueError("the token counts of a report do not add up to its prompt")
        if not (0.0 <= report.ttft_s < 1e6 and 0.0 <= report.saved_prefill_s < 1e6):
            raise ValueError("a report's seconds lie outside of any request's")
        self._count += 1
        self._prompt_tokens += report.prompt_tokens
        self._recomputed_tokens += report.recomputed
        for tier, tokens in zip(TierKind, served, strict=True):
            self._hit_tokens[tier] += tokens
        for reason, tokens in report.miss.items():
            self._miss.add(reason, tokens)
        self._plans.add(report.plan)
        self._saved_prefill_s += report.saved_prefill_s
        self._ttft_s.append(report.ttft_s)
        self._ttft_sum_s += report.ttft_s

    def hit_tokens(self, tier: TierKind) -> int:
        return self._hit_tokens[tier]

    def snapshot(self) -> dict[str, object]:
        ordered = sorted(self._ttft_s)
        return {
            "count": self._count,
            "prompt_tokens": self._prompt_tokens,
            "hit_tokens": {tier.label: tokens for tier, tokens in self._hit_tokens.items()},
            "recomputed_tokens": self._recomputed_tokens,
            "miss_tokens": self._miss.snapshot(),
            "plans": self._plans.snapshot(),
            "saved_prefill_s": round(self._saved_prefill_s, 6),
            "ttft_s": {
                "sum": round(self._ttft_sum_s, 6),
                "recent_p50": median(ordered) if ordered else None,
                "recent_p99": ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else None,
            },
        }
