"""Bounds what is remembered of blocks that only the bucket has and that belong to no session of this daemon.

A session's blocks are bounded by the sessions. Those found by asking, left over when a session went or a turn replaced
them, or written for nobody (`s3.write = "all"`) are not: past a number of them the deepest of their prefixes are
forgotten, so that what is left begins at the first block. They stay in the bucket, where they can be asked for again.
"""

from collections.abc import Callable
from typing import Final

from kvstore.core.outcome import TierKind
from kvstore.store.catalog import Catalog

# About 30 MB in the catalog.
MAX_KNOWN: Final = 1 << 18
_FORGOTTEN_AT_ONCE = 256
# Looking for them takes 2 ms per million blocks.
_LOOK_EVERY_S = 5.0


class BucketKnown:
    """Owned by the control thread."""

    def __init__(self, catalog: Catalog, clock: Callable[[], float], max_known: int = MAX_KNOWN) -> None:
        self._catalog = catalog
        self._clock = clock
        self._max_known = max_known
        self._too_many: list[int] = []
        self._next_look = clock()

    def trim(self) -> None:
        """Forget what is too much, some of it each time."""
        now = self._clock()
        if not self._too_many and now >= self._next_look:
            self._next_look = now + _LOOK_EVERY_S
            if self._catalog.blocks_in(TierKind.S3) > self._max_known:
                self._too_many = self._catalog.blocks_only_in_bucket()[self._max_known :]
        for _ in range(min(_FORGOTTEN_AT_ONCE, len(self._too_many))):
            block = self._too_many.pop()
            if self._catalog.is_only_in_bucket(block):
                self._catalog.set_absent(block, TierKind.S3, "forgotten")
