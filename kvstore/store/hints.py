"""What clients said of blocks: whether they will be used again, and their priority. A byte a block.

A hint may come before its blocks do: a session is recorded while its last blocks are still being copied out of HBM, and
a block reaches the SSD later than RAM. So what was said is remembered by block, and each tier's policy is told when the
block comes in. It holds until the block is used again. Of times to live the last one holds, in 4 more bytes a block.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.core.index import Ids
from policies.base import EvictionPolicy, Hint

MAX_PRIORITY = 2
_PRIORITIES = 2 * MAX_PRIORITY + 1
_MIN_ROWS = 1024
_NOTHING = Hint()
_TIMED = 0x80
_Row = TypeVar("_Row", np.uint8, np.uint32)


class Hints:
    """Owned by the control thread."""

    def __init__(self) -> None:
        # By block id, in growing numbers of rows; 0: nothing was said.
        self._codes: npt.NDArray[np.uint8] = np.zeros(_MIN_ROWS, dtype=np.uint8)
        # In whole seconds of the clock, of those that have a time to live.
        self._ends_s: npt.NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)
        self._are_any = False

    def say(self, blocks: Ids, hint: Hint, *, ends_at_s: float | None = None) -> None:
        """Remember the hint, in place of an earlier one, for blocks that come into a tier from now on. `ends_at_s`: if
        they are not used before, that is their end (see `timed`)."""
        if not len(blocks) or (hint == _NOTHING and ends_at_s is None and not self._are_any):
            return
        rows = int(blocks.max()) + 1
        self._codes = _grown(self._codes, rows)
        self._codes[blocks] = _code(hint) | (0 if ends_at_s is None else _TIMED)
        if ends_at_s is not None:
            self._ends_s = _grown(self._ends_s, rows)
            self._ends_s[blocks] = int(ends_at_s)
        self._are_any = True

    def timed(self, blocks: Ids, now_s: float) -> Ids:
        """Return those of the blocks that have not been used since they got a time to live, which is over."""
        known = blocks[blocks < len(self._ends_s)]
        timed: Ids = known[(self._codes[known] & _TIMED != 0) & (self._ends_s[known] <= now_s)]
        return timed

    def used(self, blocks: Sequence[int] | Ids) -> None:
        """What was said of them has come true, or not."""
        if self._are_any:
            ids = np.asarray(blocks, dtype=np.int32)
            self._codes[ids[ids < len(self._codes)]] = 0

    def ended(self, block: int) -> None:
        """The id may become another block's."""
        if block < len(self._codes):
            self._codes[block] = 0

    def tell(self, policy: EvictionPolicy, blocks: Sequence[int] | Ids) -> None:
        """Tell the policy what was said of blocks that it just got, in prefix order."""
        if not self._are_any:
            return
        ids = np.asarray(blocks, dtype=np.int32)
        ids = ids[ids < len(self._codes)]
        codes = self._codes[ids] & ~np.uint8(_TIMED)
        for code in np.unique(codes[codes != 0]).tolist():
            policy.on_hint(ids[codes == code], _hint(code))


def _grown(rows: npt.NDArray[_Row], num_rows: int) -> npt.NDArray[_Row]:
    if num_rows <= len(rows):
        return rows
    larger = np.zeros(max(num_rows, 2 * len(rows)), dtype=rows.dtype)
    larger[: len(rows)] = rows
    return larger


def _code(hint: Hint) -> int:
    """0 for the hint that says nothing."""
    priority = max(-MAX_PRIORITY, min(MAX_PRIORITY, hint.priority))
    returns = 0 if hint.returns is None else 1 + hint.returns
    return returns * _PRIORITIES + (priority % _PRIORITIES)


def _hint(code: int) -> Hint:
    returns, priority = divmod(code, _PRIORITIES)
    return Hint(None if returns == 0 else returns == 2, priority - _PRIORITIES if priority > MAX_PRIORITY else priority)
