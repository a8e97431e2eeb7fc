"""Learns how far the next request that uses blocks goes into what came with one request.

Of a template and the question behind it, which came together, only the template is used again, and by its class alone
the question would be taken for as good. So it is counted, of what was not used since it came, how many uses that went
through a block ended there though the tier had, or had had, the next one. What is left of a run is worth its class's
index times the share of uses that come to its last block, and goes from there on, part by part.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from policies.base import Ids
from policies.eviction.kinds import HINT_KINDS, NUM_HINTS, NUM_NEWS, new_of
from policies.eviction.lives import Floats, Kinds
from policies.eviction.runs import NUM_BRANCHES

MAX_DEPTH: Final = 511
# Ends are as likely at all depths between two of these: half an octave.
_EDGES: Final = np.unique(np.concatenate([[0, 1, 2, 3], np.floor(2 ** (np.arange(4, 18) / 2)).astype(np.intp)]))
# Where the shares of a branch begin, and of a class within them.
_BRANCH_ROWS: Final = np.arange(NUM_BRANCHES + 1) * NUM_NEWS * (MAX_DEPTH + 1)
_NEW_ROWS: Final = np.array([new_of(kind) * (MAX_DEPTH + 1) for kind in range(NUM_HINTS * HINT_KINDS)])
# So many steps from block to block without an end count before any was seen; and so many of prompts of all lengths as
# evidence for one.
_LEANS_ON_PRIOR: Final = 100.0
_LEANS_ON: Final = 30.0
_LEAST: Final = 0.01
# Counts are halved when so many steps were counted, so that what is learned follows the load.
_HALVE_AT: Final = 1 << 20

# Where a use ended: the branch, the feature of its request's new blocks, the depth.
Ended = tuple[int, int, int]


class Reach:
    """By how what was used began (runs.py) and how many new blocks its request had. 0.4 MB."""

    def __init__(self) -> None:
        rows = NUM_BRANCHES, NUM_NEWS, MAX_DEPTH + 2
        # How many more uses go on from this depth to the next one than to this one; and how many end here.
        self._more: Floats = np.zeros(rows)
        self._ends: Floats = np.zeros(rows)
        # They fall with the depth. The last row is of what was used since.
        self._shares: Floats = np.ones((NUM_BRANCHES + 1, NUM_NEWS, MAX_DEPTH + 1))

    def used(self, branch: int, kind: int, before: int, count: int, *, ends: bool) -> Ended | None:
        """Of what came together `count` blocks were used, behind the first `before`. `ends`: and not the next one;
        then return what was noted."""
        new = new_of(kind)
        first, last = min(max(before, 1), MAX_DEPTH), min(before + count, MAX_DEPTH)
        self._more[branch, new, first] += 1
        self._more[branch, new, last + ends] -= 1
        self._ends[branch, new, last] += ends
        return (branch, new, last) if ends else None

    def goes_on(self, ended: Ended) -> None:
        """The use that ended here did not: it comes in pieces. What it goes on with tells of the step from here."""
        branch, new, last = ended
        self._more[branch, new, last] -= 1
        self._more[branch, new, last + 1] += 1
        self._ends[branch, new, last] -= 1

    def shares(self, branches: npt.NDArray[np.int8], kinds: Kinds, depths: Ids) -> Floats:
        """Return for each run or block which share of the uses comes to this depth."""
        rows = _BRANCH_ROWS.take(branches) + _NEW_ROWS.take(kinds)
        shares: Floats = self._shares.ravel().take(rows + np.minimum(depths, MAX_DEPTH))
        return shares

    def share(self, branch: int, kind: int, depth: int) -> float:
        """`shares` for one."""
        return float(self._shares[branch, new_of(kind), min(depth, MAX_DEPTH)])

    def depth_above(self, branch: int, kind: int, share: float) -> int:
        """Return the greatest depth whose share is greater; 0 where none is."""
        rising = self._shares[branch, new_of(kind), ::-1]
        return max(0, MAX_DEPTH - int(rising.searchsorted(share, side="right")))

    def learn(self) -> None:
        """Bring the shares up to date."""
        steps = np.add.reduceat(self._more.cumsum(axis=-1)[..., : MAX_DEPTH + 1], _EDGES, axis=-1)
        ends = np.add.reduceat(self._ends[..., : MAX_DEPTH + 1], _EDGES, axis=-1)
        if steps.sum() > _HALVE_AT:
            self._more /= 2
            self._ends /= 2
        of_all = ends.sum(axis=1, keepdims=True) / (steps.sum(axis=1, keepdims=True) + _LEANS_ON_PRIOR)
        ending = ((ends + _LEANS_ON * of_all) / (steps + _LEANS_ON)).clip(0, 1)
        going_on = (1 - ending).repeat(np.diff(np.append(_EDGES, MAX_DEPTH + 1)), axis=-1)
        self._shares[:NUM_BRANCHES, :, 2:] = going_on[..., 1:-1].cumprod(axis=-1).clip(_LEAST)
