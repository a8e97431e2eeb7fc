"""Offering new blocks to kvstore: ask for slots, copy, commit, and try again for a while where there is no room."""

import logging
from collections.abc import Callable, Sequence

from engine.counters import Counters
from engine.jobs import StoreJob
from engine.link import KVClient, Links
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.outcome import Outcome
from kvstore.region_pin import Hbm, RegionPin

_log = logging.getLogger(__name__)

_STORE_TRIES = 8
_MIN_RETRY_S, _MAX_RETRY_S = 0.01, 0.5
# After these outcomes of a store no further attempt is needed: the block is there, or somebody is writing it.
_SETTLED = (Outcome.OK, Outcome.EXISTS, Outcome.PENDING)
# No room for now; or the daemon was started anew between grant and commit.
_WORTH_ANOTHER_TRY = (Outcome.BUSY, Outcome.STALE)


class Storer:
    def __init__(
        self,
        hbm: Hbm,
        pins: RegionPin,
        stored: Callable[[StoreJob], None],
        counters: Counters,
        faults: Counters,
        sleep: Callable[[float], None],
    ) -> None:
        self._hbm = hbm
        self._pins = pins
        self._stored = stored
        self._counters = counters
        self._faults = faults
        self._sleep = sleep
        self.hurry = False

    def run(self, job: StoreJob, links: Links) -> None:
        """Do the job and report it."""
        try:
            self._store(job, links.client(job.tenant))
        except TierUnavailable:
            self._counters.add("store_unavailable_blocks", len(job.keys) - job.num_stored)
        except ProtocolError as error:
            self._faults.add(f"store_refused_{error.code}")
        except Exception:
            # The root of every job: whatever happened, it is reported, or HBM would be held for ever.
            _log.exception("a store failed")
            self._faults.add("store_fault")
        finally:
            self._stored(job)

    def _store(self, job: StoreJob, client: KVClient) -> None:
        """Offer the blocks in prefix order until all are settled; from the first that must wait on, try again later."""
        for _ in range(1 if self.hurry else _STORE_TRIES):
            outcomes, retry_s = self._offer_rest(job, client)
            settled = next((i for i, outcome in enumerate(outcomes) if outcome not in _SETTLED), len(outcomes))
            self._count(outcomes[:settled])
            job.num_stored += settled
            if settled == len(outcomes):
                return
            if outcomes[settled] not in _WORTH_ANOTHER_TRY:
                self._count(outcomes[settled:])
                return
            self._sleep(min(max(retry_s, _MIN_RETRY_S), _MAX_RETRY_S))
        self._counters.add("store_gave_up_blocks", len(job.keys) - job.num_stored)

    def _offer_rest(self, job: StoreJob, client: KVClient) -> tuple[list[Outcome], float]:
        """Ask for slots for what is not settled yet, fill and commit them; return the outcomes and when to retry."""
        first = job.num_stored
        keys, groups = job.keys[first:], job.pool_blocks[first:]
        self._pins.ensure(client.region)
        grant = client.store(keys, job.keys[first - 1] if first else job.parent, job.depth + first)
        outcomes = [block.outcome for block in grant.blocks]
        granted = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        if granted:
            written = [self._copy(groups[i], grant.blocks[i].view) for i in granted]
            generations = [grant.blocks[i].generation for i in granted]
            committed = client.commit([keys[i] for i in granted], generations, written)
            for i, done, outcome in zip(granted, written, committed, strict=True):
                outcomes[i] = outcome if done else Outcome.UNAVAILABLE
        return outcomes, grant.retry_s

    def _copy(self, pool_blocks: Sequence[int], view: memoryview | None) -> bool:
        """Return whether the block's bytes are all in `view`; never raises, since then the grant must be given back."""
        if view is None:
            return False
        try:
            with self._pins.copying(view) as may_copy:
                if may_copy:
                    self._hbm.gather(pool_blocks, view)
        except Exception:
            # Of the device anything may be raised; a grant that is neither committed nor given back blocks its block.
            _log.exception("a block could not be copied out of HBM")
            self._faults.add("store_copy_fault")
            return False
        return may_copy

    def _count(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in set(outcomes):
            self._counters.add(f"store_{outcome.label}_blocks", outcomes.count(outcome))
