"""Blocks of the last requests that no slower tier has or takes yet, since nobody has said that they are a session's.

Without an SSD, or where its admission refused a block, a block goes to a slower tier only once a session names it, and
a session is recorded when its request ends. What left RAM before that would be missing from the session, which then
could not become durable, while blocks that the bucket has too stayed in RAM. So the last of them stay for a while, no
more than a small part of RAM, and with them those before them in their prefixes, which cannot go first; but only as
long as others can go.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

# A request that takes longer may find that what it stored first is gone.
_KEPT_S: Final = 120.0


class Unclaimed:
    """Owned by the control thread. `budget_bytes`: past it those stored first may go."""

    def __init__(self, budget_bytes: int, size_bytes: Callable[[int], int], clock: Callable[[], float]) -> None:
        self._budget_bytes = budget_bytes
        self._size_bytes = size_bytes
        self._clock = clock
        # When each was stored, and its bytes; the oldest first.
        self._blocks: OrderedDict[int, tuple[float, int]] = OrderedDict()
        self._bytes = 0

    def add(self, blocks: Sequence[int]) -> None:
        """They are in RAM alone, and were stored or used just now."""
        now_s = self._clock()
        for block in blocks:
            self.ended(block)
            num_bytes = self._size_bytes(block)
            self._blocks[block] = now_s, num_bytes
            self._bytes += num_bytes
        while self._blocks and (self._bytes > self._budget_bytes or self._is_over(next(iter(self._blocks)), now_s)):
            _, (_, num_bytes) = self._blocks.popitem(last=False)
            self._bytes -= num_bytes

    def holds(self, block: int) -> bool:
        return block in self._blocks and not self._is_over(block, self._clock())

    def give_up(self) -> bool:
        """Room is needed and there is no other: hold none of them. Return whether there were any."""
        held_any = bool(self._blocks)
        self._blocks.clear()
        self._bytes = 0
        return held_any

    def ended(self, block: int) -> None:
        """The block is in no tier any more; its id will be another's."""
        _, num_bytes = self._blocks.pop(block, (0.0, 0))
        self._bytes -= num_bytes

    # ------------------------------------------------------------ private

    def _is_over(self, block: int, now_s: float) -> bool:
        return now_s - self._blocks[block][0] > _KEPT_S
