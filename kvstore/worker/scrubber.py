"""A worker's walk over its tier (`tiers/scrub.py`) beside everything else it does, which comes first.

One walk at a time, on a thread of its own. It rests as long as it works, and while somebody waits for a block it waits,
up to MAX_YIELD_S for each of its steps, so that it comes to an end on a busy tier too.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from kvstore.core.errors import TierUnavailable
from kvstore.core.outcome import Outcome
from kvstore.wire import ScrubFinding, ScrubReport
from kvstore.worker import ops
from tiers.scrub import Orders, ScrubbedTier, Tally

_log = logging.getLogger(__name__)
MAX_YIELD_S: Final = 1.0
_REST_AT_MOST_S = 1.0
_LOOK_EVERY_S = 0.02
_TELL_EVERY_S = 0.2


class Scrubber:
    """`answer` sends a reply to the control thread, `is_loading` says whether somebody waits for a block."""

    def __init__(
        self,
        tier: ScrubbedTier,
        answer: Callable[[ops.Reply], None],
        is_loading: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self._answer = answer
        self._is_loading = is_loading
        self._clock = clock
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, op: ops.Scrub) -> None:
        """Begin a walk; the one before must have been answered."""
        self._join()
        self._ended.clear()
        self._thread = threading.Thread(target=self.run, args=(op,), name="scrub")
        self._thread.start()

    def cancel(self) -> None:
        """End the walk after its present step; never blocks."""
        self._ended.set()

    def close(self) -> None:
        """End the walk and wait for that; idempotent."""
        self.cancel()
        self._join()

    def run(self, op: ops.Scrub) -> None:
        """Walk; the root of the thread. Answered by Scrubbed now and then, and by one Result in the end."""
        tally = Tally()
        started = self._clock()
        outcome = Outcome.OK
        try:
            for step in self._steps(op, tally, started):
                if self._has_ended_after(step):
                    outcome = Outcome.CANCELLED
                    break
        except TierUnavailable as error:
            _log.warning("the walk over the tier ended early: %s", error)
            outcome = Outcome.UNAVAILABLE
        except Exception:
            # The root of this thread: whoever ordered the walk is answered, and the worker goes on.
            _log.exception("the walk over the tier failed")
            outcome = Outcome.UNAVAILABLE
        self._answer(ops.Scrubbed(op.op, report_of(tally, self._clock() - started)))
        self._answer(ops.Result(op.op, outcome))

    def _steps(self, op: ops.Scrub, tally: Tally, started: float) -> Iterator[float]:
        """Yield how long each step took, telling of it where that is due."""
        told_at = step_began = self._clock()
        for step in self._tier.scrub(Orders(op.repair, op.drop_wrong_key)):
            tally.add(step)
            now = self._clock()
            if step.lost or now - told_at >= _TELL_EVERY_S:
                told_at = now
                lost = b"".join(step.lost)
                self._answer(ops.Scrubbed(op.op, report_of(tally, now - started), lost))
            yield now - step_began
            step_began = self._clock()

    def _has_ended_after(self, step_s: float) -> bool:
        """Rest, and let loads go first; return whether the walk was cancelled."""
        rest_until = self._clock() + min(step_s, _REST_AT_MOST_S)
        yield_until = self._clock() + MAX_YIELD_S
        while (now := self._clock()) < rest_until or (now < yield_until and self._is_loading()):
            if self._ended.wait(min(_LOOK_EVERY_S, max(0.0, rest_until - now) or _LOOK_EVERY_S)):
                break
        return self._ended.is_set()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def report_of(tally: Tally, seconds: float) -> ScrubReport:
    """Return the sum so far as a message."""
    return ScrubReport(
        counts={area: dict(of_area) for area, of_area in tally.counts.items()},
        examples=[
            ScrubFinding(found.verdict.value, found.area, found.name, found.why, found.is_removed)
            for found in tally.examples
        ],
        removed=dict(tally.removed),
        num_seen=tally.num_seen,
        num_bytes=tally.num_bytes,
        total=tally.total,
        seconds=seconds,
    )
