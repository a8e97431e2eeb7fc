"""Bringing blocks into HBM: copy them as they land, and check each after its copy.

The last ones that land may be copied layer by layer, so that the step loop begins behind the first layers
(`engine/layers.py`).
"""

import contextlib
import logging
from collections.abc import Callable, Sequence

from engine.counters import Counters
from engine.jobs import FetchJob
from engine.layers import LayerGate
from engine.link import FetchStream, KVClient, Links
from kvstore.client import LandedBlock
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.outcome import Outcome
from kvstore.region_pin import Hbm, RegionPin

_log = logging.getLogger(__name__)

# A fetch that was taken back is noticed at least this often.
_LANDED_TIMEOUT_S = 0.1
# So many blocks are copied before the step loop, which may wait for them, is told, and their slots are released.
_COPY_BLOCKS = 32


class Fetcher:
    """`progressed` is called whenever blocks of a fetch have landed, `fetched` once at its end. `layer_ends`: up to
    which layer each turn goes where blocks are copied layer by layer; () where they never are."""

    def __init__(
        self,
        hbm: Hbm,
        pins: RegionPin,
        progressed: Callable[[], None],
        fetched: Callable[[FetchJob], None],
        counters: Counters,
        faults: Counters,
        clock: Callable[[], float],
        layer_ends: Sequence[int] = (),
    ) -> None:
        self._hbm = hbm
        self._pins = pins
        self._progressed = progressed
        self._fetched = fetched
        self._counters = counters
        self._faults = faults
        self._clock = clock
        self._layer_ends = layer_ends

    def run(self, job: FetchJob, links: Links) -> None:
        """Do the job, as far as the step loop has not taken it back meanwhile, and report it."""
        # Left after the report: leaving a stream of a silent daemon takes a while, which the request must not wait for.
        with contextlib.ExitStack() as streams:
            try:
                if job.claim(self._clock()):
                    self._fetch(job, links.client(job.tenant), streams)
            except TierUnavailable:
                job.outcome = Outcome.UNAVAILABLE
            except ProtocolError as error:
                job.outcome = Outcome.REJECTED
                self._faults.add(f"fetch_refused_{error.code}")
            except Exception:
                # The root of every job: whatever happened, the request goes on, and computes what did not come.
                _log.exception("a fetch failed")
                job.outcome = Outcome.UNAVAILABLE
                self._faults.add("fetch_fault")
            finally:
                job.close(self._clock())
                self._fetched(job)

    def _fetch(self, job: FetchJob, client: KVClient, streams: contextlib.ExitStack) -> None:
        wait_s = job.deadline_s - self._clock()
        if wait_s <= 0:
            job.outcome = Outcome.TIMED_OUT
            return
        stream = streams.enter_context(client.fetch(job.keys, deadline_s=wait_s))
        self._pins.ensure(client.region)
        self._take_in(job, stream)

    def _take_in(self, job: FetchJob, stream: FetchStream) -> None:
        """Copy blocks as they land, in any order, until each is settled or taken back, or time is up."""
        while job.num_open:
            wait_s = job.deadline_s - self._clock()
            if wait_s <= 0:
                job.outcome = Outcome.TIMED_OUT
                return
            blocks = stream.landed(min(wait_s, _LANDED_TIMEOUT_S))
            if self._copy_by_layers(job, blocks, stream):
                return
            for start in range(0, len(blocks), _COPY_BLOCKS):
                part = blocks[start : start + _COPY_BLOCKS]
                self._copy_all(job, part, stream)
                stream.release_blocks([block.index for block in part])
                self._progressed()
            if not blocks and stream.done:
                job.outcome = Outcome.MISS
                return

    def _copy_by_layers(self, job: FetchJob, blocks: Sequence[LandedBlock], stream: FetchStream) -> bool:
        """Copy the blocks that end the job, all of them up to one layer before the next. False, and nothing was done,
        where they do not end it, or not all of them came."""
        if not self._layer_ends or not all(_has_come(job, block) for block in blocks):
            return False
        gate = LayerGate()
        begun = set(job.begin_last([block.index for block in blocks], gate))
        if not begun:
            return False
        self._progressed()
        chosen = [block for block in blocks if block.index in begun]
        try:
            outcomes = self._copy_layers(job, chosen, stream, gate)
            for block, outcome in zip(chosen, outcomes, strict=True):
                job.end(block.index, outcome, block.source, self._clock())
            gate.close(is_whole=all(outcome is Outcome.OK for outcome in outcomes))
        finally:
            gate.close(is_whole=False)
        self._counters.add("fetched_blocks", outcomes.count(Outcome.OK))
        self._progressed()
        stream.release_blocks([block.index for block in blocks])
        return True

    def _copy_layers(
        self, job: FetchJob, blocks: Sequence[LandedBlock], stream: FetchStream, gate: LayerGate
    ) -> list[Outcome]:
        views = [block.view for block in blocks if block.view is not None]
        groups = [job.pool_blocks[block.index] for block in blocks]
        with contextlib.ExitStack() as copies:
            may_copy = False not in [copies.enter_context(self._pins.copying(view)) for view in views]
            if may_copy:
                first = 0
                for end in self._layer_ends:
                    self._hbm.scatter_layers(views, groups, first, end)
                    gate.open(end)
                    first = end
        outcomes = [Outcome.OK if may_copy and stream.still_valid(block) else Outcome.STALE for block in blocks]
        self._faults.add("stale_slot", outcomes.count(Outcome.STALE))
        return outcomes

    def _copy_all(self, job: FetchJob, blocks: Sequence[LandedBlock], stream: FetchStream) -> None:
        num_copied = 0
        for block in blocks:
            if not 0 <= block.index < len(job.keys):
                continue
            if block.outcome is not Outcome.OK:
                job.refuse(block.index, block.outcome, block.source, self._clock())
            elif job.begin(block.index):
                outcome = self._copy(job, block, stream)
                num_copied += outcome is Outcome.OK
                job.end(block.index, outcome, block.source, self._clock())
        self._counters.add("fetched_blocks", num_copied)

    def _copy(self, job: FetchJob, block: LandedBlock, stream: FetchStream) -> Outcome:
        if block.view is None:
            return Outcome.REJECTED
        with self._pins.copying(block.view) as may_copy:
            if may_copy:
                self._hbm.scatter(block.view, job.pool_blocks[block.index])
        if not may_copy or not stream.still_valid(block):
            self._faults.add("stale_slot")
            return Outcome.STALE
        return Outcome.OK


def _has_come(job: FetchJob, block: LandedBlock) -> bool:
    return block.outcome is Outcome.OK and block.view is not None and 0 <= block.index < len(job.keys)
