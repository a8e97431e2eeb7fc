"""The session-aware policy with a net: where `s3fifo` or `lru` would clearly hit more, that is followed instead.

Small caches of names (judge.py) compare the three all the time, also while another is followed, and what `gittins`
learns goes on. Popular prompts of many users are where `s3fifo` is better: it counts uses, while a class of blocks
averages over many.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from policies.base import EvictableView, EvictionPolicy, Hint, Ids, Names
from policies.eviction.gittins import Gittins
from policies.eviction.judge import Judge
from policies.eviction.lru import Lru
from policies.eviction.s3fifo import S3Fifo
from policies.eviction.shadows import IndexShadow, LruShadow, S3FifoShadow

# In the order of their shadows.
_RIVALS: Final[tuple[Callable[[EvictableView], EvictionPolicy], ...]] = (Lru, S3Fifo)


class Best:
    """The same for the same calls and seed.

    A rival is made when it begins to be followed, of what the tier holds then: some microseconds a block, once.
    """

    def __init__(self, view: EvictableView, clock: Callable[[], float], seed: int = 0) -> None:
        self._view = view
        self._own = Gittins(view, clock, seed)
        own = IndexShadow(self._own.worth, np.random.default_rng(seed + 1))
        self._judge = Judge((own, LruShadow(), S3FifoShadow()))
        self._followed = 0
        self._rival: EvictionPolicy | None = None
        self._request = 0
        self._capacity_blocks = 0

    def __len__(self) -> int:
        return len(self._own)

    def on_insert(self, blocks: Sequence[int] | Ids) -> None:
        self._own.on_insert(blocks)
        if self._rival is not None:
            self._rival.on_insert(blocks)
        self._saw(blocks, were_used=False)

    def on_access(self, blocks: Sequence[int] | Ids) -> None:
        self._own.on_access(blocks)
        if self._rival is not None:
            self._rival.on_access(blocks)
        self._saw(blocks, were_used=True)

    def on_request(self, names: Names, known: int) -> None:
        self._own.on_request(names, known)

    def on_hint(self, blocks: Sequence[int] | Ids, hint: Hint) -> None:
        self._own.on_hint(blocks, hint)
        if self._rival is not None:
            self._rival.on_hint(blocks, hint)

    def on_remove(self, block: int) -> None:
        self.on_remove_many((block,))

    def on_remove_many(self, blocks: Sequence[int]) -> None:
        self._own.on_remove_many(blocks)
        if self._rival is not None:
            self._rival.on_remove_many(blocks)

    def victims(self, bytes_needed: int) -> list[int]:
        chosen = self._rival.victims(bytes_needed) if self._rival is not None else []
        chosen = chosen or self._own.victims(bytes_needed)
        if chosen:
            self._capacity_blocks = max(1, len(self._own) - len(chosen))
        return chosen

    # ------------------------------------------------------------ private

    def _saw(self, blocks: Sequence[int] | Ids, *, were_used: bool) -> None:
        if self._own.last_request != self._request:
            self._request = self._own.last_request
            self._judge.request_ends(self._capacity_blocks)
            if self._judge.best != self._followed:
                self._follow(self._judge.best)
        ids = self._own.known(np.asarray(blocks, dtype=np.int32))
        names = self._view.names_of(ids)
        places = self._judge.sampled(names)
        if len(places):
            self._judge.saw(names[places], self._own.numbers(ids, places, were_used=were_used))

    def _follow(self, number: int) -> None:
        self._followed = number
        self._rival = None
        if number:
            latest, again = self._own.by_last_use()
            self._rival = _RIVALS[number - 1](self._view)
            self._rival.on_insert(latest)
            self._rival.on_access(again)
