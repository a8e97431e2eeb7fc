"""Bringing blocks into HBM: copy them as they land, and check each after its copy."""

import contextlib
import logging
from collections.abc import Callable, Sequence

from engine.counters import Counters
from engine.jobs import FetchJob
from engine.link import FetchStream, KVClient, Links
from engine.pins import Hbm, RegionPin
from kvstore.client import LandedBlock
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.outcome import Outcome

_log = logging.getLogger(__name__)

# A fetch that was taken back is noticed at least this often.
_LANDED_TIMEOUT_S = 0.1
# So many blocks are copied before the step loop, which may wait for them, is told, and their slots are released.
_COPY_BLOCKS = 32


class Fetcher:
    """`progressed` is called whenever blocks of a fetch have landed, `fetched` once at its end."""

    def __init__(
        self,
        hbm: Hbm,
        pins: RegionPin,
        progressed: Callable[[], None],
        fetched: Callable[[FetchJob], None],
        counters: Counters,
        faults: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._hbm = hbm
        self._pins = pins
        self._progressed = progressed
        self._fetched = fetched
        self._counters = counters
        self._faults = faults
        self._clock = clock

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
            for start in range(0, len(blocks), _COPY_BLOCKS):
                part = blocks[start : start + _COPY_BLOCKS]
                self._copy_all(job, part, stream)
                stream.release_blocks([block.index for block in part])
                self._progressed()
            if not blocks and stream.done:
                job.outcome = Outcome.MISS
                return

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
