"""Keeps the blocks of a tier as runs: stretches of a prefix that were used together, last in one moment.

    blocks   1 ─ 2 ─ 3 ─ 4 ─ 5          run A = 1 … 3, which two runs continue
                     └─ 6 ─ 7           run B = 4, 5     run C = 6, 7

A run has one parent at most, which is whole: whoever continues it in the middle, or uses its beginning only, cuts it.
All its blocks share what is known of it, so the work is per run and not per block. Blocks leave a run from its end.
"""

import itertools
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from policies.base import EvictableView, Ids
from policies.eviction.leafwise import grown
from policies.eviction.leaves import Leaves

NONE: Final = -1
# Where what came with one request begins: at the root of its prefix, behind shared blocks, or behind a session's own.
# The last: it was used since, or is not told apart by its depth.
AT_ROOT, BEHIND_SHARED, BEHIND_OWN, USED = range(4)
NUM_BRANCHES: Final = 3
_MIN_ROWS: Final = 1024

Numbers = npt.NDArray[np.int32]
Smalls = npt.NDArray[np.int16]
Floats = npt.NDArray[np.float64]


class Runs:
    """4 bytes a block and 71 a run. Columns go by run; those of what a policy knows are for it to write.

    `at` says in which run a block is, or NONE. `kids` counts runs that continue a run. What is not a run any more has
    `length` 0, and its number is given out again.
    """

    def __init__(self, view: EvictableView) -> None:
        self._view = view
        self.at: Ids = np.full(_MIN_ROWS, NONE, dtype=np.int32)
        self.first: Ids = np.zeros(_MIN_ROWS, dtype=np.int32)
        self.last: Ids = np.zeros(_MIN_ROWS, dtype=np.int32)
        self.length: Numbers = np.zeros(_MIN_ROWS, dtype=np.int32)
        self.kids: Numbers = np.zeros(_MIN_ROWS, dtype=np.int32)
        self.used_s: Floats = np.zeros(_MIN_ROWS)
        self.gap_s: Floats = np.zeros(_MIN_ROWS)
        self.kind: Smalls = np.zeros(_MIN_ROWS, dtype=np.int16)
        self.turn: Smalls = np.zeros(_MIN_ROWS, dtype=np.int16)
        self.priority: Smalls = np.zeros(_MIN_ROWS, dtype=np.int16)
        # What of lives.py the run is in now.
        self.life: npt.NDArray[np.int64] = np.zeros(_MIN_ROWS, dtype=np.int64)
        # Which request used it last, of those that may go on (gittins.py).
        self.request: npt.NDArray[np.int64] = np.zeros(_MIN_ROWS, dtype=np.int64)
        # Whether the run is the last, maybe partial, block of a prompt.
        self.is_tail: npt.NDArray[np.bool_] = np.zeros(_MIN_ROWS, dtype=np.bool_)
        # Whether it was ever continued in two ways, other than by a tail.
        self.is_shared: npt.NDArray[np.bool_] = np.zeros(_MIN_ROWS, dtype=np.bool_)
        self.fan: Smalls = np.zeros(_MIN_ROWS, dtype=np.int16)
        # Of what one request brought: one of the above, and how many of its blocks are before this run, once cut.
        self.branch: npt.NDArray[np.int8] = np.zeros(_MIN_ROWS, dtype=np.int8)
        self.before: Numbers = np.zeros(_MIN_ROWS, dtype=np.int32)
        self.leaves = Leaves(_MIN_ROWS)
        self.num_blocks = 0
        self._free: list[int] = []
        self._end = 0  # no run has this number or a higher one

    def has(self, block: int) -> bool:
        return 0 <= block < len(self.at) and bool(self.at[block] != NONE)

    def known(self, blocks: Ids) -> npt.NDArray[np.bool_]:
        """Return for each block whether it is in a run."""
        try:
            known: npt.NDArray[np.bool_] = self.at[blocks] != NONE
        except IndexError:
            known = blocks < len(self.at)
            known[known] = self.at[blocks[known]] != NONE
        return known

    def known_here(self, blocks: Ids) -> npt.NDArray[np.bool_]:
        """`known`, and have room for all of them from now on."""
        try:
            known: npt.NDArray[np.bool_] = self.at[blocks] != NONE
        except IndexError:
            self.grow(int(blocks.max()) + 1)
            known = self.at[blocks] != NONE
        return known

    def parent(self, run: int) -> int:
        """Return the run that this one continues, or NONE."""
        block = self._view.parent(int(self.first[run]))
        return int(self.at[block]) if 0 <= block < len(self.at) else NONE

    def blocks(self, run: int, most: int) -> list[int]:
        """Return its last blocks, `most` at most, from the end on."""
        parent = self._view.parent
        block = int(self.last[run])
        found = [block]
        for _ in range(min(most, int(self.length[run])) - 1):
            block = parent(block)
            found.append(block)
        return found

    def path(self, blocks: Ids) -> tuple[list[int], list[int]]:
        """Return the runs that these known blocks are in, in this order, and behind which of the blocks each ends.

        Where the last block is in the middle of its run, that is cut behind it.
        """
        at = self.at[blocks]
        ends = ((at[1:] != at[:-1]).nonzero()[0] + 1).tolist()
        runs: list[int] = [int(at[0]), *at[ends].tolist()]
        ends.append(len(blocks))
        if int(self.last[runs[-1]]) != int(blocks[-1]):
            self.cut(int(blocks[-1]))
        return runs, ends

    def cut(self, block: int) -> None:
        """End the block's run behind it; the rest becomes a run with the same columns, which continues it."""
        run = int(self.at[block])
        below = []
        other, parent = int(self.last[run]), self._view.parent
        while other != block:
            below.append(other)
            other = parent(other)
        if not below:
            return
        rest = self._new(below[-1], below[0], len(below))
        self.at[below] = rest
        for column in self._columns():
            column[rest] = column[run]
        self.length[run] -= len(below)
        self.before[rest] += self.length[run]
        self.last[run] = block
        if not self.kids[run]:
            self.leaves.discard(run)
            self.leaves.add(rest)
        self.kids[run] = 1
        self.is_tail[run] = False
        self.fan[run] = 1

    def join(self, runs: list[int], ends: list[int], blocks: Ids) -> list[int]:
        """Make one run of those of a path that nothing else continues between them; return what is left of the path.
        Their columns are to be the same. The arguments are those of `path`, and what it returned."""
        joined = runs[:1]
        for run, start, end in zip(runs[1:], ends, ends[1:], strict=False):
            into = joined[-1]
            if (
                self.kids[into] == 1
                and not self.is_tail[run]
                and self.is_shared[run] == self.is_shared[into]
                and self.length[run] == end - start
                and self._view.parent(int(self.first[run])) == self.last[into]
            ):
                self.at[blocks[start:end]] = into
                self.length[into] += end - start
                self.last[into] = self.last[run]
                self.kids[into] = self.kids[run]
                self.fan[into] = self.fan[run]
                self._end_run(run)
                if not self.kids[into]:
                    self.leaves.add(into)
            else:
                joined.append(run)
        return joined

    def add(self, blocks: Ids, *, is_tail: bool) -> int:
        """Make a run of new blocks, each the parent of the next. What they continue is known or in no run."""
        first = int(blocks[0])
        parent = self._view.parent(first)
        if self.has(parent):
            above = int(self.at[parent])
            if int(self.last[above]) != parent:
                self.cut(parent)
            if not self.kids[above]:
                self.leaves.discard(above)
            self.kids[above] += 1
            if not is_tail:
                self.fan[above] += self.fan[above] < 32_000
                if self.fan[above] > 1:
                    self.share(above)
        run = self._new(first, int(blocks[-1]), len(blocks))
        self.kids[run] = 0
        self.is_tail[run] = is_tail
        self.is_shared[run] = False
        self.fan[run] = 0
        self.priority[run] = 0
        self.branch[run] = USED
        self.before[run] = 0
        self.at[blocks] = run
        self.leaves.add(run)
        self.num_blocks += len(blocks)
        return run

    def extend(self, run: int, blocks: Ids) -> None:
        """Let new blocks, each the parent of the next, go on with a run that nothing continues."""
        self.at[blocks] = run
        self.length[run] += len(blocks)
        self.last[run] = int(blocks[-1])
        self.num_blocks += len(blocks)

    def remove(self, block: int) -> None:
        """Take out a known block; usually the last of its run."""
        run = int(self.at[block])
        if int(self.last[run]) != block:
            self.cut(block)
        if self.length[run] > 1:
            above = self._view.parent(block)
            if self.kids[run]:  # what continues it is on its own now
                self.cut(above)
                run = int(self.at[block])
            else:
                self.length[run] -= 1
                self.last[run] = above
                self.is_tail[run] = False
                self.at[block] = NONE
                self.num_blocks -= 1
                return
        over = self.parent(run)
        self._end_run(run)
        self.at[block] = NONE
        self.num_blocks -= 1
        if over != NONE and self.kids[over]:
            self.kids[over] -= 1
            if not self.kids[over]:
                self.leaves.add(over)

    def starts(self, blocks: Ids) -> list[int]:
        """Return at which places among these known blocks those of another run than before begin; 0 is one."""
        at = self.at[blocks]
        return [0, *((at[1:] != at[:-1]).nonzero()[0] + 1).tolist()] if len(blocks) else []

    def remove_many(self, blocks: Ids, starts: list[int]) -> None:
        """`remove` for each of these known blocks; fast where they come from the end of a run on."""
        for start, end in itertools.pairwise([*starts, len(blocks)]):
            run = int(self.at[blocks[start]])
            count = end - start
            if self.kids[run] or int(self.last[run]) != blocks[start] or count > self.length[run]:
                for block in blocks[start:end].tolist():
                    self.remove(block)
            else:
                above = self._view.parent(int(blocks[end - 1]))
                self.at[blocks[start:end]] = NONE
                self.num_blocks -= count
                if count < self.length[run]:
                    self.length[run] -= count
                    self.last[run] = above
                    self.is_tail[run] = False
                else:
                    self._end_run(run)
                    over = int(self.at[above]) if 0 <= above < len(self.at) else NONE
                    if over != NONE and self.kids[over]:
                        self.kids[over] -= 1
                        if not self.kids[over]:
                            self.leaves.add(over)

    def by_last_use(self) -> tuple[list[int], list[int]]:
        """Return all blocks, what was used last first, and those among them that were used again."""
        numbers = self.length.nonzero()[0]
        latest: list[int] = []
        again: list[int] = []
        for run in numbers[np.argsort(self.used_s[numbers], kind="stable")].tolist():
            blocks = self.blocks(run, int(self.length[run]))
            latest += blocks
            if self.is_shared[run] or self.turn[run] > 1:
                again += blocks
        return latest[::-1], again[::-1]

    def grow(self, rows: int) -> None:
        """Have room for blocks below `rows`."""
        old = len(self.at)
        if rows > old:
            self.at = grown(self.at, max(rows, 2 * old))
            self.at[old:] = NONE

    def share(self, run: int) -> None:
        """Let it be known as shared, with all that is before it."""
        while run != NONE and not self.is_shared[run]:
            self.is_shared[run] = True
            run = self.parent(run)

    def depths(self, blocks: Ids, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return of those at these places among known blocks, in prefix order, how many came with each, up to and with
        it. The blocks include the last one of each run that they are of."""
        ends = np.array([*self.starts(blocks)[1:], len(blocks)])
        at = self.at[blocks[places]]
        depths: npt.NDArray[np.int64] = (
            self.before[at] + self.length[at] + places + 1 - ends[ends.searchsorted(places, side="right")]
        )
        return depths

    # ------------------------------------------------------------ private

    def _columns(self) -> tuple[npt.NDArray[Any], ...]:
        """What a part of a run has from the whole."""
        return (
            self.kids,
            self.fan,
            self.is_tail,
            self.is_shared,
            self.used_s,
            self.gap_s,
            self.kind,
            self.turn,
            self.priority,
            self.life,
            self.request,
            self.branch,
            self.before,
        )

    def _new(self, first: int, last: int, length: int) -> int:
        if self._free:
            run = self._free.pop()
        else:
            run = self._end
            self._end += 1
            if run == len(self.first):
                self._more_rows(2 * run)
        self.first[run] = first
        self.last[run] = last
        self.length[run] = length
        return run

    def _end_run(self, run: int) -> None:
        self.leaves.discard(run)
        self.length[run] = 0
        self._free.append(run)

    def _more_rows(self, rows: int) -> None:
        self.first, self.last = grown(self.first, rows), grown(self.last, rows)
        self.length, self.kids = grown(self.length, rows), grown(self.kids, rows)
        self.used_s, self.kind = grown(self.used_s, rows), grown(self.kind, rows)
        self.turn, self.priority = grown(self.turn, rows), grown(self.priority, rows)
        self.is_tail, self.is_shared = grown(self.is_tail, rows), grown(self.is_shared, rows)
        self.fan, self.life = grown(self.fan, rows), grown(self.life, rows)
        self.gap_s = grown(self.gap_s, rows)
        self.request = grown(self.request, rows)
        self.branch, self.before = grown(self.branch, rows), grown(self.before, rows)
        self.leaves.grow(rows)
