"""Which blocks the bucket had before this daemon came: another session's, which may end at any moment.

From then on, and until a record of ours is there that names them, they are nobody's and may be deleted. Whoever puts
that record looks for them again (`session_sync.py`).
"""

from collections import OrderedDict
from typing import Final

_MAX_BORROWED: Final = 1 << 16


class Borrowed:
    """Owned by the control thread. Past a number of blocks those known longest count as ours."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int) -> None:
        self._blocks[block] = None
        if len(self._blocks) > _MAX_BORROWED:
            self._blocks.popitem(last=False)

    def among(self, blocks: list[int]) -> list[int]:
        """Return those of the blocks that are borrowed, in order."""
        return [block for block in blocks if block in self._blocks] if self._blocks else []

    def settle(self, blocks: list[int]) -> None:
        """They are safe now, or not there."""
        for block in blocks:
            self._blocks.pop(block, None)

    def removed(self, block: int) -> None:
        """The block's id ends."""
        self._blocks.pop(block, None)
