"""Remembers which copies no key here opens: a miss, kept for as long as nothing else needs their name or their room.

Such a copy stays, since the right key may come with the next start. But the block is computed again meanwhile, and its
new copy would find the old one there for ever, "stored" and never readable; so a write replaces those that were met.
"""

import threading
from collections.abc import Iterable
from typing import Final, Generic, TypeVar

from kvstore.core.key import BlockKey

MAX_KEPT: Final = 65_536
_T = TypeVar("_T")


class OtherKeys(Generic[_T]):
    """The last MAX_KEPT of them, each with what its tier needs to remove it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[BlockKey, _T] = {}

    def add(self, key: BlockKey, copy: _T) -> None:
        with self._lock:
            self._copies.pop(key, None)
            self._copies[key] = copy
            if len(self._copies) > MAX_KEPT:
                del self._copies[next(iter(self._copies))]

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._copies

    def take(self, keys: Iterable[BlockKey]) -> list[_T]:
        """Forget these blocks, and return what was known of them."""
        with self._lock:
            # Nearly always there is none.
            return [self._copies.pop(key) for key in keys if key in self._copies] if self._copies else []

    def take_oldest(self, count: int) -> list[_T]:
        """Forget and return up to `count`."""
        with self._lock:
            return [self._copies.pop(next(iter(self._copies))) for _ in range(min(count, len(self._copies)))]
