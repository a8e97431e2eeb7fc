"""Waits for what comes next; looks again and again for a moment before it sleeps, where that usually comes at once.

To be woken takes longer than to answer most questions: in a row of them a round trip took 43 to 77 us, and takes 17 to
22 with this. Who asks once in a while costs nobody a look.

Looking helps only beside whoever asks. The system likes to wake us where that one runs, who then cannot ask before we
sleep. When that shows we move away, the answer being out; looking keeps us there, since who does not sleep is not woken
anywhere.
"""

import select
import time
from collections.abc import Callable
from typing import Final

from kvstore.cpu import move_away

# An engine thread that asks one question after another takes half of this between two.
_LOOK_S: Final = 50e-6
# What came within this after we began to sleep would have been worth a look.
_SOON_S: Final = 100e-6
# Where we were in the way, and could not move, so many waits pass before we look again.
_WAITS_WITHOUT: Final = 64
# Moving takes a tenth of a millisecond, and sometimes a few attempts. Where it never helps, or what comes in such a
# rhythm comes from elsewhere, it must not be often.
_MAX_MOVES: Final = 8.0
_MOVES_PER_S: Final = 4.0

Events = list[tuple[int, int]]


class EagerPoll:
    """Thread-confined."""

    def __init__(
        self,
        epoll: select.epoll,
        clock: Callable[[], float] = time.monotonic,
        move_away: Callable[[], bool] = move_away,
    ) -> None:
        """`move_away` returns whether there was another CPU."""
        self._epoll = epoll
        self._clock = clock
        self._move_away = move_away
        self._comes_soon = False
        self._is_in_the_way = False
        self._waits_without = 0
        self._moves_left = _MAX_MOVES
        self._moved_at = clock()

    def poll(self, timeout_s: float) -> Events:
        """As `select.epoll.poll`; 0.0 never waits."""
        if timeout_s <= 0.0:
            return self._epoll.poll(0)
        self._get_out_of_the_way()
        began = self._clock()
        looks = self._comes_soon and not self._waits_without
        if looks:
            until = began + min(_LOOK_S, timeout_s)
            while (now := self._clock()) < until:
                if ready := self._epoll.poll(0):
                    return ready
            began = now
        ready = self._epoll.poll(timeout_s)
        self._comes_soon = bool(ready) and self._clock() - began < _SOON_S
        self._is_in_the_way = looks and self._comes_soon
        if self._is_in_the_way:
            self._waits_without = _WAITS_WITHOUT
        elif self._waits_without:
            self._waits_without -= 1
        return ready

    def _get_out_of_the_way(self) -> None:
        """By now whoever asked has its answer."""
        if not self._is_in_the_way:
            return
        self._is_in_the_way = False
        now = self._clock()
        left = min(_MAX_MOVES, self._moves_left + _MOVES_PER_S * (now - self._moved_at))
        if left >= 1.0:
            self._moves_left, self._moved_at = left - 1.0, now
            if self._move_away():
                self._waits_without = 0
