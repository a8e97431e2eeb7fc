"""Which blocks are worth being written to a tier: all, those seen before, or those that are likely to be read again.

    always        everything
    second_touch  a block that was seen before, and with it all blocks before it in its prefix
    learned       what of its class was worth writing so far, as far as the hits that this loses and the budget allow

Writing wears out an SSD and costs requests to a bucket, and most blocks are never read again (58 to 96% in chat
traces). What is not admitted stays in the faster tiers, and is asked about anew when it is used again. A tier stays
closed under prefixes: of a run of blocks the first so many are admitted. Pure; all state is bounded.
Does not cover: what was promised to be durable, which is written whatever is said here (kvstore/store/admitting.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from policies.seen import Names, Seen

NAMES: Final = ("always", "second_touch", "learned")
_DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """The request that some blocks belong to: how many blocks it has, and how many of them were never seen before."""

    num_blocks: int
    num_new: int


class Admission(Protocol):
    """Decides for one tier. Blocks go by names, 64 bits that stay the same wherever a block is. Not thread-safe."""

    def prompt(self, names: Names) -> Prompt:
        """Return what a request for these blocks, all of its prompt's, is. Asked before `admit` is about any."""
        ...

    def admit(self, names: Names, prompt: Prompt) -> int:
        """Return how many of the first of these blocks to write: blocks of one request, in prefix order, that are used
        now and that the tier does not have."""
        ...

    def on_read(self, names: Names) -> None:
        """The tier had these when no faster one had."""
        ...

    def on_evicted(self, names: Names) -> None:
        """These left the tier to make room."""
        ...


class WriteBudget:
    """So much per day, of whatever unit, and what was not used of up to `burst_s` seconds on top."""

    def __init__(self, per_day: float, clock: Callable[[], float], burst_s: float = 3600.0) -> None:
        """`per_day` 0: no limit."""
        self.per_day = per_day
        self._clock = clock
        self._rate = per_day / _DAY_S
        self._most = self._rate * burst_s
        self._left = self._most
        self._at_s = clock()

    def allows(self, wanted: float) -> float:
        """Return how much of what is wanted may be spent now."""
        if not self.per_day:
            return wanted
        now_s = self._clock()
        self._left = min(self._most, self._left + self._rate * (now_s - self._at_s))
        self._at_s = now_s
        return min(wanted, max(0.0, self._left))

    def spend(self, amount: float) -> None:
        """May go below zero, for what had to be written anyway."""
        if self.per_day:
            self._left -= amount


class Always:
    def prompt(self, names: Names) -> Prompt:
        return Prompt(len(names), 0)

    def admit(self, names: Names, prompt: Prompt) -> int:
        return len(names)

    def on_read(self, names: Names) -> None: ...

    def on_evicted(self, names: Names) -> None: ...


class SecondTouch:
    """Remembers which blocks were asked about: a block that comes again is worth writing."""

    def __init__(self) -> None:
        self._seen = Seen()

    def prompt(self, names: Names) -> Prompt:
        return Prompt(len(names), 0)

    def admit(self, names: Names, prompt: Prompt) -> int:
        _, times = self._seen.see(names)
        again = np.flatnonzero(times)
        return int(again[-1]) + 1 if len(again) else 0

    def on_read(self, names: Names) -> None: ...

    def on_evicted(self, names: Names) -> None: ...


# A class: how often the block was asked about before, how many new blocks its prompt brings, how long the prompt is.
_TIMES, _NEWS, _LENGTHS = 4, 10, 10
_NUM_CLASSES: Final = _TIMES * _NEWS * _LENGTHS
_NO_LIFE: Final = -1
# One run in so many is written whatever is known, or nothing could be learned of what is refused.
_EXPLORED: Final = 16
_LEARN_EVERY: Final = 16
# A class with few lives leans on its neighbours' mean by so many.
_LEANS_ON: Final = 10.0

# Before anything was seen: how many of so many lives are read again, by how often the block was seen before.
_PRIOR: Final = (0.15, 0.4, 0.5, 0.5)
_FORGETS: Final = 0.98
_HALVE_AT: Final = 60_000.0
# Reads that may be lost, of all blocks that were asked for, as predicted. Most come back: what is refused leaves its
# room to others, and is written when it is seen again.
MAX_LOSS: Final = 0.05


