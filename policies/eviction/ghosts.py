"""Names of blocks that left a while ago, in the order in which they left: the memory of S3-FIFO and ARC."""

from collections import OrderedDict

# Each entry is about 150 bytes of objects.
MAX_GHOSTS = 262_144


class Ghosts:
    """A bounded set of names; the one that has been in it longest goes first."""

    def __init__(self) -> None:
        self._names: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: int) -> bool:
        return name in self._names

    def add(self, name: int) -> None:
        """As the newest, also where it is in the set already."""
        self._names[name] = None
        self._names.move_to_end(name)

    def discard(self, name: int) -> None:
        self._names.pop(name, None)

    def keep(self, count: int) -> None:
        """Forget the oldest beyond `count`."""
        while len(self._names) > min(count, MAX_GHOSTS):
            self._names.popitem(last=False)
