"""What gittins.py takes for likely before it has seen anything: hazards (hazards.py) of each of its classes.

A session's own blocks are as likely to be used in each half octave of their age, which is the order of LRU, and their
last one hardly is. Shared ones, last used a gap after the time before, are used about once in such a gap, and less and
less likely once they are much older than that: of two those stay whose last two uses are more recent (O'Neil et al.,
The LRU-K page replacement algorithm, SIGMOD 1993). A load's first thousand requests are where this counts.
"""

from typing import Final

import numpy as np

from policies.eviction.hazards import EDGES_S, MAX_HAZARD, NUM_BINS, PRIOR_FIRST, PRIOR_HAZARD, WIDTHS_S
from policies.eviction.kinds import NUM_GAPS, NUM_TURNS, SHAPE, SHARED, TAIL, shared_gap_of
from policies.eviction.lives import Floats

# What nothing, an end, and an expected request say.
_HINT_FACTORS: Final = 1.0, 0.01, 4.0
_TAIL_FACTOR: Final = 0.3
# Behind so many gaps it is half as likely.
_OLD_GAPS: Final = 8.0


def before_seen() -> Floats:
    """Return [*SHAPE, NUM_BINS] hazards."""
    hazards: Floats = np.full((*SHAPE, NUM_BINS), PRIOR_HAZARD)
    hazards[..., 0] = PRIOR_FIRST
    hazards[:, TAIL] *= _TAIL_FACTOR
    middle_s = EDGES_S + WIDTHS_S / 2
    for gap in range(NUM_GAPS * NUM_TURNS):
        gap_s = shared_gap_of(gap)
        rates = 1 / (gap_s + middle_s) / (1 + middle_s / (_OLD_GAPS * gap_s))
        hazards[:, SHARED, :, gap // NUM_TURNS, gap % NUM_TURNS] = 1 - np.exp(-rates * WIDTHS_S)
    said: Floats = np.minimum(hazards * np.reshape(_HINT_FACTORS, (-1, 1, 1, 1, 1, 1)), MAX_HAZARD)
    return said
