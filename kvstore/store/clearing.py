"""Clears a run of RAM for a block of another size than those that may be evicted.

Blocks of one size lie together in slabs (tiers/slots.py), and what the policy would evict next is spread over many of
them, so evicting in its order can go through half of the tier before one run is long enough. Here the policy says which
blocks are the coldest, and what is evicted is one run of neighbours where those lie densest:

    slab of small blocks  | h | c | c | W | c | c | P | h | …      c cold, h hot, W being written, P pinned
                              └── not ─┘ └─ taken ┘                  a run contains no W and no P

A run costs what has to be evicted for it; a free slot costs nothing, a block that is not among the coldest as much as
several that are. A block in a run may have children that stay: the order by leaves holds as far as the runs allow. What
is evicted makes room for a few slots at most, so that a burst of the new size finds the next ones free. The time is
bounded: looks at single slabs, after one in vain at most five times a second, and at most once a second at all of the
memory (1 M blocks: 30 ms a look).
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.core.key import BlockKey
from tiers.ram import RamTier
from tiers.slots import Cells, slot_size

# So many slots of the new size are cleared at once, where that is no more than this share of the tier.
_SLOTS_AT_ONCE = 8
_SHARE_AT_ONCE = 64
# No more blocks than this are evicted for slots that nobody has asked for yet.
_MAX_BLOCKS_AHEAD = 512
_MAX_SLABS = 4
# A run that turns out to hold pinned blocks is given up and the next best one looked at.
_MAX_RUNS, _MAX_RUNS_OF_WHOLE = 16, 8
_AGAIN_AFTER_S, _WHOLE_AGAIN_AFTER_S = 0.2, 1.0
_COLD, _WARM, _STAYS = 1.0, 4.0, np.inf

Costs = npt.NDArray[np.float64]


class Clearing:
    """Owned by the control thread."""

    def __init__(
        self,
        ram: RamTier,
        find: Callable[[BlockKey], int],
        must_stay: Callable[[int], bool],
        evict: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        """`find` gives the id of a block, `must_stay` says that it may not be evicted now, `evict` frees its slot."""
        self._ram = ram
        self._find = find
        self._must_stay = must_stay
        self._evict = evict
        self._clock = clock
        self._not_before = self._whole_not_before = 0.0
        # What was not found last; smaller runs may be there.
        self._missed_bytes = 0

    def look_again(self) -> None:
        """Other blocks may go by now than when none was found."""
        self._not_before = self._whole_not_before = 0.0

    def clear(self, num_bytes: int, coldest: Sequence[BlockKey]) -> bool:
        """Make a free run that a slot of `num_bytes` bytes fits into, evicting what lies there; `coldest` are the
        blocks that the policy would evict first. False where no run was found; then nothing was evicted."""
        need_bytes = slot_size(num_bytes)
        now = self._clock()
        if need_bytes >= self._missed_bytes and now < self._not_before:
            return False
        capacity_bytes = self._ram.usage().capacity_bytes or 0
        want_bytes = max(need_bytes, min(_SLOTS_AT_ONCE * need_bytes, capacity_bytes // _SHARE_AT_ONCE))
        slabs = Counter(self._ram.slab_start(key) for key in coldest)
        slabs.pop(-1, None)
        offsets = [slot.offset for key in coldest if (slot := self._ram.slot(key)) is not None]
        for slab_start, _ in slabs.most_common(_MAX_SLABS):
            cells = self._ram.cells(slab_start, want_bytes)
            if self._clear_in(cells, offsets, need_bytes, want_bytes, _MAX_RUNS):
                return True
        if now >= self._whole_not_before:
            cells = self._ram.cells(None, want_bytes)
            if self._clear_in(cells, offsets, need_bytes, need_bytes, _MAX_RUNS_OF_WHOLE):
                return True
            self._whole_not_before = now + _WHOLE_AGAIN_AFTER_S
        self._missed_bytes = need_bytes
        self._not_before = now + _AGAIN_AFTER_S
        return False

    def _clear_in(self, cells: Cells, coldest: Sequence[int], need_bytes: int, want_bytes: int, max_runs: int) -> bool:
        if not len(cells.starts):
            return False
        costs = np.where(cells.is_used, _WARM, 0.0)
        places = np.minimum(np.searchsorted(cells.starts, coldest), len(cells.starts) - 1)
        is_here = cells.starts[places] == coldest
        costs[places[is_here]] = _COLD + np.linspace(0.0, 1.0, len(coldest))[is_here]
        costs *= cells.ends - cells.starts
        for _ in range(max_runs):
            run = self._choose(cells, costs, need_bytes, want_bytes)
            if run is None:
                return False
            first, last = run
            used = first + np.flatnonzero(cells.is_used[first:last])
            blocks = [self._block_at(int(cells.starts[cell])) for cell in used]
            stays = [int(cell) for cell, block in zip(used, blocks, strict=True) if block < 0 or self._must_stay(block)]
            if not stays:
                for block in blocks:
                    self._evict(block)
                return self._ram.carve(int(cells.starts[first]), int(cells.ends[last - 1]))
            costs[stays] = _STAYS
        return False

    def _choose(self, cells: Cells, costs: Costs, need_bytes: int, want_bytes: int) -> tuple[int, int] | None:
        """Return the cells [first, last) of the cheapest run, of the wanted length if there is one."""
        run = cheapest_run(cells, costs, want_bytes)
        if run is not None and np.count_nonzero(cells.is_used[run[0] : run[1]]) <= _MAX_BLOCKS_AHEAD:
            return run
        return cheapest_run(cells, costs, need_bytes) if need_bytes < want_bytes or run is None else run

    def _block_at(self, offset: int) -> int:
        key = self._ram.block_at(offset)
        return -1 if key is None else self._find(key)


def cheapest_run(cells: Cells, costs: Costs, num_bytes: int) -> tuple[int, int] | None:
    """Return the cells [first, last) that are together at least `num_bytes` long and cost least, of equals the
    shortest; None where every run that is long enough has a cell of infinite cost, or none is."""
    lasts = np.searchsorted(cells.ends, cells.starts + num_bytes)
    firsts = np.arange(len(lasts))[lasts < len(cells.ends)]
    lasts = lasts[firsts] + 1
    is_barred = np.concatenate(([0], np.cumsum(np.isinf(costs))))
    sums = np.concatenate(([0.0], np.cumsum(np.where(np.isinf(costs), 0.0, costs))))
    can_be = is_barred[lasts] == is_barred[firsts]
    firsts, lasts = firsts[can_be], lasts[can_be]
    if not len(firsts):
        return None
    prices = sums[lasts] - sums[firsts]
    cheapest = np.flatnonzero(prices == prices.min())
    lengths = cells.ends[lasts[cheapest] - 1] - cells.starts[firsts[cheapest]]
    best = int(cheapest[np.argmin(lengths)])
    return int(firsts[best]), int(lasts[best])
