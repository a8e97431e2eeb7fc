"""Moves in a session's think time: out of RAM after its turn where RAM is short, and back before it returns.

    turn ends ──► RAM is short, and the pause will be long ──► its blocks go first
              └─► its return is predicted, or asked for ─────► loaded, head first, S3 and SSD ─► RAM
    used in time: useful      not used until the latest moment, or evicted before: wasted

No more than `in_flight` bytes are being loaded so, and no more than a share of RAM holds what nobody has used yet.
While an engine waits for blocks nothing new is begun; where a load finds no slot all of them are taken back.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.config import PrefetchConfig
from kvstore.core.counts import Counts
from kvstore.core.index import Ids
from kvstore.core.outcome import Outcome, TierKind
from kvstore.session_record import SessionKey
from kvstore.store.catalog import Catalog
from kvstore.store.loader import Loader
from kvstore.store.room import Room
from kvstore.store.session import Session
from policies.base import Hint
from policies.prefetch import Returns
from tiers.ram import RamTier

_MAX_JOBS = 4096
# So long after it was asked for, what nobody has used is not waited for any more.
_ASKED_HOLD_S = 120.0
# After loads found no slots, nothing is tried for so long.
_PAUSE_S = 1.0
# A pause of less is not worth a move.
_MIN_PAUSE_S = 10.0


@dataclass(slots=True, eq=False)
class _Job:
    """One session's return. `waiting` are to be loaded, head first; `held` are in RAM and not used yet."""

    key: SessionKey
    begin_s: float
    until_s: float
    blocks: Ids
    waiting: list[int] = field(default_factory=list)
    loading: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    has_begun: bool = False


