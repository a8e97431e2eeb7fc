"""From which prefix on loading it from a tier is faster than computing it again."""

from typing import Final

from kvstore.core.outcome import TierKind
from policies.cost import LoadCost, PrefillCost
from policies.interval import Question, compare

MAX_BLOCKS: Final = 1 << 14


def break_even_tokens(
    prefill: PrefillCost, load: LoadCost, block_tokens: int, block_bytes: int, new_tokens: int
) -> int | None:
    """Return the shortest prefix, in whole blocks, that is loaded faster than computed, `new_tokens` behind it in both
    cases; None where that is none of up to `MAX_BLOCKS` blocks: a longer one may still be.

    What loading takes longer than computing is concave in the length, since prefill grows with its square: once it is
    below zero it stays there.
    """

    def pays(blocks: int) -> bool:
        tiers = [TierKind.SSD] * blocks
        question = Question(blocks * block_tokens + new_tokens, block_tokens, block_bytes, 0, tiers)
        plans = compare(question, prefill, {TierKind.SSD: load})
        return plans.load_all.seconds < plans.recompute_all.seconds

    if not pays(MAX_BLOCKS):
        return None
    low, high = 0, MAX_BLOCKS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high * block_tokens
