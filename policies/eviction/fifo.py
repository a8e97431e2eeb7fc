"""First in, first out, leaf first: being used again changes nothing."""

from policies.base import Ids
from policies.eviction.leafwise import FIRST, Leafwise


class Fifo(Leafwise):
    """A block's moment is that of its coming in, or later that of what continued it and left."""

    def _use(self, ids: Ids) -> None:
        """Only what a client said had ended begins anew."""
        ended = ids[self._moments[ids] == FIRST]
        if len(ended):
            self._touch(ended)
