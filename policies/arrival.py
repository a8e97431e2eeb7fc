"""When the blocks that a fetch has asked one tier for will be there, from what it has brought so far.

Begins as the cost model's prediction and follows what is seen: the rate is that of this very fetch, the more of it
has landed the more it counts. Several reads are under way at once, so blocks land in bursts; silence counts as such
only after the longest gap that this explains. From then on it is taken to last as long again as it has lasted.

Not thread-safe. `now` is the clock of the landings.
"""

from typing import Final

from policies.cost import LoadCost

# So many blocks may land at once after having shared a link; the default of the daemon's readers is 8.
BURST_BLOCKS: Final = 8
# What was predicted counts like so many blocks that have landed.
_PRIOR_BLOCKS: Final = 4


class Arrival:
    """`total_blocks` of `block_bytes` each were asked for at `asked_at_s`, which are to cost `predicted`."""

    def __init__(self, predicted: LoadCost, block_bytes: int, total_blocks: int, asked_at_s: float) -> None:
        self._block_s = predicted.per_byte_s * block_bytes
        self._first_s = predicted.queue_s + predicted.latency_s
        self._asked_at_s = asked_at_s
        self._last_at_s = asked_at_s + self._first_s
        self.total_blocks = total_blocks
        self.landed_blocks = 0

    def landed(self, at_s: float) -> None:
        """One more block is there."""
        self.landed_blocks += 1
        self._last_at_s = max(self._last_at_s, at_s) if self.landed_blocks > 1 else at_s

    @property
    def last_landed_s(self) -> float:
        """When the last one landed; before the first: when it should."""
        return self._last_at_s

    @property
    def per_block_s(self) -> float:
        if not self.landed_blocks:
            return self._block_s
        # Latency that was shorter than predicted would make the rate infinite.
        spent_s = max(self._last_at_s - self._asked_at_s - self._first_s, 0.0)
        return (_PRIOR_BLOCKS * self._block_s + spent_s) / (_PRIOR_BLOCKS + self.landed_blocks)

    def overdue_s(self, now: float) -> float:
        """Return for how long nothing has come though it should have; 0 where all is well."""
        return max(0.0, now - self._last_at_s - self._longest_gap_s())

    def remaining_s(self, num_blocks: int, now: float) -> float:
        """Return the seconds until `num_blocks` more of those that have not landed are there."""
        if num_blocks <= 0:
            return 0.0
        each_s = self.per_block_s
        silent_s = now - self._last_at_s
        longest_s = self._longest_gap_s()
        expected_s = each_s * num_blocks
        if silent_s <= longest_s:
            return max(expected_s - silent_s, 0.0)
        return max(expected_s - longest_s, 0.0) + (silent_s - longest_s)

    def _longest_gap_s(self) -> float:
        left = self.total_blocks - self.landed_blocks
        return self.per_block_s * min(max(left, 0), BURST_BLOCKS)
