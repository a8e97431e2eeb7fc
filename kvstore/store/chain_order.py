"""Parents before children in the bucket: what may be uploaded next, and which uploads count.

Uploads run in parallel, so a child's may end before its parent's, or its parent's may fail. Three rules keep every
chain prefix-closed as far as anybody relies on it, and leave the window of uploads full:

    begin    a block is begun only when its parent is in the bucket or has been begun
    span     and only within SPAN blocks of the last one that counts
    count    a block counts as stored once its upload has ended and its parent counts; until then it is early

Why that is enough. Blocks of one chain begin in order, and after a failure nothing begins before the failed block is
begun again. So at any moment, also at that of a crash, a chain in the bucket is complete up to the oldest block under
way, and fewer than SPAN blocks lie behind that hole. They hold what they should (a key names its content), they are
only not reached: who asks the bucket for the prefix finds the hole (then it ends there: fewer blocks than there are)
or finds only blocks on both sides of it (then one fetch answers MISS, is recomputed, and the hole is known). No answer
ever has wrong bytes. When the session is uploaded again, after a restart too, the hole is filled first and the rest
answers EXISTS.
"""

from collections.abc import Callable
from typing import Final

from kvstore.core.outcome import TierKind
from kvstore.store.catalog import Catalog

# Some windows of uploads: the slowest of them may take that many times as long as the others before these wait for it.
SPAN: Final = 32


class ChainOrder:
    """Owned by the control thread. `is_under_way` says whether an upload of the block has begun and not ended,
    `is_wanted` whether it will still be tried."""

    def __init__(
        self,
        catalog: Catalog,
        tier: TierKind,
        is_under_way: Callable[[int], bool],
        is_wanted: Callable[[int], bool],
    ) -> None:
        self._catalog = catalog
        self._tier = tier
        self._is_under_way = is_under_way
        self._is_wanted = is_wanted
        self._early: dict[int, int] = {}
        self._waiting: dict[int, list[int]] = {}

    def __len__(self) -> int:
        """How many uploads have ended and do not count yet."""
        return len(self._early)

    def __contains__(self, block: int) -> bool:
        return block in self._early

    def follows(self, block: int) -> bool:
        """Whether the block's parent is there or has been begun."""
        parent = self._catalog.parent(block)
        return self._is_closed(block) or self._is_under_way(parent) or parent in self._early

    def is_within_span(self, block: int) -> bool:
        for _ in range(SPAN):
            if self._is_closed(block):
                return True
            block = self._catalog.parent(block)
        return False

    def ended(self, block: int) -> list[int]:
        """The block's upload has ended well; return the blocks that count now, parents first."""
        parent = self._catalog.parent(block)
        if not self._is_closed(block):
            if self._is_wanted(parent):
                self._early[block] = parent
                self._waiting.setdefault(parent, []).append(block)
            return []
        counting = [block]
        for stored in counting:  # grows while we walk
            for child in self._waiting.pop(stored, []):
                del self._early[child]
                counting.append(child)
        return counting

    def drop(self, block: int) -> None:
        """The block will not be uploaded: what came early below it does not count either, until that is added anew."""
        parent = self._early.pop(block, None)
        if parent is not None:
            self._waiting[parent].remove(block)
            if not self._waiting[parent]:
                del self._waiting[parent]
        below = self._waiting.pop(block, [])
        for child in below:  # grows while we walk
            del self._early[child]
            below += self._waiting.pop(child, [])

    def _is_closed(self, block: int) -> bool:
        parent = self._catalog.parent(block)
        return parent < 0 or self._catalog.resident(parent, self._tier)
