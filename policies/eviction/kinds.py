"""Numbers the classes that gittins.py sorts blocks into, and smooths the gaps that they depend on."""

import math
from typing import Final

NUM_HINTS: Final = 3
NUM_PLACES: Final = 3
NUM_NEWS: Final = 8
NUM_GAPS: Final = 8
NUM_TURNS: Final = 7
SHAPE: Final = NUM_HINTS, NUM_PLACES, NUM_NEWS, NUM_GAPS, NUM_TURNS
PLACE_KINDS: Final = NUM_NEWS * NUM_GAPS * NUM_TURNS
HINT_KINDS: Final = NUM_PLACES * PLACE_KINDS
OWN, TAIL, SHARED = range(NUM_PLACES)
_NEWEST: Final = 0.5
SHORTEST_S: Final = 0.25
_GAP_OCTAVES: Final = 1.5
# The feature of a gap of a second of shared blocks.
_SHARED_GAP_1S: Final = 4


def smooth(gap_s: float, before_s: float) -> float:
    """Return a gap as it counts after one before it, which is 0 where there was none."""
    gap_s = max(gap_s, SHORTEST_S)
    return gap_s**_NEWEST * before_s ** (1 - _NEWEST) if before_s else gap_s


def kind_of(num_new: int, gap_s: float | None, turn: int) -> int:
    """Return the class of a session's own blocks; with TAIL * PLACE_KINDS more it is that of the last one."""
    new = min((num_new + 1).bit_length() - 1, NUM_NEWS - 1)
    gap = 0 if gap_s is None else min(int(math.log2(max(gap_s, 1.0)) / _GAP_OCTAVES) + 1, NUM_GAPS - 1)
    return (new * NUM_GAPS + gap) * NUM_TURNS + min(turn - 1 if turn < 3 else turn.bit_length(), NUM_TURNS - 1)


def shared_kind(fan: int, gap_s: float) -> int:
    """Return the class of blocks that were continued in `fan` ways."""
    gap = min(math.floor(math.log2(max(gap_s, 0.125))) + _SHARED_GAP_1S, NUM_GAPS * NUM_TURNS - 1)
    return SHARED * PLACE_KINDS + min(fan.bit_length(), NUM_NEWS - 1) * NUM_GAPS * NUM_TURNS + gap


def new_of(kind: int) -> int:
    """Return how many new blocks the request of this class of own blocks had, as a feature."""
    return kind % PLACE_KINDS // (NUM_GAPS * NUM_TURNS)


def shared_gap_of(gap: int) -> float:
    """Return the middle of the gaps of shared blocks with this feature."""
    return float(2.0 ** (gap - _SHARED_GAP_1S + 0.5))
