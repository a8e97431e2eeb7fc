"""Offers blocks that a step has completed: ask for slots, copy, seal, commit; again where there is no room yet."""

import logging
from collections.abc import Callable, Sequence

from kvstore.client import Client, GrantedBlock
from kvstore.connectors.vllm_parts.fence import Fence
from kvstore.connectors.vllm_parts.gate import Gate
from kvstore.connectors.vllm_parts.jobs import StoreJob
from kvstore.connectors.vllm_parts.pages import Pages
from kvstore.connectors.vllm_parts.seal import SEAL_BYTES, seal
from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.outcome import Outcome
from kvstore.region_pin import RegionPin

_log = logging.getLogger("vllm.kvstore")

# Slots that are granted at once are kept from others until they are filled.
_BATCH_BLOCKS = 64
# What a step may have to wait for where it needs one of their places.
_COPY_BLOCKS = 8
_TRIES = 6
_MIN_RETRY_S, _MAX_RETRY_S = 0.01, 0.25
# There already, or being written by somebody, or nothing that another attempt would change.
_WORTH_ANOTHER_TRY = (Outcome.BUSY, Outcome.STALE)
_THERE = (Outcome.OK, Outcome.EXISTS, Outcome.PENDING)


class Storer:
    """Belongs to one thread. `sleep` waits between tries."""

    def __init__(
        self,
        pages: Pages,
        pins: RegionPin,
        fence: Fence,
        gate: Gate,
        counters: Counters,
        sleep: Callable[[float], None],
    ) -> None:
        self._pages = pages
        self._pins = pins
        self._fence = fence
        self._gate = gate
        self._counters = counters
        self._sleep = sleep
        self.hurry = False

    def run(self, job: StoreJob, client: Client) -> None:
        """Store what can be stored of the job; never raises. Afterwards nothing of it is to be read any more."""
        try:
            self._store(job, client)
        except (TierUnavailable, ProtocolError) as error:
            self._gate.failed(error)
            self._leave_out(job, "unavailable" if isinstance(error, TierUnavailable) else "refused")
        except Exception:
            _log.exception("kvstore: a store failed")
            self._counters.add("faults", "store")
            self._leave_out(job, "fault")
        finally:
            for read in job.reads:
                self._fence.end(read)

    def _store(self, job: StoreJob, client: Client) -> None:
        tries = 0
        while job.num_settled < len(job.keys):
            if not self._gate.is_open:
                self._leave_out(job, "unavailable")
                return
            first = job.num_settled
            outcomes, retry_s = self._offer(job, slice(first, first + _BATCH_BLOCKS), client)
            self._gate.passed()
            settled = next((i for i, each in enumerate(outcomes) if each in _WORTH_ANOTHER_TRY), len(outcomes))
            for i, outcome in enumerate(outcomes[:settled]):
                self._counters.add("stored_blocks", outcome.label)
                if outcome not in (*_THERE, Outcome.CANCELLED):
                    job.left_out(first + i)
            job.num_settled += settled
            if settled == len(outcomes):
                tries = 0
                continue
            tries += 1
            if tries >= _TRIES or self.hurry:
                self._leave_out(job, "busy")
                return
            self._sleep(min(max(retry_s, _MIN_RETRY_S), _MAX_RETRY_S))

    def _offer(self, job: StoreJob, part: slice, client: Client) -> tuple[list[Outcome], float]:
        keys = job.keys[part]
        parent = job.keys[part.start - 1] if part.start else job.parent
        tokens = job.order.tokens_of(part.start, part.stop)
        self._pins.ensure(client.region)
        grant = client.store(keys, parent, job.order.depth + part.start, tokens=tokens)
        outcomes = [block.outcome for block in grant.blocks]
        granted = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        if granted:
            written = []
            for some in range(0, len(granted), _COPY_BLOCKS):
                chosen = granted[some : some + _COPY_BLOCKS]
                written += self._copy(job, [part.start + i for i in chosen], [grant.blocks[i] for i in chosen])
            generations = [grant.blocks[i].generation for i in granted]
            committed = client.commit([keys[i] for i in granted], generations, written)
            for i, done, outcome in zip(granted, written, committed, strict=True):
                # Not written: its place in the KV cache was needed first.
                outcomes[i] = outcome if done else Outcome.CANCELLED
        return outcomes, grant.retry_s

    def _copy(self, job: StoreJob, indexes: Sequence[int], granted: Sequence[GrantedBlock]) -> list[bool]:
        """Say of each block whether it is in its slot; never raises, since then the grants must be given back."""
        views = {
            index: block.view
            for index, block in zip(indexes, granted, strict=True)
            if block.view is not None and self._fence.begin(job.reads[index])
        }
        bodies = [view[: view.nbytes - SEAL_BYTES] for view in views.values()]
        is_copied = not views
        try:
            if views:
                with self._pins.copying(bodies[0]) as may_copy:
                    if may_copy:
                        self._pages.gather([job.order.block_ids[index] for index in views], bodies, job.mark)
                    is_copied = may_copy
        except Exception:
            _log.exception("kvstore: blocks could not be copied out of the KV cache")
            self._counters.add("faults", "store_copy")
        finally:
            for index in views:
                self._fence.end(job.reads[index])
        if not is_copied:
            return [False] * len(indexes)
        for index, view in views.items():
            seal(view, job.keys[index])
            self._counters.add("stored_bytes", count=view.nbytes)
        return [index in views for index in indexes]

    def _leave_out(self, job: StoreJob, why: str) -> None:
        left: Sequence[int] = range(job.num_settled, len(job.keys))
        if left:
            job.left_out(job.num_settled)
            self._counters.add("unstored_blocks", why, len(left))
