"""How far to compute before looking again, while blocks land from the far end: where both ends meet soonest.

    0        front        end                  cached      prompt
    | in HBM | compute    | lands meanwhile    | compute   |

The question of `interval.py`, asked again before every chunk of a request whose loads are under way: with what has
landed, what the loads are now expected to take, and what is in front of the GPU now. Only two starts are of use then:
at once, or once the head that was asked for first is there. For each the end is found by bisection: computing takes the
longer, loading the shorter the further it lies. Some tens of microseconds, for any number of blocks. Pure.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from policies.cost import PrefillCost

# Computing beside a load takes from it (cores, memory, the interpreter), so it is begun only where it promises to be
# sooner than waiting by this share. Without it, 128 tokens in RAM and 128 in S3 at 60 MB/s took 0.256 s on 2 cores, and
# 0.227 s to load all (`kvstore bench plan`, medians of 5).
_WORTH = 0.06
# And by this share where the plan was to load everything: then its estimate of the gain was too small to believe, and
# only a load that is slower than predicted is a reason to think again. 2,048 tokens over 300 MB/s took 0.66 s with a
# front that was computed on the same 2 cores, and 0.44 s to load all.
_WORTH_UNPLANNED = 0.25


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left of one prompt. Blocks are counted from its beginning: `front` is the first that is not in HBM, and
    those before `head_end` were asked for first, in order."""

    prompt_tokens: int
    block_tokens: int
    front: int
    head_end: int
    cached: int
    gpu_queue_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Compute [start, end), the rest of the cached blocks lands; `seconds` until the first token. Where end is the last
    cached block, everything is computed in one go."""

    start: int
    end: int
    seconds: float
    gpu_s: float


def meet(
    rest: Rest,
    prefill: PrefillCost,
    loaded_s: Callable[[int, int], float],
    gpu_price: float = 0.0,
    *,
    is_planned: bool = True,
) -> Meeting:
    """Return the plan with the least seconds + gpu_price · gpu_s, or to wait where that is hardly worse; `is_planned`
    False: or not much worse, since to compute meanwhile was not the plan.

    `loaded_s(start, end)` says when all blocks from the front on that are under way are there, those of [start, end)
    left out, which are computed.
    """
    best: Meeting | None = None
    best_price = math.inf
    worth = _WORTH if is_planned else _WORTH_UNPLANNED
    starts = (rest.front,) if rest.head_end <= rest.front else (rest.front, rest.head_end)
    for start in starts:
        begin_s = max(rest.gpu_queue_s, loaded_s(start, rest.cached))
        crossing = _crossing(rest, prefill, loaded_s, start, begin_s)
        for end in _ends(rest, prefill.chunk_tokens, start, crossing, gpu_price):
            plan = _evaluate(rest, prefill, loaded_s, start, end, begin_s)
            price = plan.seconds + gpu_price * plan.gpu_s
            if best is None or price < best_price * (1 - worth if best.start == best.end else 1):
                best, best_price = plan, price
    assert best is not None
    return best


def _ends(rest: Rest, chunk_tokens: int, start: int, crossing: int, gpu_price: float) -> list[int]:
    """Return the ends to compare, the one that computes least first: of equal plans it is taken."""
    # A last chunk of a few blocks may cost more than waiting for them.
    chunk_blocks = max(1, chunk_tokens // rest.block_tokens)
    whole_chunks = start + (crossing - start) // chunk_blocks * chunk_blocks
    ends = {start, max(crossing - 1, start), crossing, whole_chunks, rest.cached}
    if gpu_price > 0:
        ends |= {start + (crossing - start) * part // 4 for part in (1, 2, 3)}
    return sorted(ends)


def _crossing(
    rest: Rest, prefill: PrefillCost, loaded_s: Callable[[int, int], float], start: int, begin_s: float
) -> int:
    """Return the first end at which computing takes as long as loading."""
    low, high = start, rest.cached
    while low < high:
        middle = (low + high) // 2
        if begin_s + between_s(rest, prefill, start, middle) >= loaded_s(start, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _evaluate(
    rest: Rest,
    prefill: PrefillCost,
    loaded_s: Callable[[int, int], float],
    start: int,
    end: int,
    begin_s: float,
) -> Meeting:
    if end == rest.cached:
        gpu_s = through_s(rest, prefill, start)
        return Meeting(start, end, begin_s + gpu_s, gpu_s)
    first_s, last_s = between_s(rest, prefill, start, end), through_s(rest, prefill, rest.cached)
    return Meeting(start, end, max(begin_s + first_s, loaded_s(start, end)) + last_s, first_s + last_s)


def between_s(rest: Rest, prefill: PrefillCost, start: int, end: int) -> float:
    """Return the seconds to compute the blocks [start, end)."""
    return prefill.predict((end - start) * rest.block_tokens, start * rest.block_tokens)


def through_s(rest: Rest, prefill: PrefillCost, block: int) -> float:
    """Return the seconds to compute everything from `block` to the end of the prompt."""
    position = block * rest.block_tokens
    return prefill.predict(rest.prompt_tokens - position, position)
