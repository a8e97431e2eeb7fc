"""What requests have said is to come of them (`EvictionPolicy.on_request`), until it comes.

By its length a prompt is told from others: taken for short while it comes in pieces, a long one that nobody asks for
again drives out what is worth more.
"""

from typing import Final, NamedTuple, TypeVar

from policies.base import Names
from policies.eviction.open import MAX_OPEN

# At 8 bytes each, of one prompt.
_MAX_NAMES: Final = 2_048

T = TypeVar("T")


class Told(NamedTuple):
    """So many blocks are to come; of the last ones their names, in prefix order."""

    num_blocks: int
    names: Names


class Expected:
    """By the first block that is to come. Bounded: what is told first is forgotten first."""

    def __init__(self) -> None:
        self._from: dict[int, Told] = {}
        # What was to come last behind the block of a name.
        self._behind: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._from)

    def tell(self, names: Names, known: int) -> None:
        """A prompt has blocks of these names, of which the first `known` are there."""
        if known >= len(names):
            return
        first = int(names[known])
        _put(self._from, first, Told(len(names) - known, names[known:][-_MAX_NAMES:].copy()))
        if known:
            _put(self._behind, int(names[known - 1]), first)

    def take(self, name: int) -> Told | None:
        """The block of this name comes: return what was told to come from it on, once."""
        return self._from.pop(name, None)

    def after(self, name: int) -> Told | None:
        """Return what was told last to come behind the block of this name, once."""
        first = self._behind.pop(name, None)
        return None if first is None else self._from.get(first)


def _put(table: dict[int, T], name: int, value: T) -> None:
    table.pop(name, None)
    table[name] = value
    if len(table) > MAX_OPEN:
        del table[next(iter(table))]
