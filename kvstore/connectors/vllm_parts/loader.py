"""Brings the blocks of one order into the KV cache as they land: copy, test the checksum, look whether the slot is
still that block's.

Whoever claimed a job writes blocks until it reports the end, and never afterwards: so once vLLM hears of the end, of a
failed load too, nobody writes into the request's blocks any more and they may be given to others.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence

from kvstore.client import Client, FetchStream, LandedBlock
from kvstore.connectors.vllm_parts.gate import Gate
from kvstore.connectors.vllm_parts.jobs import LoadJob, LoadMeter
from kvstore.connectors.vllm_parts.pages import Pages
from kvstore.connectors.vllm_parts.seal import SEAL_BYTES, is_whole
from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.outcome import Outcome, TierKind
from kvstore.region_pin import RegionPin

_log = logging.getLogger("vllm.kvstore")

# So many blocks are copied before their slots are given back.
_COPY_BLOCKS = 32
_LOOK_EVERY_S = 0.1


class Loader:
    """Any thread may use it, each for another job. `ended(job, why, client)` is told once per claimed job."""

    def __init__(
        self,
        pages: Pages,
        pins: RegionPin,
        gate: Gate,
        meter: LoadMeter,
        counters: Counters,
        *,
        verify: bool,
        clock: Callable[[], float],
    ) -> None:
        self._pages = pages
        self._pins = pins
        self._gate = gate
        self._meter = meter
        self._counters = counters
        self._verify = verify
        self._clock = clock

    def run(self, job: LoadJob, client: Client, ended: Callable[[str], None]) -> None:
        """Load what can be loaded of a claimed job, then call `ended` with how it went; never raises."""
        # Left after the report: leaving the stream of a silent daemon takes a while.
        with contextlib.ExitStack() as streams:
            why = "fault"
            try:
                why = self._load(job, client, streams)
            except (TierUnavailable, ProtocolError) as error:
                self._gate.failed(error)
                why = "unavailable" if isinstance(error, TierUnavailable) else "refused"
            except Exception:
                _log.exception("kvstore: a load failed")
                self._counters.add("faults", "load")
            finally:
                ended(why)

    def _load(self, job: LoadJob, client: Client, streams: contextlib.ExitStack) -> str:
        wait_s = job.deadline_s - self._clock()
        if wait_s <= 0:
            return "timed_out"
        if not self._gate.is_open:
            return "unavailable"
        stream = streams.enter_context(client.fetch(job.keys, deadline_s=wait_s))
        self._pins.ensure(client.region)
        return self._take_in(job, stream)

    def _take_in(self, job: LoadJob, stream: FetchStream) -> str:
        last_s = self._clock()
        num_open = len(job.keys)
        while num_open:
            now = self._clock()
            if now >= job.deadline_s:
                return "timed_out"
            if now >= last_s + job.order.silence_s:
                return "silent"
            until_s = min(job.deadline_s, last_s + job.order.silence_s)
            blocks = stream.landed(min(until_s - now, _LOOK_EVERY_S))
            if not blocks:
                if stream.done:
                    return "missing"
                continue
            self._gate.passed()
            last_s = self._clock()
            for start in range(0, len(blocks), _COPY_BLOCKS):
                part = blocks[start : start + _COPY_BLOCKS]
                damaged = self._copy_all(job, part, stream)
                stream.release_blocks([block.index for block in part])
                if damaged:
                    # Else they would be found again, fail again, and be in the way of the good ones.
                    stream.damaged(damaged)
            num_open -= len(blocks)
        return "loaded" if not job.num_missing else "partly"

    def _copy_all(self, job: LoadJob, blocks: Sequence[LandedBlock], stream: FetchStream) -> list[LandedBlock]:
        """Return the blocks that are not what was stored."""
        size = self._pages.payload_bytes
        there: list[LandedBlock] = []
        damaged: list[LandedBlock] = []
        for block in blocks:
            if not 0 <= block.index < len(job.keys) or job.is_loaded[block.index]:
                continue
            if block.outcome is Outcome.OK and block.view is not None and block.view.nbytes == size:
                there.append(block)
            else:
                why = Outcome.REJECTED if block.outcome is Outcome.OK else block.outcome
                self._counters.add("failed_blocks", why.label)
        may_copy = self._copy(job, there)
        for block in there:
            outcome = self._test(job, block, stream) if may_copy else Outcome.STALE
            if outcome is Outcome.OK:
                self._landed(job, block)
            else:
                self._counters.add("failed_blocks", outcome.label)
            if outcome is Outcome.CORRUPT:
                damaged.append(block)
        return damaged

    def _copy(self, job: LoadJob, blocks: Sequence[LandedBlock]) -> bool:
        """Whether the blocks were copied: not from a region on its way out."""
        bodies = [block.view[:-SEAL_BYTES] for block in blocks if block.view is not None]
        if not bodies:
            return True
        with self._pins.copying(bodies[0]) as may_copy:
            if may_copy:
                self._pages.scatter(bodies, [job.order.block_ids[block.index] for block in blocks], job.mark)
        return may_copy

    def _test(self, job: LoadJob, block: LandedBlock, stream: FetchStream) -> Outcome:
        assert block.view is not None
        is_sound = not self._verify or is_whole(block.view, job.keys[block.index])
        # Asked last: only then do copy and checksum speak of the same bytes.
        if not stream.still_valid(block):
            return Outcome.STALE
        return Outcome.OK if is_sound else Outcome.CORRUPT

    def _landed(self, job: LoadJob, block: LandedBlock) -> None:
        job.is_loaded[block.index] = True
        tier = int(block.source)
        job.by_tier[tier] = job.by_tier.get(tier, 0) + 1
        self._meter.landed(tier, self._pages.payload_bytes, self._clock())
        label = TierKind(tier).label
        self._counters.add("loaded_blocks", label)
        self._counters.add("loaded_bytes", label, self._pages.payload_bytes)
