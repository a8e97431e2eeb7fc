"""Belady's rule for prefixes: the block that is needed again last goes first. Offline: it knows the trace's future.

Whoever needs a block needs its parent, so a parent is never needed later than its child: of the blocks needed again
last the leaf goes, and the tier stays closed under prefixes. (Belady, A study of replacement algorithms for a
virtual-storage computer, IBM Systems Journal, 1966.)
"""

from collections.abc import Sequence

from policies.base import EvictableView, Hint, Ids
from policies.eviction.leafwise import Leafwise
from policies.eviction.queue import Moments

NOT_AGAIN = (1 << 62) - 1


class Belady(Leafwise):
    """A block's moment is the greater, the sooner it is needed again."""

    _enters_last = False

    def __init__(self, view: EvictableView, needed: Moments) -> None:
        """`needed[block]` is the number, from 1 on, of the next request that needs the block, or NOT_AGAIN; whoever
        owns it puts it right before each call."""
        super().__init__(view)
        self._needed = needed

    def on_hint(self, blocks: Sequence[int] | Ids, hint: Hint) -> None:
        """It knows better."""

    def _enter(self, ids: Ids) -> None:
        self._moments[ids] = NOT_AGAIN + 1 - self._needed[ids]

    def _use(self, ids: Ids) -> None:
        self._moments[ids] = NOT_AGAIN + 1 - self._needed[ids]
        self._requeue(ids)