class Prefetch:
    """Owned by the control thread."""

    def __init__(
        self,
        config: PrefetchConfig,
        catalog: Catalog,
        ram: RamTier,
        room: Room,
        loader: Loader,
        is_awaited: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """`is_awaited` says whether an engine waits for blocks now."""
        self._config = config
        self._catalog = catalog
        self._ram = ram
        self._room = room
        self._loader = loader
        self._is_awaited = is_awaited
        self._clock = clock
        self._returns = Returns()
        self._jobs: OrderedDict[SessionKey, _Job] = OrderedDict()
        # For whom a block was brought, or is being brought, into RAM.
        self._job_of: dict[int, _Job] = {}
        self._bytes_loading = self._bytes_held = 0
        self._not_before = 0.0
        self._counts = Counts()

    @property
    def is_busy(self) -> bool:
        return any(job.has_begun and (job.waiting or job.loading) for job in self._jobs.values())

    # ------------------------------------------------------------ what happens to sessions

    def began(self, session: Session) -> None:
        """Somebody has asked for the session: its next turn begins, and with it ends what was in store for it."""
        self._returns.began(session.key, self._clock())
        job = self._jobs.get(session.key)
        if job is not None and not job.has_begun:
            del self._jobs[session.key]

    def ended(self, session: Session, hint: Hint) -> None:
        """A turn was recorded; `hint` is what the client said will become of the session."""
        now = self._clock()
        self._end(session.key)
        expected = self._returns.ended(session.key, now)
        if not self._config.enabled or expected is None or hint.returns is False:
            return
        self._counts.add("predicted")
        if expected.earliest_s >= _MIN_PAUSE_S and hint == Hint() and not session.pinned and self._is_ram_short():
            self._counts.add("demoted_early")
            self._room.policies[TierKind.RAM].on_hint(session.blocks, Hint(returns=False))
        hold_s = min(expected.latest_s, expected.earliest_s + self._config.max_hold_s)
        self._plan(session, now + expected.earliest_s, now + hold_s)

    def asked(self, session: Session) -> int:
        """Somebody says that the session is about to go on; return how many of its blocks are to be loaded."""
        now = self._clock()
        until_s = now + min(_ASKED_HOLD_S, self._config.max_hold_s)
        self._counts.add("asked")
        job = self._jobs.get(session.key)
        if job is not None and job.has_begun and np.array_equal(job.blocks, session.blocks):
            # It was foreseen, or is asked for again (a user types on): what came, or is on its way, stays.
            job.until_s = max(job.until_s, until_s)
            job.waiting = [block for block in self._missing(job.blocks) if block not in job.loading]
            return len(job.waiting) + len(job.loading)
        self._end(session.key)
        return len(self._plan(session, now, until_s).waiting)

    def changed(self, session: Session) -> None:
        """It may have other blocks now; one that was only pinned or unpinned has not."""
        job = self._jobs.get(session.key)
        if job is not None and not np.array_equal(job.blocks, session.blocks):
            self._end(session.key)

    def removed(self, session: Session) -> None:
        self._end(session.key)
        self._returns.forget(session.key)

    # ------------------------------------------------------------ what happens to blocks

    def used(self, blocks: Sequence[int]) -> None:
        """An engine got these."""
        if not self._job_of:
            return
        for block in blocks:
            job = self._job_of.get(block)
            if job is not None and block in job.held:
                self._let_go(job, block, "useful_blocks")

    def late(self, blocks: Sequence[int]) -> None:
        """An engine waits for these: what of them is still being loaded is loaded for it."""
        if not self._job_of:
            return
        for block in blocks:
            job = self._job_of.get(block)
            if job is not None and block in job.loading:
                self._loader.forget(block, self._loaded)
                self._counts.add("late_blocks")
                self._not_loaded(job, block)

    def left_ram(self, block: int) -> None:
        """The block was evicted; it may be on its way into RAM again, but not for us."""
        job = self._job_of.get(block)
        if job is not None and block in job.held:
            self._let_go(job, block, "wasted_blocks")

    # ------------------------------------------------------------ the control loop

    def pump(self, now: float) -> None:
        """Begin what is due and has room, end what was not used in time."""
        for job in [job for job in self._jobs.values() if job.until_s <= now]:
            self._end(job.key)
        if self._loader.is_starved and self._bytes_loading:
            self._take_back()
            self._not_before = now + _PAUSE_S
        if now < self._not_before or self._is_awaited():
            return
        for job in [job for job in self._jobs.values() if job.begin_s <= now]:
            if not job.has_begun:
                self._begin(job)
            while job.waiting and self._has_room(job.waiting[0]):
                self._load(job, job.waiting.pop(0))

    def snapshot(self) -> dict[str, object]:
        """Return the section `prefetch` of the statistics."""
        counts = dict.fromkeys(_COUNTS, 0) | self._counts.snapshot()
        return {**counts, "loading_bytes": self._bytes_loading, "held_bytes": self._bytes_held}

    # ------------------------------------------------------------ private

    def _plan(self, session: Session, begin_s: float, until_s: float) -> _Job:
        if len(self._jobs) >= _MAX_JOBS:
            self._end(next(iter(self._jobs)))
        job = _Job(session.key, begin_s, until_s, session.blocks)
        job.waiting = self._missing(session.blocks)
        self._jobs[session.key] = job
        return job

    def _missing(self, blocks: Ids) -> list[int]:
        """Return the blocks that are not in RAM, up to the first that is nowhere."""
        missing = []
        for block, residency in zip(blocks.tolist(), self._catalog.residency_of(blocks).tolist(), strict=True):
            if not residency:
                break
            if not self._catalog.resident(block, TierKind.RAM):
                missing.append(block)
        return missing

    def _begin(self, job: _Job) -> None:
        job.has_begun = True
        job.waiting = self._missing(job.blocks)
        # What is in RAM already is to stay there until the session is back.
        self._room.policies[TierKind.RAM].on_hint(job.blocks, Hint(returns=True))

    def _load(self, job: _Job, block: int) -> None:
        if block in self._job_of or self._catalog.resident(block, TierKind.RAM):
            return
        # Counted first: the loader may answer at once.
        job.loading.add(block)
        self._job_of[block] = job
        self._bytes_loading += self._catalog.size_bytes(block)
        outcome = self._loader.load(block, self._loaded)
        if outcome == Outcome.OK:
            self._counts.add("begun_blocks")
        else:
            self._not_loaded(job, block)

    def _loaded(self, block: int, outcome: Outcome, _: TierKind) -> None:
        job = self._job_of.get(block)
        if job is None or block not in job.loading:
            return
        if outcome != Outcome.OK:
            self._counts.add("failed_blocks")
            self._not_loaded(job, block)
            job.waiting.clear()  # what follows is of no use without it
            return
        self._bytes_loading -= self._catalog.size_bytes(block)
        job.loading.discard(block)
        job.held.add(block)
        self._bytes_held += self._catalog.size_bytes(block)
        self._room.policies[TierKind.RAM].on_hint(np.array([block], dtype=np.int32), Hint(returns=True))
        if not job.waiting and not job.loading:
            self._counts.add("ready_sessions")

    def _not_loaded(self, job: _Job, block: int) -> None:
        job.loading.discard(block)
        del self._job_of[block]
        self._bytes_loading -= self._catalog.size_bytes(block)

    def _let_go(self, job: _Job, block: int, count: str) -> None:
        job.held.discard(block)
        del self._job_of[block]
        self._bytes_held -= self._catalog.size_bytes(block)
        self._counts.add(count)

    def _end(self, key: SessionKey) -> None:
        """What was loaded and not used goes first."""
        job = self._jobs.pop(key, None)
        if job is None:
            return
        self._cancel(job)
        if job.held:
            unused = np.array([block for block in job.blocks.tolist() if block in job.held], dtype=np.int32)
            for block in unused.tolist():
                self._let_go(job, block, "wasted_blocks")
            self._room.policies[TierKind.RAM].on_hint(unused, Hint(returns=False))

    def _cancel(self, job: _Job) -> None:
        """Take back what is not loaded yet; what is being read lands for nobody."""
        job.waiting.clear()
        for block in list(job.loading):
            self._loader.forget(block, self._loaded)
            self._counts.add("cancelled_blocks")
            self._not_loaded(job, block)

    def _take_back(self) -> None:
        for job in self._jobs.values():
            if job.loading:
                left = [*job.loading, *job.waiting]
                self._cancel(job)
                job.waiting = [block for block in job.blocks.tolist() if block in set(left)]
        self._loader.drop_unwanted()

    def _has_room(self, block: int) -> bool:
        size_bytes = self._catalog.size_bytes(block)
        capacity_bytes = self._ram.usage().capacity_bytes or 0
        held_bytes = self._bytes_loading + self._bytes_held + size_bytes
        is_within = self._bytes_loading + size_bytes <= max(self._config.in_flight_bytes, size_bytes)
        return is_within and held_bytes <= self._config.ram_share * capacity_bytes

    def _is_ram_short(self) -> bool:
        usage = self._ram.usage()
        return usage.used_bytes >= self._config.short_above * (usage.capacity_bytes or 0)


_COUNTS = (
    "predicted",
    "asked",
    "demoted_early",
    "begun_blocks",
    "ready_sessions",
    "useful_blocks",
    "late_blocks",
    "wasted_blocks",
    "cancelled_blocks",
    "failed_blocks",
)
