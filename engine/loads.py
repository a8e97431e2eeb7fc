"""All loads that are under way: what they teach about the tiers, what stands in front of the next one, how each ends.

Loads of several requests share a tier, so what one of them sees is not what the tier can do. A tier is busy from when
the first block is asked of it until nothing more is to come; the whole of such a time is one observation. Where all was
taken back before anything came, that is one, too, as long as the tier is not known: so long at least it takes. Else an
engine that computes faster than its first load lands would never learn how slow the tier is, and wait for it each time.
What is taken back while it is read comes all the same, and stands in front of the next load.

Not thread-safe: the step loop owns it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.counters import Counters
from engine.jobs import FetchJob
from engine.loading import Load
from engine.pool import BlockPool
from kvstore.core.outcome import TierKind
from policies.arrival import BURST_BLOCKS
from policies.cost import CostModel

# So many reads of a tier the daemon's worker has taken on at once; it does not take them back.
_READS_BEGUN = 2 * BURST_BLOCKS


@dataclass(slots=True)
class _Busy:
    """A time in which a tier was busy for us; it began with `job`, behind `queue_s` of what had been taken back."""

    job: FetchJob
    queue_s: float
    asked_blocks: int = 0
    landed_blocks: int = 0
    last_at_s: float = 0.0


class Loads:
    """At most one load per request, by the request's id."""

    def __init__(
        self, pool: BlockPool, costs: CostModel, block_bytes: int, counters: Counters, clock: Callable[[], float]
    ) -> None:
        self._pool = pool
        self._costs = costs
        self._block_bytes = block_bytes
        self._counters = counters
        self._clock = clock
        self._loads: dict[str, Load] = {}
        self._busy: dict[TierKind, _Busy] = {}
        # Until when a tier is still reading what nobody waits for any more.
        self._rests_at_s: dict[TierKind, float] = {}
        # Pool blocks that a mover is still writing though their request has no use for them any more.
        self._held: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def of(self, request_id: str) -> Load | None:
        return self._loads.get(request_id)

    def begin(self, request_id: str, load: Load) -> None:
        self._loads[request_id] = load
        for tier in load.tiers:
            busy = self._busy.setdefault(tier, _Busy(load.job, self._leftover_s(tier)))
            busy.asked_blocks += load.num_coming(tier)

    def take_in(self, load: Load) -> None:
        """Note what has landed since the last call."""
        for tier, at_s in load.take_in():
            busy = self._busy.setdefault(tier, _Busy(load.job, 0.0))
            busy.landed_blocks += 1
            busy.last_at_s = max(busy.last_at_s, at_s)
        for tier in load.tiers:
            if not load.num_coming(tier):
                self._learn(tier)

    def end(self, request_id: str) -> None:
        """Take back what has not landed; the request may give its pool blocks back afterwards. No load: nothing."""
        load = self._loads.get(request_id)
        if load is None:
            return
        self.take_in(load)
        del self._loads[request_id]
        writing = [block for index in load.job.withdraw_all() for block in load.job.pool_blocks[index]]
        if writing:
            self._pool.hold(writing)
            self._held[id(load.job)] = writing
        now = self._clock()
        for tier in load.tiers:
            self._leave(load, tier, now)
            if load.num_coming(tier):
                self._learn(tier)
                if load.has_failed(tier, now):
                    # Else the next request waits for it as well.
                    self._costs.observe_silence(tier, now - load.arrival(tier).last_landed_s)
        for why in load.failures():
            self._counters.add(f"fetch_{why}")

    def ended(self, job: FetchJob) -> None:
        """The mover is done with a job."""
        self._pool.unhold(self._held.pop(id(job), ()))
        load = self._loads.get(job.request_id)
        if load is not None and load.job is job:
            self.take_in(load)

    def queues_s(self) -> Mapping[TierKind, float]:
        """Return how long each tier will be busy with what is asked of it already, as far as we know."""
        queues = {tier: self._leftover_s(tier) for tier in self._rests_at_s}
        for load in self._loads.values():
            for tier in load.tiers:
                if count := load.num_expected(tier):
                    queues[tier] = queues.get(tier, 0.0) + count * load.arrival(tier).per_block_s
        return queues

    def next_look_s(self) -> float | None:
        """Return when a request that waits is to be decided about again; None: never."""
        times = [load.look_again_s for load in self._loads.values() if load.look_again_s is not None]
        return min(times, default=None)

    def _learn(self, tier: TierKind) -> None:
        """Where nothing more is to come from the tier: observe what it did."""
        if any(load.num_coming(tier) for load in self._loads.values()):
            return
        busy = self._busy.pop(tier, None)
        if busy is None or busy.job.began_s is None:
            return
        if busy.landed_blocks:
            num_bytes = busy.landed_blocks * self._block_bytes
            seconds = busy.last_at_s - busy.job.began_s
            self._costs.observe_load(tier, num_bytes, seconds, least_s=seconds - busy.queue_s)
        elif not self._costs.load_known(tier):
            waited_s = self._clock() - busy.job.began_s - busy.queue_s
            self._costs.observe_unfinished(tier, busy.asked_blocks * self._block_bytes, waited_s)

    def _leave(self, load: Load, tier: TierKind, now: float) -> None:
        """Remember what the tier is still reading of a load that has ended."""
        if tier is not TierKind.RAM and load.job.began_s is not None:
            left = min(load.num_unsettled(tier), _READS_BEGUN)
            self._rests_at_s[tier] = now + self._leftover_s(tier) + left * load.arrival(tier).per_block_s

    def _leftover_s(self, tier: TierKind) -> float:
        return max(0.0, self._rests_at_s.get(tier, 0.0) - self._clock())
