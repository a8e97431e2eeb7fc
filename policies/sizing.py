"""How much room a trace needs: the smallest tiers that serve a share of what an infinite cache would.

The SSD holds what RAM does, too, as in the daemon. So it is as large as one tier must be for the whole share, and RAM
as large as one tier must be for the part that is to come from RAM.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

# Sizes are found to this precision; what a policy hits does not grow evenly, so more would say nothing.
_PRECISION: Final = 0.02


@dataclass(frozen=True, slots=True)
class Size:
    """The smallest capacity that was found to reach `token_hit_ratio`."""

    blocks: int
    token_hit_ratio: float


def smallest(hit_ratio: Callable[[int], float], enough: float, most_blocks: int) -> Size:
    """Return the smallest capacity whose `hit_ratio` is at least `enough`, to within 2%, by about 15 calls.

    `most_blocks` is taken where nothing below is enough. `hit_ratio` is taken to grow with the capacity.
    """
    low, high, reached = 0, most_blocks, hit_ratio(most_blocks)
    while high - low > max(1, _PRECISION * high):
        # From the middle of the scale of sizes, on which a tenth is as far away as ten times as much.
        middle = max(low + 1, min(high - 1, round((max(low, high / 64) * high) ** 0.5)))
        found = hit_ratio(middle)
        if found >= enough:
            high, reached = middle, found
        else:
            low = middle
    return Size(high, reached)
