"""Which leading blocks of a prefix of n are in the bucket, in two rounds of at most 2√n HEADs in total.

    round 1    every s-th block from the first on, s = ⌈√n⌉          0, s, 2s, …    ⌈n/s⌉ HEADs
    round 2    those between the last one found before a gap, and the next one asked for       ≤ s − 1 HEADs

⌈n/s⌉ + s − 1 ≤ 2√n: where n ≤ s(s−1) the sum is at most 2s − 2 < 2√n, since (s−1)² < n; else it is 2s − 1, and
n ≥ s² − s + 1 makes that less than 2√n.

The answer is right where the bucket is prefix-closed, which uploads (`store/chain_order.py`) and deletions keep up.
Where it is not, because somebody's upload has just been cut off, a block in a hole may be taken for present, since both
blocks around it are: then its GET answers MISS and it is computed. A later question that begins at that block asks for
it by name.
"""

import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome

_log = logging.getLogger(__name__)
# Of one question; a longer prefix is asked for in several.
MAX_ASKED: Final = 1024

Contains = Callable[[Sequence[BlockKey]], list[Outcome]]
Done = Callable[[int | None], None]


def first_round(num_blocks: int) -> range:
    """Return the indexes to ask for at first."""
    return range(0, num_blocks, _stride(num_blocks))


def second_round(num_blocks: int, is_there: Sequence[bool]) -> range:
    """Return the indexes to ask for next, given the answers to `first_round`; empty where they say it all."""
    found = _leading(is_there)
    if not found:
        return range(0)
    stride = _stride(num_blocks)
    last = (found - 1) * stride
    return range(last + 1, min(last + stride, num_blocks))


def answer(num_blocks: int, first: Sequence[bool], second: Sequence[bool]) -> int:
    """Return how many leading blocks there are, given the answers to both rounds."""
    found = _leading(first)
    return (found - 1) * _stride(num_blocks) + 1 + _leading(second) if found else 0


class PrefixSearch:
    """One question on its way through the worker's threads, a few of its HEADs at a time. `done` is told once: how many
    leading blocks there are, or None where the bucket did not say."""

    def __init__(
        self,
        keys: Sequence[BlockKey],
        contains: Contains,
        submit: Callable[[Callable[[], None]], object],
        num_threads: int,
        done: Done,
    ) -> None:
        self._keys = keys
        self._contains = contains
        self._submit = submit
        self._num_threads = num_threads
        self._done = done
        self._lock = threading.Lock()
        self._rounds: list[range] = []
        self._answers: list[dict[int, bool]] = []
        self._left: list[int] = []
        self._num_running = 0
        self._is_unanswered = False

    def start(self) -> None:
        """Never blocks, where `submit` does not."""
        self._begin(first_round(len(self._keys)))

    def _begin(self, indexes: range) -> None:
        self._rounds.append(indexes)
        self._answers.append({})
        self._left = list(indexes)[::-1]
        self._num_running = num_tasks = min(self._num_threads, len(indexes))
        for _ in range(num_tasks):
            self._submit(self._walk)

    def _walk(self) -> None:
        """Ask for one block after the other; whoever ends last goes on to the next round."""
        while (index := self._next()) is not None:
            outcome = self._ask(index)
            with self._lock:
                self._answers[-1][index] = outcome == Outcome.OK
                if outcome not in (Outcome.OK, Outcome.MISS):
                    self._is_unanswered = True
                    self._left.clear()
        with self._lock:
            self._num_running -= 1
            if self._num_running:
                return
        self._go_on()

    def _next(self) -> int | None:
        with self._lock:
            return self._left.pop() if self._left else None

    def _ask(self, index: int) -> Outcome:
        try:
            return self._contains([self._keys[index]])[0]
        except Exception:
            # The root of what runs for this question: whatever happens, it is answered.
            _log.exception("a question to the bucket failed")
            return Outcome.UNAVAILABLE

    def _go_on(self) -> None:
        if self._is_unanswered:
            self._done(None)
            return
        said = [[there[index] for index in indexes] for indexes, there in zip(self._rounds, self._answers, strict=True)]
        following = second_round(len(self._keys), said[0]) if len(said) == 1 else range(0)
        if len(following):
            self._begin(following)
        else:
            self._done(answer(len(self._keys), said[0], said[1] if len(said) > 1 else []))


def _stride(num_blocks: int) -> int:
    return max(1, math.isqrt(num_blocks - 1) + 1) if num_blocks else 1


def _leading(is_there: Sequence[bool]) -> int:
    return next((index for index, there in enumerate(is_there) if not there), len(is_there))
