"""Bounds what is remembered of blocks that only the bucket has and that belong to no session of this daemon.

A session's blocks are bounded by the sessions. Those found by asking, or left over when a session went, are not: past
a number of them the ones known longest are forgotten. They stay in the bucket, where they can be asked for again.
"""

from collections import OrderedDict
from typing import Final

from kvstore.core.outcome import TierKind
from kvstore.store.catalog import Catalog

# About 30 MB of memory, the entries in the catalog included.
MAX_KNOWN: Final = 1 << 18
_FORGOTTEN_AT_ONCE = 256


class BucketKnown:
    """Owned by the control thread."""

    def __init__(self, catalog: Catalog, max_known: int = MAX_KNOWN) -> None:
        self._catalog = catalog
        self._max_known = max_known
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block: int) -> None:
        """The bucket holds the block, and the catalog says so."""
        self._blocks[block] = None
        self._blocks.move_to_end(block)

    def removed(self, block: int) -> None:
        """The block's id ends."""
        self._blocks.pop(block, None)

    def trim(self) -> None:
        """Forget what is too much, some of it each time."""
        for _ in range(min(_FORGOTTEN_AT_ONCE, len(self._blocks) - self._max_known)):
            block, _ = self._blocks.popitem(last=False)
            if self._catalog.pinned(block):
                self._blocks[block] = None
            elif not self._catalog.session_refs(block):
                self._catalog.set_absent(block, TierKind.S3, "forgotten")
