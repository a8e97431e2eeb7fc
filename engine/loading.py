"""One request's load: which of its cached blocks are there, and how far to compute while the others land.

    0        first               front         meets_at           cached
    | in HBM | loaded, computed  | to compute  | lands meanwhile  |

Blocks are counted from the beginning of the prompt. The front moves over what was computed and over what has landed;
what has landed behind a block that is neither waits for it. Not thread-safe: the step loop owns it.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine.jobs import FetchJob
from kvstore.core.outcome import Outcome, TierKind
from policies.arrival import Arrival
from policies.cost import PrefillCost
from policies.meeting import Rest, between_s, meet, through_s
from policies.plan import Plan, Promise

# What is known of a block. COMING may be written by the mover at any moment; OURS was taken back from it.
_NOT_ASKED, _COMING, _THERE, _FAILED, _OURS = range(5)
_PLANNED: Final = "plan"
_LATE: Final = "timed_out"
# After any other failure the block is worth storing again.
_STILL_THERE: Final = (_LATE, Outcome.BUSY.label, Outcome.PENDING.label, Outcome.CANCELLED.label)


@dataclass(slots=True)
class _Part:
    """The blocks of one tier: where they are, in order, how many of them are coming, and how many from the front on
    have landed or failed, in the head that was asked for first and in the tail."""

    positions: list[int]
    arrival: Arrival
    num_coming: int
    num_settled: int = 0
    head_settled: int = 0
    tail_settled: int = 0

    def num_from(self, start: int, end: int) -> int:
        return bisect_left(self.positions, end) - bisect_left(self.positions, start) if start < end else 0


class Load:
    """`plan` counts from block `first`, the first that was not in HBM; block first + i lies in `tiers[i]`. `job` brings
    the blocks `first + i for i in plan.order()`.

    `give_up_at_s`: who pinned the plan waits until then, else `promise` decides.
    """

    def __init__(
        self,
        job: FetchJob,
        plan: Plan,
        promise: Promise,
        first: int,
        tiers: Sequence[TierKind],
        block_bytes: int,
        now: float,
        *,
        gpu_price: float = 0.0,
        give_up_at_s: float | None = None,
    ) -> None:
        self.job = job
        self.plan = plan
        self.first = self.front = first
        self.cached = first + len(tiers)
        # How far computing is to go, as of the last decision.
        self.meets_at = first + plan.end
        # When waiting: at the latest the next decision.
        self.look_again_s: float | None = None
        self.served: dict[TierKind, int] = {}
        self.computed: dict[str, int] = {}
        # Blocks that were to be loaded, and that computing reached first.
        self.num_abandoned = 0
        # Of computed blocks, [start, end) each.
        self.runs: list[tuple[int, int]] = []
        self._promise = promise
        self._gpu_price = gpu_price
        self._give_up_at_s = give_up_at_s
        self._head_end = first + plan.start
        # What lies behind is computed in any case: of a prefix cut only the head was asked for.
        self._asked_end = self._head_end if plan.is_cut else self.cached
        self._there_from = self.cached
        self._is_late = False
        self._tiers = list(tiers)
        self._sources = list(tiers)
        self._states = bytearray(len(tiers))
        self._failures: dict[int, str] = {}
        order = plan.order()
        self._blocks = [first + offset for offset in order]
        self._index = dict(zip(self._blocks, range(len(order)), strict=True))
        positions: dict[TierKind, list[int]] = {}
        for block in sorted(self._blocks):
            self._states[block - first] = _COMING
            positions.setdefault(tiers[block - first], []).append(block)
        self._parts = {
            tier: _Part(blocks, Arrival(plan.loads[tier], block_bytes, len(blocks), now), len(blocks))
            for tier, blocks in positions.items()
        }

    # ------------------------------------------------------------ what is there

    @property
    def tiers(self) -> Sequence[TierKind]:
        """The tiers of which something was asked."""
        return tuple(self._parts)

    @property
    def is_over(self) -> bool:
        return self.front >= self.cached

    @property
    def comes_whole(self) -> bool:
        """Whether every block from the front on is there or coming."""
        return all(state in (_COMING, _THERE) for state in self._states[self.front - self.first :])

    def num_coming(self, tier: TierKind) -> int:
        """Return how many blocks of that tier may still land."""
        part = self._parts.get(tier)
        return 0 if part is None else part.num_coming

    def num_unsettled(self, tier: TierKind) -> int:
        """Return of how many blocks that were asked for nothing was heard."""
        part = self._parts[tier]
        return len(part.positions) - part.num_settled

    def num_expected(self, tier: TierKind) -> int:
        """Return how many of them are to land, and not to be computed before."""
        part = self._parts.get(tier)
        return 0 if part is None or not part.num_coming else self._outside(part, self.front, self.meets_at)

    def arrival(self, tier: TierKind) -> Arrival:
        return self._parts[tier].arrival

    def is_silent(self, tier: TierKind, now: float) -> bool:
        """Whether blocks of that tier are so late that this request should not wait for them."""
        part = self._parts[tier]
        return part.num_coming > 0 and self._promise.is_silent(part.arrival.overdue_s(now))

    def has_failed(self, tier: TierKind, now: float) -> bool:
        """Whether they are so late that no other request should either."""
        return self.is_silent(tier, now) and self._promise.tells(self._parts[tier].arrival.overdue_s(now))

    def take_in(self) -> list[tuple[TierKind, float]]:
        """Note what the mover has settled since the last call; return tier and time of each block that came from
        where it was expected."""
        landed: list[tuple[TierKind, float]] = []
        for landing in self.job.take_news():
            block, source = self._blocks[landing.index], landing.source
            offset = block - self.first
            if self._states[offset] != _COMING:
                if landing.outcome is not Outcome.OK:
                    # It was taken back the moment it failed.
                    self._failures.setdefault(block, landing.outcome.label)
                continue
            part = self._parts[self._tiers[offset]]
            part.num_coming -= 1
            part.num_settled += 1
            self._settle(part, block, 1)
            if landing.outcome is not Outcome.OK:
                self._states[offset] = _FAILED
                self._failures[block] = landing.outcome.label
                continue
            self._states[offset] = _THERE
            self._sources[offset] = source
            if source is self._tiers[offset]:
                part.arrival.landed(landing.at_s)
                landed.append((source, landing.at_s))
        return landed

    def advance(self, computed_blocks: int) -> None:
        """So many whole blocks of the prompt have their KV: move the front there, and on over what has landed."""
        while self.front < min(computed_blocks, self.cached):
            self._pass()
        if self.front == computed_blocks:
            while not self.is_over and self._states[self.front - self.first] == _THERE:
                self._pass()

    def gone_from(self) -> int | None:
        """Return the first block that turned out not to be where it was said to be."""
        return min((block for block, why in self._failures.items() if why not in _STILL_THERE), default=None)

    def missing_from(self) -> int | None:
        """Return the first block that failed or came too late."""
        return min(self._failures, default=None)

    def last_landed_s(self) -> dict[TierKind, float]:
        """Return when the last block of each tier landed that served."""
        return {tier: part.arrival.last_landed_s for tier, part in self._parts.items() if part.arrival.landed_blocks}

    def failures(self) -> set[str]:
        return set(self._failures.values())

    def _pass(self) -> None:
        block, offset = self.front, self.front - self.first
        state = self._states[offset]
        if state in (_THERE, _FAILED):
            self._settle(self._parts[self._tiers[offset]], block, -1)
        if state == _THERE:
            source = self._sources[offset]
            self.served[source] = self.served.get(source, 0) + 1
        else:
            why = self._failures.get(block, _PLANNED)
            self.computed[why] = self.computed.get(why, 0) + 1
            began = self.runs.pop()[0] if self.runs and self.runs[-1][1] == block else block
            self.runs.append((began, block + 1))
        self.front += 1

    def _settle(self, part: _Part, block: int, change: int) -> None:
        if block < self._head_end:
            part.head_settled += change
        else:
            part.tail_settled += change

    # ------------------------------------------------------------ what to compute

    def decide(
        self, prompt_tokens: int, block_tokens: int, prefill: PrefillCost, gpu_queue_s: float, now: float
    ) -> int:
        """Return up to which block to compute now. The front: wait, until something lands or `look_again_s`. The last
        cached block: everything, prompt included."""
        self.look_again_s = None
        rest = self._rest(prompt_tokens, block_tokens, gpu_queue_s)
        goal = self._goal(rest, prefill, now)
        # What nobody brings is to be computed in any case.
        self.meets_at = max(goal, self._first_brought())
        if self.meets_at > self.front:
            self.look_again_s = None
        return self.meets_at

    def claim(self, start: int, end: int) -> int:
        """Take the blocks [start, end) back from the mover; return up to where they may be computed: not what has
        landed, nor what is being written this moment."""
        for block in range(max(start, self.front), min(end, self.cached)):
            offset = block - self.first
            state = self._states[offset]
            if state == _THERE:
                return block
            if state == _COMING:
                if not self.job.withdraw(self._index[block]):
                    return block
                self._states[offset] = _OURS
                self._parts[self._tiers[offset]].num_coming -= 1
                if self._is_late:
                    self._failures[block] = _LATE
                elif not self.plan.start <= offset < self.plan.end:
                    self.num_abandoned += 1
        return end

    def work_s(self, prompt_tokens: int, block_tokens: int, prefill: PrefillCost) -> float:
        """Return how many seconds of computing the request will still take, as of the last decision."""
        rest = self._rest(prompt_tokens, block_tokens, 0.0)
        if self.meets_at >= rest.cached:
            return self._through_s(rest, prefill)
        return between_s(rest, prefill, self.front, self.meets_at) + through_s(rest, prefill, rest.cached)

    def _rest(self, prompt_tokens: int, block_tokens: int, gpu_queue_s: float) -> Rest:
        asked_end = max(self._asked_end, self.front)
        return Rest(prompt_tokens, block_tokens, self.front, self._head_end, asked_end, gpu_queue_s)

    def _goal(self, rest: Rest, prefill: PrefillCost, now: float) -> int:
        if not any(part.num_coming for part in self._parts.values()):
            return self.cached
        if self._give_up_at_s is not None:
            self._is_late = self._is_late or now >= self._give_up_at_s
            self.look_again_s = self._give_up_at_s
            return self.cached if self._is_late else self.front
        silent = [part for tier, part in self._parts.items() if self.is_silent(tier, now)]

        def loaded_s(start: int, end: int) -> float:
            longest_s = 0.0
            for part in self._parts.values():
                if part.num_coming and (count := self._outside(part, start, end)):
                    remaining_s = math.inf if part in silent else part.arrival.remaining_s(count, now)
                    longest_s = max(longest_s, remaining_s)
            return longest_s

        # Where nothing is known yet, computing meanwhile is how it is learned.
        is_planned = self.plan.start < self.plan.end or not self.plan.measured
        meeting = meet(rest, prefill, loaded_s, self._gpu_price, is_planned=is_planned)
        wait_until_s = self._promise.may_wait_until(rest.gpu_queue_s + self._through_s(rest, prefill))
        self._is_late = bool(silent) or now >= wait_until_s
        goal = self.cached if meeting.end >= rest.cached else meeting.end
        if now >= wait_until_s:
            return goal if meeting.start == self.front < meeting.end else self.cached
        # What is computed in one chunk teaches nothing about the tier that it was not loaded from.
        chunk_blocks = max(1, prefill.chunk_tokens // rest.block_tokens)
        is_blind = not self.plan.measured and not silent and goal == self.cached <= self.front + chunk_blocks
        if meeting.start == self.front and meeting.end > self.front and not is_blind:
            return goal
        self.look_again_s = min(now + self._promise.look_again_s(), wait_until_s)
        return self.front

    def _first_brought(self) -> int:
        """Return the first block from the front on that is there or coming, or the last cached one."""
        states, begin = self._states, self.front - self.first
        found = [at for at in (states.find(_COMING, begin), states.find(_THERE, begin)) if at >= 0]
        return self.first + min(found, default=len(states))

    def _outside(self, part: _Part, start: int, end: int) -> int:
        """Return how many blocks of the part are to land if [start, end) is computed; what has landed is taken to lie
        behind it."""
        head_from = self.front if start >= self._head_end else end
        head = part.num_from(head_from, self._head_end) - part.head_settled
        tail = part.num_from(max(end, self._head_end), self.cached) - part.tail_settled
        return max(head, 0) + max(tail, 0)

    def _through_s(self, rest: Rest, prefill: PrefillCost) -> float:
        """Return the seconds to compute everything that is not there."""
        states = self._states
        while self._there_from > self.front and states[self._there_from - 1 - self.first] == _THERE:
            self._there_from -= 1
        if self._there_from == self.cached:
            return through_s(rest, prefill, self.front)
        between = between_s(rest, prefill, self.front, max(self._there_from, self.front))
        return between + through_s(rest, prefill, self.cached)
