"""Bringing blocks into HBM: copy them as they land, check each after its copy, and give up in time."""

import contextlib
import logging
from collections.abc import Callable

from engine.counters import Counters
from engine.jobs import FetchJob
from engine.link import FetchStream, KVClient, Links
from engine.pins import Hbm, RegionPin
from kvstore.client import LandedBlock
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.outcome import Outcome, TierKind

_log = logging.getLogger(__name__)

# A cancelled fetch is noticed at least this often.
_LANDED_TIMEOUT_S = 0.1


class Fetcher:
    def __init__(
        self,
        hbm: Hbm,
        pins: RegionPin,
        fetched: Callable[[FetchJob], None],
        counters: Counters,
        faults: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._hbm = hbm
        self._pins = pins
        self._fetched = fetched
        self._counters = counters
        self._faults = faults
        self._clock = clock

    def run(self, job: FetchJob, links: Links) -> None:
        """Do the job and report it, unless the step loop has taken it back."""
        if not job.claim():
            return
        # Left after the report: leaving a stream of a silent daemon takes a while, which the request must not wait for.
        with contextlib.ExitStack() as streams:
            try:
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
                self._counters.add("fetched_blocks", job.landed)
                self._fetched(job)

    def _fetch(self, job: FetchJob, client: KVClient, streams: contextlib.ExitStack) -> None:
        began_s = self._clock()
        wait_s = job.give_up_at_s[-1] - began_s
        if wait_s <= 0:
            job.outcome = Outcome.TIMED_OUT
            return
        stream = streams.enter_context(client.fetch(job.keys, deadline_s=wait_s))
        self._pins.ensure(client.region)
        self._take_in(job, stream, began_s)

    def _take_in(self, job: FetchJob, stream: FetchStream, began_s: float) -> None:
        """Copy blocks as they land, in any order, until all are there, one fails, or patience ends."""
        sources: list[TierKind | None] = [None] * len(job.keys)
        loads: dict[TierKind, tuple[int, float]] = {}
        # Blocks from `limit` on are of no use: they hang on one that failed.
        limit = len(job.keys)
        while job.landed < limit:
            wait_s = job.give_up_at_s[job.landed] - self._clock()
            if job.cancelled or wait_s <= 0:
                job.outcome = Outcome.CANCELLED if job.cancelled else Outcome.TIMED_OUT
                break
            blocks = stream.landed(min(wait_s, _LANDED_TIMEOUT_S))
            for block in blocks:
                if block.index >= limit or sources[block.index] is not None:
                    continue
                outcome = self._copy(job, block, stream)
                if outcome is not Outcome.OK:
                    limit, job.outcome = block.index, outcome
                    continue
                sources[block.index] = block.source
                num_bytes = len(block.view) if block.view is not None else 0
                before, _ = loads.get(block.source, (0, 0.0))
                loads[block.source] = before + num_bytes, self._clock() - began_s
            if blocks:
                stream.release_blocks([block.index for block in blocks])
            while job.landed < limit and (source := sources[job.landed]) is not None:
                job.sources.append(source)
                job.landed += 1
            if not blocks and stream.done and job.landed < limit:
                job.outcome = Outcome.MISS
                break
        job.loads = [(tier, num_bytes, seconds) for tier, (num_bytes, seconds) in loads.items()]
        if job.outcome is Outcome.TIMED_OUT:
            self._note_silence(job, self._clock() - began_s)

    def _copy(self, job: FetchJob, block: LandedBlock, stream: FetchStream) -> Outcome:
        if block.outcome is not Outcome.OK or block.view is None:
            return block.outcome if block.outcome is not Outcome.OK else Outcome.REJECTED
        with self._pins.copying(block.view) as may_copy:
            if may_copy:
                self._hbm.scatter(block.view, job.pool_blocks[block.index])
        if not may_copy or not stream.still_valid(block):
            self._faults.add("stale_slot")
            return Outcome.STALE
        return Outcome.OK

    def _note_silence(self, job: FetchJob, seconds: float) -> None:
        """Let the tier that was waited for in vain count as at least so slow, else the next request waits as well."""
        tier = job.expected[job.landed]
        missing = sum(kind is tier for kind in job.expected[job.landed :])
        job.loads.append((tier, missing * job.block_bytes, seconds))
