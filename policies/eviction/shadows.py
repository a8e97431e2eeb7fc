"""What would be in a small tier under one order or another: names of blocks, and nothing else."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np

from policies.eviction.lives import Floats

_SMALL_SHARE: Final = 0.1
_MAX_USES: Final = 3


class Shadow(Protocol):
    """Of a prefix each block counts by itself: what an order keeps is closed under prefixes, near enough."""

    def use(self, name: int, number: int) -> bool:
        """A block is used, and is so in one number (worth.py): return whether it was there, and put it in."""
        ...

    def keep(self, count: int) -> None:
        """Let go until there are so many, or few more."""
        ...

    def only(self, is_wanted: Callable[[int], bool]) -> None:
        """Forget all other names."""
        ...

    def __len__(self) -> int: ...


class LruShadow:
    """What was used longest ago goes first."""

    def __init__(self) -> None:
        self._names: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def use(self, name: int, number: int) -> bool:
        if name in self._names:
            self._names.move_to_end(name)
            return True
        self._names[name] = None
        return False

    def keep(self, count: int) -> None:
        while len(self._names) > count:
            self._names.popitem(last=False)

    def only(self, is_wanted: Callable[[int], bool]) -> None:
        for name in [name for name in self._names if not is_wanted(name)]:
            del self._names[name]


class S3FifoShadow:
    """As s3fifo.py."""

    def __init__(self) -> None:
        # How often each was used since it came into its queue.
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._left: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def use(self, name: int, number: int) -> bool:
        for queue in (self._main, self._small):
            uses = queue.get(name)
            if uses is not None:
                if uses < _MAX_USES:
                    queue[name] = uses + 1
                return True
        if name in self._left:
            del self._left[name]
            self._main[name] = 0
        else:
            self._small[name] = 0
        return False

    def keep(self, count: int) -> None:
        small, main, left = self._small, self._main, self._left
        while len(small) + len(main) > count:
            if small and (len(small) > _SMALL_SHARE * (len(small) + len(main)) or not main):
                name, uses = small.popitem(last=False)
                if uses:
                    main[name] = 0
                else:
                    left[name] = None
            else:
                name, uses = main.popitem(last=False)
                if uses:
                    main[name] = uses - 1
        while len(left) > count:
            left.popitem(last=False)

    def only(self, is_wanted: Callable[[int], bool]) -> None:
        names: OrderedDict[int, int] | OrderedDict[int, None]
        for names in (self._small, self._main, self._left):
            for name in [name for name in names if not is_wanted(name)]:
                del names[name]


class IndexShadow:
    """By what blocks are worth: of some drawn at random those with the lowest go first."""

    _SAMPLE: Final = 512
    # So many go at once, but no more than this part of all: looking for one costs nearly as much as for so many.
    _AT_ONCE: Final = 64
    _PART: Final = 16

    def __init__(self, worth: Callable[[Sequence[int]], Floats], random: np.random.Generator) -> None:
        self._worth = worth
        self._random = random
        self._places: dict[int, int] = {}
        self._names: list[int] = []
        self._numbers: list[int] = []

    def __len__(self) -> int:
        return len(self._names)

    def use(self, name: int, number: int) -> bool:
        place = self._places.get(name)
        if place is not None:
            self._numbers[place] = number
            return True
        self._places[name] = len(self._names)
        self._names.append(name)
        self._numbers.append(number)
        return False

    def keep(self, count: int) -> None:
        at_once = max(1, min(self._AT_ONCE, count // self._PART))
        while len(self._names) > count + at_once // 2:
            # Some twice; the places of those that stay change as others go.
            drawn = self._random.integers(0, len(self._names), self._SAMPLE).tolist()
            order = np.argsort(self._worth([self._numbers[place] for place in drawn]), kind="stable")
            chosen = dict.fromkeys([self._names[drawn[at]] for at in order[: 2 * at_once].tolist()])
            for name in itertools.islice(chosen, at_once):
                self._forget(name)

    def only(self, is_wanted: Callable[[int], bool]) -> None:
        for name in [name for name in self._places if not is_wanted(name)]:
            self._forget(name)

    def _forget(self, name: int) -> None:
        """The last one takes its place."""
        place = self._places.pop(name)
        last, number = self._names.pop(), self._numbers.pop()
        if place < len(self._names):
            self._names[place], self._numbers[place] = last, number
            self._places[last] = place
