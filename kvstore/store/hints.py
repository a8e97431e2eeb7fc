"""What clients said of blocks: whether they will be used again, and their priority. A byte a block.

A hint may come before its blocks do: a session is recorded while its last blocks are still being copied out of HBM, and
a block reaches the SSD later than RAM. So what was said is remembered by block, and each tier's policy is told when the
block comes in. It holds until the block is used again.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.core.index import Ids
from policies.base import EvictionPolicy, Hint

MAX_PRIORITY = 2
_PRIORITIES = 2 * MAX_PRIORITY + 1
_MIN_ROWS = 1024
_NOTHING = Hint()
_TIMED = 0x80


class Hints:
    """Owned by the control thread."""

    def __init__(self) -> None:
        # By block id, in growing numbers of rows; 0: nothing was said.
        self._codes: npt.NDArray[np.uint8] = np.zeros(_MIN_ROWS, dtype=np.uint8)
        self._are_any = False

    def say(self, blocks: Ids, hint: Hint, *, is_timed: bool = False) -> None:
        """Remember the hint, in place of an earlier one, for blocks that come into a tier from now on. `is_timed`: if
        they are not used before their time is over, that is their end (see `timed`)."""
        if not len(blocks) or (hint == _NOTHING and not is_timed and not self._are_any):
            return
        rows = int(blocks.max()) + 1
        if rows > len(self._codes):
            larger = np.zeros(max(rows, 2 * len(self._codes)), dtype=np.uint8)
            larger[: len(self._codes)] = self._codes
            self._codes = larger
        self._codes[blocks] = _code(hint) | (_TIMED if is_timed else 0)
        self._are_any = True

    def timed(self, blocks: Ids) -> Ids:
        """Return those of the blocks that have not been used since they got a time to live."""
        known = blocks[blocks < len(self._codes)]
        timed: Ids = known[self._codes[known] & _TIMED != 0]
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


def _code(hint: Hint) -> int:
    """0 for the hint that says nothing."""
    priority = max(-MAX_PRIORITY, min(MAX_PRIORITY, hint.priority))
    returns = 0 if hint.returns is None else 1 + hint.returns
    return returns * _PRIORITIES + (priority % _PRIORITIES)


def _hint(code: int) -> Hint:
    returns, priority = divmod(code, _PRIORITIES)
    return Hint(None if returns == 0 else returns == 2, priority - _PRIORITIES if priority > MAX_PRIORITY else priority)
