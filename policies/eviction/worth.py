"""What it is worth to keep the runs of a tier (runs.py): by the class and age of their blocks (hazards.py), and by how
far uses go into what came with one request (reach.py)."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from policies.base import Ids
from policies.eviction.hazards import Hazards
from policies.eviction.kinds import SHAPE
from policies.eviction.lives import MAX_LIVES, Floats, Lives
from policies.eviction.priors import before_seen
from policies.eviction.reach import MAX_DEPTH, Ended, Reach
from policies.eviction.runs import USED, Runs

# A priority is worth so many times the index.
_PRIORITY_FACTOR: Final = 4.0
_TIE: Final = 1e-6
# What of one run is worth at most so many times the next goes with what is not worth more.
_LITTLE: Final = 1.05
# A block in one number: its life, where its run began (two bits), and how deep it is.
_DEPTH_BITS: Final = MAX_DEPTH.bit_length()
LIFE_BITS: Final = _DEPTH_BITS + 2

Numbers = npt.NDArray[np.int64]


class Worth:
    """Learns from what is told of the runs' uses, and notes in their columns when and as what they were used."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._hazards = Hazards(SHAPE, before_seen())
        self._lives = Lives()
        self._reach = Reach()
        self._has_priorities = False

    # ------------------------------------------------------------ what happens

    def begin(self, run: int, kind: int, now_s: float) -> None:
        """The run came, or is used again, and is of this class now."""
        runs = self._runs
        runs.used_s[run] = now_s
        runs.kind[run] = kind
        runs.life[run] = self._lives.begin(kind, now_s)
        self._hazards.saw(kind)

    def finish(self, life: int, now_s: float) -> None:
        """What was in this life was used again, in the tier or not."""
        ended = self._lives.finish(life, now_s)
        if ended is not None:
            self._hazards.end(*ended)

    def void(self, life: int) -> None:
        """It was none."""
        self._lives.void(life)

    def change(self, run: int, kind: int) -> None:
        """The run is of another class than was thought when it was used last."""
        runs = self._runs
        runs.kind[run] = kind
        self._lives.set_kind(int(runs.life[run]), kind)
        self._hazards.saw(kind)

    def prefer(self, runs: Sequence[int], priority: int) -> None:
        self._has_priorities |= priority != 0
        self._runs.priority[runs] = priority

    def go_through(self, run: int, *, ends: bool) -> Ended | None:
        """What was not used since it came is used for the first time; `ends`: and what was behind it is not, of which
        the note is returned."""
        runs = self._runs
        branch, kind, before = int(runs.branch[run]), int(runs.kind[run]), int(runs.before[run])
        runs.branch[run] = USED
        return self._reach.used(branch, kind, before, int(runs.length[run]), ends=ends)

    def go_on(self, ended: Ended) -> None:
        """The use of which this is the note went on after all: it comes in pieces."""
        self._reach.goes_on(ended)

    def come_back(self, number: int, count: int, *, ends: bool, now_s: float) -> float | None:
        """So many blocks that had left are used again, the first of which is so in one number; return how long ago they
        were used before, or None where that is forgotten. `ends`: and what was behind them is not."""
        life, branch, depth = number >> LIFE_BITS, number >> _DEPTH_BITS & USED, number & MAX_DEPTH
        if self._lives.end - life > MAX_LIVES:
            return None
        if branch != USED:
            kind = int(self._lives.kinds[life % MAX_LIVES])
            self._reach.used(branch, kind, depth - 1, count, ends=ends)
        self.finish(life, now_s)
        return now_s - self._lives.began(life)

    def learn(self, now_s: float) -> None:
        """Bring up to date what is learned: some milliseconds."""
        self._hazards.learn(self._lives, now_s)
        self._reach.learn()

    # ------------------------------------------------------------ what is worth how much

    def order(self, leaves: Ids, now_s: float) -> tuple[list[int], list[float]]:
        """Return these runs and their indices, the lowest index first."""
        runs = self._runs
        ages_s = now_s - runs.used_s[leaves]
        # Of equal indices what was used longest ago.
        indices = self._hazards.index(runs.kind[leaves], ages_s) * (1 - _TIE * ages_s / (ages_s + 60))
        depths = runs.before[leaves] + runs.length[leaves]
        indices = indices * self._reach.shares(runs.branch[leaves], runs.kind[leaves], depths)
        if self._has_priorities:
            indices = indices * _PRIORITY_FACTOR ** runs.priority[leaves].astype(np.float64)
        order = np.argsort(indices)
        return leaves[order].tolist(), indices[order].tolist()

    def index(self, run: int, without: int, now_s: float) -> float:
        """Return the index of a run without so many of its last blocks."""
        index, runs = self._index(run, now_s), self._runs
        if runs.branch[run] != USED:
            depth = int(runs.before[run] + runs.length[run]) - without
            index *= self._reach.share(int(runs.branch[run]), int(runs.kind[run]), depth)
        return index

    def part(self, run: int, without: int, limit: float, now_s: float) -> int:
        """Return how many blocks more may go before the index is above the limit, other than by little."""
        runs = self._runs
        depth = int(runs.before[run] + runs.length[run]) - without
        share = _LITTLE * limit / self._index(run, now_s)
        return max(1, depth - self._reach.depth_above(int(runs.branch[run]), int(runs.kind[run]), share))

    def numbers(self, blocks: Ids, places: Numbers, *, were_used: bool) -> Numbers:
        """Return in one number each block at these places among those that came just now, or `were_used`."""
        at = self._runs.at[blocks[places]]
        if were_used:
            return self._runs.life[at] << LIFE_BITS | USED << _DEPTH_BITS
        return self.number(at, self._runs.depths(blocks, places))

    def number(self, runs: Ids, depths: Numbers) -> Numbers:
        """Return in one number each block at this depth of its run."""
        branches = self._runs.branch[runs].astype(np.int64)
        return self._runs.life[runs] << LIFE_BITS | branches << _DEPTH_BITS | np.minimum(depths, MAX_DEPTH)

    def of(self, numbers: Sequence[int], now_s: float) -> Floats:
        """Return the index of each such block; below 0 where it was used too long ago to be remembered."""
        which = np.array(numbers)
        lives, branches, depths = which >> LIFE_BITS, which >> _DEPTH_BITS & USED, which & MAX_DEPTH
        values = self._hazards.worth(self._lives, lives, now_s)
        return values * self._reach.shares(branches, self._lives.kinds[lives % MAX_LIVES], depths)

    # ------------------------------------------------------------ private

    def _index(self, run: int, now_s: float) -> float:
        """Were all of it used again."""
        runs = self._runs
        index = self._hazards.index_of(int(runs.kind[run]), now_s - float(runs.used_s[run]))
        return index * float(_PRIORITY_FACTOR ** int(runs.priority[run])) if self._has_priorities else index