class Learned:
    """A *life* begins when a block is written, and ends when it is read from the tier, or evicted unread. What share of
    a class's lives were read is what writing one more of it is worth. The classes that are worth least are refused, as
    long as they are worth less than the mean and the reads that this will lose stay below `max_loss` of all blocks
    asked for; beyond that as far as the budget demands."""

    def __init__(
        self, clock: Callable[[], float], budget_blocks_per_day: float = 0.0, max_loss: float = MAX_LOSS
    ) -> None:
        """`budget_blocks_per_day` 0: none; it may be set at any time."""
        self._clock = clock
        self._began_s = clock()
        self.budget_blocks_per_day = budget_blocks_per_day
        self._max_loss = max_loss
        self._seen = Seen()
        self._kinds: npt.NDArray[np.int16] = np.full(self._seen.num_places, _NO_LIFE, dtype=np.int16)
        times = np.arange(_NUM_CLASSES) // (_NEWS * _LENGTHS)
        self._prior = np.array(_PRIOR)[times]
        self._read = np.zeros(_NUM_CLASSES)
        self._unread = np.zeros(_NUM_CLASSES)
        # Blocks that were asked about, by class and in all, and the time that these counts are of; old ones fade.
        self._asked = np.zeros(_NUM_CLASSES)
        self._all_asked = 0.0
        self._counted_s = 0.0
        # Which share of each class is refused.
        self._refused = np.zeros(_NUM_CLASSES)
        self._num_requests = 0

    def prompt(self, names: Names) -> Prompt:
        self._all_asked += len(names)
        self._num_requests += 1
        if self._num_requests % _LEARN_EVERY == 0:
            self._learn()
        return Prompt(len(names), int(np.count_nonzero(self._seen.times(names) == 0)))

    def admit(self, names: Names, prompt: Prompt) -> int:
        if not len(names):
            return 0
        places, times = self._seen.see(names)
        kinds = _class_of(times, prompt)
        np.add.at(self._asked, kinds, 1.0)
        # The first block decides for the run: what goes on from it goes with it.
        draw = ((int(names[0]) * 0x9E3779B97F4A7C15) >> 40 & 0xFFFF) / 65536
        is_refused = draw < self._refused[kinds] * (1 - 1 / _EXPLORED)
        admitted = int(is_refused.argmax()) if is_refused.any() else len(names)
        self._kinds[places[:admitted]] = kinds[:admitted]
        self._kinds[places[admitted:]] = _NO_LIFE
        return admitted

    def on_read(self, names: Names) -> None:
        self._end(names, self._read)

    def on_evicted(self, names: Names) -> None:
        self._end(names, self._unread)

    def _end(self, names: Names, counts: npt.NDArray[np.float64]) -> None:
        places = self._seen.find(names)
        kinds = self._kinds[places]
        np.add.at(counts, kinds[kinds != _NO_LIFE], 1.0)
        self._kinds[places] = _NO_LIFE

    def _learn(self) -> None:
        lives = self._read + self._unread
        worth = (self._read + _LEANS_ON * self._prior) / (lives + _LEANS_ON)
        now_s = self._clock()
        self._counted_s += now_s - self._began_s
        self._began_s = now_s
        loss_left = self._max_loss * self._all_asked
        mean_worth = float((self._asked * worth).sum() / max(self._asked.sum(), 1.0))
        writes_over = 0.0
        if self.budget_blocks_per_day:
            writes_over = self._asked.sum() - self.budget_blocks_per_day / _DAY_S * self._counted_s
        self._refused[:] = 0.0
        for kind in np.argsort(worth, kind="stable").tolist():
            asked = float(self._asked[kind])
            if not asked:
                continue
            may_lose = loss_left / (asked * worth[kind]) if worth[kind] < mean_worth else 0.0
            share = min(1.0, max(may_lose, writes_over / asked))
            if share <= 0.0:
                break
            self._refused[kind] = share
            loss_left -= share * asked * worth[kind]
            writes_over -= share * asked
        self._asked *= _FORGETS
        self._all_asked *= _FORGETS
        self._counted_s *= _FORGETS
        if lives.sum() > _HALVE_AT:
            self._read /= 2
            self._unread /= 2


def _class_of(times: npt.NDArray[np.int64], prompt: Prompt) -> npt.NDArray[np.int64]:
    news = min(int(math.log2(prompt.num_new + 1)), _NEWS - 1)
    length = min(int(math.log2(prompt.num_blocks + 1)), _LENGTHS - 1)
    return (np.minimum(times, _TIMES - 1) * _NEWS + news) * _LENGTHS + length


def make(name: str, clock: Callable[[], float], budget_blocks_per_day: float = 0.0) -> Admission:
    """`name` is one of NAMES, `budget_blocks_per_day` 0: none; only `learned` plans for it."""
    match name:
        case "always":
            return Always()
        case "second_touch":
            return SecondTouch()
        case "learned":
            return Learned(clock, budget_blocks_per_day)
    raise ValueError(f"there is no admission policy {name!r}")
