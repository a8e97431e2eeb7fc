"""Last blocks of requests that have left, by name: when one comes back, it was used again.

A last block that was not full is another one when its prompt goes on, and comes back only where the very same prompt is
asked again. But where whole blocks alone are kept, as engines do, it comes back with the session, like those before it.
As the class that goes first it has mostly left by then, and would seem never to be used, whatever came: of made-up
sessions in whole blocks 3 of 19 points were lost between long documents (tests/policies/test_gittins.py).
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

# About 200 bytes each.
MAX_TAILS: Final = 32_768


class Tails:
    """Bounded: what was put first is forgotten first."""

    def __init__(self) -> None:
        self._lives: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lives)

    def put(self, name: int, life: int) -> None:
        """The block of this name leaves, in this life (lives.py)."""
        self._lives[name] = life
        self._lives.move_to_end(name)
        if len(self._lives) > MAX_TAILS:
            self._lives.popitem(last=False)

    def take(self, names: Sequence[int]) -> list[int]:
        """Return the lives of those of these names that had left, and forget them."""
        return [self._lives.pop(name) for name in self._lives.keys() & names]
