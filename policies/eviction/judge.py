"""Compares orders of eviction in small caches that hold a sample of the names, and says which would hit most.

Of all blocks those are sampled whose name has a certain hash (Waldspurger et al., Efficient MRC construction with
SHARDS, FAST 2015): so few that a cache of their share of the tier holds at most MAX_SHADOW of them.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from policies.base import Names
from policies.eviction.shadows import Shadow

MAX_SHADOW: Final = 2_048
Places = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int64]
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_WORD: Final = (1 << 64) - 1
_JUDGE_EVERY: Final = 32  # requests
# What is older than some 64 judgements counts for little.
_FADE: Final = 1 - 1 / 64
# Another is followed when it hit more by so many standard errors, and by so much of all blocks. To follow the wrong one
# of two that are as close as this costs little. In trials 2.5 and 0.003 were up to 0.5 points worse on made-up loads of
# popular prompts, and with 1.5 and 0.001 the wrong one was followed on a Mooncake trace (synthetic, 3%): 0.7 points.
_CLEARLY: Final = 2.0
_WORTH: Final = 0.002
# Back to the first it goes sooner: asked every 32 requests, a rival seems clearly better by chance now and then. So one
# was followed for 2,000 requests (synthetic in pieces, 10%), and cost 1.2 points.
_CLEARLY_BACK: Final = 1.0


class Judge:
    """The first is the best until another is clearly better."""

    def __init__(self, shadows: Sequence[Shadow]) -> None:
        self.best = 0
        self._shadows = shadows
        self._bits = 0  # one name in 2 ** _bits is sampled
        self._sampled_below = np.uint64(_WORD)
        # Of the request that is under way.
        self._used: list[tuple[int, int]] = []  # what the shadows were not told yet
        self._hits = [0] * len(shadows)
        self._num_used = 0
        # What each hit more than the best, the same squared by request, and the blocks asked for; they fade.
        self._more = np.zeros(len(shadows))
        self._squares = np.zeros(len(shadows))
        self._asked = 0.0
        self._num_requests = 0

    def sampled(self, names: Names) -> Places:
        """Return which of these names, by their places among them, to tell about: the others make no difference."""
        while len(names) >> self._bits > MAX_SHADOW:
            self._halve()
        if not self._bits:
            return np.arange(len(names))
        places: Places = (names * _MIX < self._sampled_below).nonzero()[0]
        return places

    def saw(self, names: Names, numbers: Numbers) -> None:
        """A request used blocks of these sampled names, in prefix order, each of which is now so in one number
        (worth.py)."""
        # From the tail on, so that the head is what was used last.
        self._used += zip(names[::-1].tolist(), numbers[::-1].tolist(), strict=True)
        if len(self._used) > MAX_SHADOW:
            self._tell()

    def request_ends(self, capacity_blocks: int) -> None:
        """The tier has room for so many blocks; 0: that is not known yet."""
        self._tell()
        while (capacity_blocks >> self._bits if capacity_blocks else len(self._shadows[0])) > MAX_SHADOW:
            self._halve()
        if capacity_blocks:
            for shadow in self._shadows:
                shadow.keep(max(1, capacity_blocks >> self._bits))
        if not self._num_used:
            return
        more = np.array(self._hits, dtype=np.float64)
        more -= more[self.best]
        self._more += more
        self._squares += more * more
        self._asked += self._num_used
        self._hits = [0] * len(self._shadows)
        self._num_used = 0
        self._num_requests += 1
        if self._num_requests % _JUDGE_EVERY == 0:
            self._judge()

    # ------------------------------------------------------------ private

    def _tell(self) -> None:
        """All at once, since it costs less."""
        for at, shadow in enumerate(self._shadows):
            use = shadow.use
            self._hits[at] += sum([use(name, number) for name, number in self._used])
        self._num_used += len(self._used)
        self._used.clear()

    def _judge(self) -> None:
        best = int(self._more.argmax())
        more = float(self._more[best])
        clearly = _CLEARLY if best else _CLEARLY_BACK
        if more > clearly * float(self._squares[best]) ** 0.5 and more > _WORTH * self._asked:
            # From now on they are compared with this one.
            self.best = best
            self._more[:] = 0
            self._squares[:] = 0
            self._asked = 0.0
        self._more *= _FADE
        self._squares *= _FADE
        self._asked *= _FADE

    def _halve(self) -> None:
        self._tell()
        self._bits += 1
        below = 1 << 64 - self._bits
        self._sampled_below = np.uint64(below)
        for shadow in self._shadows:
            shadow.only(lambda name: name * int(_MIX) & _WORD < below)
