"""The store: everything the daemon does, behind one method per kind of request.

Covers: what each request means, and the turn of the control loop (`turn`). Does not cover: sockets and messages'
framing (daemon.py). One owner thread; a request is answered through `reply`, at once or in a later turn.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable

from kvstore import wire
from kvstore.config import Config
from kvstore.core.counts import Counts
from kvstore.core.errors import ProtocolError
from kvstore.core.key import KEY_BYTES, BlockKey, split_keys
from kvstore.core.outcome import Outcome, TierKind
from kvstore.store.admitting import make_admitting
from kvstore.store.announcing import Announcing, Outlet
from kvstore.store.borrowed import Borrowed
from kvstore.store.bucket_known import BucketKnown
from kvstore.store.catalog import Catalog
from kvstore.store.census import SessionCensus
from kvstore.store.damage import drop_damaged
from kvstore.store.decisions import Decisions
from kvstore.store.demoter import Demoter
from kvstore.store.discovery import Discovery
from kvstore.store.engines import Engine, EngineTable
from kvstore.store.evict import Eviction, check_order
from kvstore.store.fetch import MAX_FETCHES, Fetches, Reply
from kvstore.store.grants import Grants
from kvstore.store.keeping import Keeping, make_pins
from kvstore.store.lease import MAX_LEASES, LeaseTable
from kvstore.store.link import WorkerLink
from kvstore.store.loader import Loader
from kvstore.store.prefetch import Prefetch
from kvstore.store.recording import Recording
from kvstore.store.recovery import Recovery
from kvstore.store.room import Room
from kvstore.store.session import SessionTable
from kvstore.store.session_requests import SessionRequests
from kvstore.store.snapshot import error_counts, ram_stats, slow_tier_stats
from kvstore.store.stats import RequestStats
from kvstore.store.unclaimed import Unclaimed
from kvstore.store.verification import Verification
from kvstore.store.writing import Writing
from kvstore.version import VERSION
from kvstore.wire import ErrorCode
from tiers.ram import RamTier

_log = logging.getLogger(__name__)
_LIVENESS_EVERY_S = 0.5
_HOUSEKEEPING_EVERY_S = 0.1
_EXPIRY_EVERY_S = 5.0
_BUSY_RETRY_S = 0.05
# Of RAM: what the last requests stored and no other tier takes, until their sessions are recorded.
_UNCLAIMED_SHARE = 0.125
# So many blocks before anything has to grow, which takes the control thread about 0.2 s; unused rows take no memory.
_CAPACITY = 1 << 20
# About 30 ms of the control thread.
MAX_BLOCKS_PER_STORE = 1024


class Store:
    """See the module. `links` has the slow tiers that are configured; RAM is always there."""

    def __init__(
        self,
        config: Config,
        epoch: int,
        ram: RamTier,
        links: dict[TierKind, WorkerLink],
        engines: EngineTable,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._epoch = epoch
        self._ram = ram
        self._links = links
        self._engines = engines
        self._clock = clock
        self._started_at = clock()
        self._errors = Counts()
        self._refused = Counts()
        self._requests = RequestStats()
        self.decisions = Decisions(wall_clock)
        self._blocks_stored = 0
        self._ram_bytes_in = self._ram_bytes_out = 0
        self._demoters: dict[TierKind, Demoter] = {}
        self._catalog = catalog = Catalog(self._on_removed, _CAPACITY)
        self._admitting = make_admitting(catalog, config, links, clock)
        ram_bytes = ram.usage().capacity_bytes or 0
        unclaimed = Unclaimed(int(_UNCLAIMED_SHARE * ram_bytes), catalog.size_bytes, clock)
        self._writing = Writing(
            catalog, self._demoters, self._admitting, unclaimed, uploads_all=config.s3.write == "all"
        )
        pins = make_pins(catalog, config, ram_bytes)
        self._room = Room(
            catalog,
            ram,
            links,
            self._writing.is_awaited,
            clock,
            ram_policy=config.ram.policy,
            ssd_policy=config.ssd.policy,
            is_pinned=pins.holds,
            give_up=self._writing.give_up,
        )
        self._loader = Loader(catalog, ram, links, self._room, self._on_loaded, self._on_lost)
        self._prefetch = Prefetch(
            config.prefetch, catalog, ram, self._room, self._loader, lambda: len(self._fetches) > 0, clock
        )
        self._room.on_left_ram = self._prefetch.left_ram
        self.keeping = Keeping(catalog, self._room, pins, self._prefetch, config.sessions.pin_for_s, clock)
        self._grants = Grants(catalog, ram, self._room)
        self._leases = LeaseTable(catalog)
        self._fetches = Fetches(catalog, ram, self._loader, self._leases)
        self._known = BucketKnown(catalog, clock)
        self._borrowed = Borrowed()
        self._discovery: Discovery | None = None
        if TierKind.S3 in links and config.s3.discover:
            self._discovery = Discovery(catalog, links[TierKind.S3], self._borrowed, clock)
        for tier, link in links.items():
            existing = self._borrowed.add if tier == TierKind.S3 else _nothing
            stored = _nothing if tier == TierKind.S3 else self._stored_on_ssd
            self._demoters[tier] = Demoter(
                tier, catalog, ram, link, self._room, self._loader, self._errors.add, clock, existing, stored
            )
        self.recording: Recording | None = None
        self._announcing: Announcing | None = None
        self._room.on_evicted = self._writing.evicted
        self._session_table = SessionTable(
            catalog,
            ttl_s=config.sessions.ttl_s,
            max_sessions=config.sessions.max_sessions,
            max_tokens=config.sessions.max_tokens_per_session,
            wall_clock=wall_clock,
            on_adopted=self.keeping.adopted,
            on_removed=self.keeping.removed,
        )
        self._census = SessionCensus(self._session_table)
        self.sessions = SessionRequests(
            self._session_table,
            catalog,
            links,
            self._demoters,
            self._room,
            self._borrowed,
            self._errors.add,
            clock,
            self.keeping,
        )
        if TierKind.S3 in links:
            links[TierKind.S3].on_tombstones = self.sessions.buried
        self._verification = Verification(catalog, links, self._on_found_corrupt)
        self._next_liveness = self._next_housekeeping = self._next_expiry = 0.0
        self.recovery = Recovery(
            links.get(TierKind.SSD),
            catalog,
            self._session_table,
            self.sessions,
            self._room,
            self._writing,
            lambda block: self._on_lost(block, TierKind.SSD, Outcome.MISS),
            self._errors.add,
            ssd_policy=config.ssd.policy,
        )

    def announce(self, outlet: Outlet, wall_clock: Callable[[], float] = time.time) -> None:
        """Tell routers, from now on, which blocks are in which tier. To be called once, before anything is stored."""
        budget_bytes = self._config.events.token_memory_bytes
        self._announcing = Announcing(self._catalog, outlet, budget_bytes, self._clock, wall_clock)
        self._catalog.watcher = self._announcing

    # ------------------------------------------------------------ the control loop

    def turn(self) -> None:
        """Do what has become due; called after every batch of messages, unless these began nothing, and at
        `next_deadline` at the latest."""
        now = self._clock()
        self._fetches.expire(now)
        if now >= self._next_liveness:
            self._next_liveness = now + _LIVENESS_EVERY_S
            for engine in self._engines.dead():
                _log.warning("engine %d (%s) is gone; what it held is given back", engine.incarnation, engine.name)
                self._errors.add("engine_died")
                self.detach(engine)
        if now >= self._next_expiry:
            self._next_expiry = now + _EXPIRY_EVERY_S
            self.sessions.expire(now)
            self.keeping.expire(now)
            self._writing.write_down_again()
        if now >= self._next_housekeeping or self._room.is_lowering:
            self._room.keep_below(self._config.ram.high_watermark, self._config.ram.low_watermark)
        if now >= self._next_housekeeping:
            self._next_housekeeping = now + _HOUSEKEEPING_EVERY_S
            self._room.pump(now)
            self.sessions.housekeeping()
            self._census.step()
            self._known.trim()
        self.recovery.look()
        self.sessions.turn(now)
        if self._discovery is not None:
            self._discovery.pump(now)
        self._loader.pump()
        self._prefetch.pump(now)
        for demoter in self._demoters.values():
            demoter.pump(now)
        loading = any(link.is_loading for link in self._links.values())
        for link in self._links.values():
            link.pump(loading)
        self.recovery.review.pump()
        self._fetches.flush()
        if self._announcing is not None and self.recovery.is_done:
            self._announcing.turn(now)

    def next_deadline(self) -> float:
        """When `turn` must be called even if nothing happens."""
        busy = len(self._loader) or any(len(demoter) for demoter in self._demoters.values()) or self.sessions.is_busy
        busy = (
            busy
            or bool(self._discovery)
            or self.recovery.review.is_busy
            or self._room.is_lowering
            or self._prefetch.is_busy
        )
        busy = busy or (self._announcing is not None and self._announcing.is_busy)
        deadlines = [self._clock() + (0.02 if busy else _HOUSEKEEPING_EVERY_S)]
        loads = [link.next_deadline() for link in self._links.values()]
        for deadline in (self._fetches.next_deadline(), self.sessions.next_deadline(), *loads):
            if deadline is not None:
                deadlines.append(deadline)
        return min(deadlines)

    def drain(self) -> None:
        """Nothing new is stored from here on; see `is_drained`."""
        self.sessions.drain()

    def is_drained(self) -> bool:
        """Whether everything that was stored is as far down as it will go: nothing is lost if we stop now."""
        blocks_wait = any(len(demoter) for tier, demoter in self._demoters.items() if self._links[tier].ready)
        return not blocks_wait and not self._loader and not self.sessions.has_work()

    # ------------------------------------------------------------ engines

    def attach(self, request: wire.Attach) -> wire.Attached:
        namespace = self._catalog.namespaces.attach(request.namespace, self._ram.max_slot_bytes)
        engine = self._engines.attach(namespace, request.name[:200], request.liveness_file)
        _log.info("engine %d (%s) attached to %s", engine.incarnation, engine.name, request.namespace.label[:200])
        region = self._ram.region
        tiers = [TierKind.RAM.label, *(tier.label for tier in self._links)]
        wants_tokens = self._announcing is not None and self._announcing.wants_tokens
        return wire.Attached(self._epoch, engine.incarnation, str(region.path), region.data_bytes, tiers, wants_tokens)

    def detach(self, engine: Engine) -> None:
        """End all grants and leases of the engine, which writes and reads no more."""
        self._fetches.release_all(engine.incarnation)
        self._grants.abandon_all(engine)
        self.keeping.detached(engine)
        self._engines.remove(engine)

    # ------------------------------------------------------------ lookup and fetch

    def lookup(self, engine: Engine, request: wire.Lookup) -> wire.Found:
        """Return the answer; once it is out, `asked` is to be told."""
        keys = _checked_keys(request.keys)
        tiers, stopped = self._catalog.lookup(keys, engine.namespace)
        if stopped != Outcome.MISS:
            return wire.Found(tiers, stopped)
        start = len(tiers) * KEY_BYTES
        why = self._catalog.why_missing(BlockKey(keys[start : start + KEY_BYTES]))
        discovery = self._discovery if self._is_request(engine, keys) else None
        s3 = Outcome.MISS if discovery is None else discovery.look(engine.namespace, keys, len(tiers))
        return wire.Found(tiers, stopped, why, s3)

    def asked(self, engine: Engine, request: wire.Lookup, found: wire.Found) -> None:
        """Remember what a lookup teaches; who asked does not wait for this."""
        keys = request.keys
        if not self._is_request(engine, keys):
            return
        self._room.asked(keys, found.tiers)
        self._writing.asked(keys, len(found.tiers))
        if self.recording is not None:
            block_tokens = self._catalog.namespaces[engine.namespace].block_tokens
            self.recording.asked(engine.incarnation, block_tokens, keys)

    def _is_request(self, engine: Engine, keys: bytes) -> bool:
        """Or an engine only looks whether we are here."""
        return keys != self._catalog.namespaces[engine.namespace].root

    def fetch(self, engine: Engine, request: wire.Fetch, reply: Reply) -> None:
        keys = _checked_keys(request.keys)
        if not 0.0 < request.deadline_s <= 600.0:
            raise ProtocolError(ErrorCode.BAD_REQUEST, "deadline_s lies between 0 and 600 seconds")
        if len(self._fetches) >= MAX_FETCHES or len(self._leases) >= MAX_LEASES:
            raise ProtocolError(ErrorCode.BUSY, f"{MAX_FETCHES} fetches are running, or too many were not released")
        now = self._clock()
        touched = self._fetches.begin(keys, engine.namespace, engine.incarnation, now, request.deadline_s, reply)
        self._ram_bytes_out += len(touched) * self._catalog.namespaces[engine.namespace].payload_bytes
        self._room.used(TierKind.RAM, touched)
        self._prefetch.used(touched)
        if len(touched) * KEY_BYTES < len(keys) and self._prefetch.is_busy:
            self._prefetch.late(self._catalog.find_joined(keys, engine.namespace).tolist())
        on_ssd = [block for block in touched if self._catalog.resident(block, TierKind.SSD)]
        self._room.used(TierKind.SSD, on_ssd)
        self._writing.used(keys, touched)

    def release(self, engine: Engine, request: wire.Release) -> None:
        self._errors.add("stale_slot", request.stale)
        self._fetches.release(request.lease, engine.incarnation, request.indexes)

    def damaged(self, engine: Engine, request: wire.Damaged) -> None:
        """As the message says. Raises ProtocolError."""
        keys = _checked_keys(request.keys)
        if request.source not in (TierKind.RAM, TierKind.SSD, TierKind.S3):
            raise ProtocolError(ErrorCode.BAD_REQUEST, f"{request.source} is no tier that blocks come from")
        source = TierKind(request.source)
        dropped = drop_damaged(self._catalog, self._room, self._links, keys, engine.namespace, source)
        self._errors.add("corrupt", dropped)

    # ------------------------------------------------------------ store

    def store(self, engine: Engine, request: wire.Store) -> wire.Granted:
        keys = split_keys(_checked_keys(request.keys))
        if len(keys) > MAX_BLOCKS_PER_STORE or len(request.parent) != KEY_BYTES or not 0 <= request.depth < 1 << 30:
            raise ProtocolError(
                ErrorCode.BAD_REQUEST, f"a store has at most {MAX_BLOCKS_PER_STORE} keys, one parent key and a depth"
            )
        info = self._catalog.namespaces[engine.namespace]
        if request.tokens and len(request.tokens) != 4 * info.block_tokens * len(keys):
            raise ProtocolError(
                ErrorCode.BAD_REQUEST, f"tokens are {info.block_tokens} ids of 4 bytes for each of the keys, or none"
            )
        slots = self._grants.give(engine, keys, BlockKey(request.parent), request.depth)
        if self._announcing is not None and request.tokens:
            self._announcing.learn(keys, request.tokens)
        for slot in slots:
            if slot.outcome not in (Outcome.OK, Outcome.EXISTS):
                self._refused.add(Outcome(slot.outcome).label)
        is_busy = any(slot.outcome == Outcome.BUSY for slot in slots)
        return wire.Granted(slots, _BUSY_RETRY_S if is_busy else 0.0)

    def commit(self, engine: Engine, request: wire.Commit) -> wire.Committed:
        keys = split_keys(_checked_keys(request.keys))
        if not len(keys) == len(request.generations) == len(request.written):
            raise ProtocolError(ErrorCode.BAD_REQUEST, "keys, generations and written differ in length")
        outcomes = bytearray()
        committed = []
        for key, generation, written in zip(keys, request.generations, request.written, strict=True):
            outcome, block = self._grants.commit(engine, key, generation, written)
            outcomes.append(outcome)
            if outcome == Outcome.OK:
                committed.append(block)
        self._blocks_stored += len(committed)
        self._ram_bytes_in += len(committed) * self._catalog.namespaces[engine.namespace].payload_bytes
        self._room.entered(TierKind.RAM, committed)
        self._writing.stored(committed)
        return wire.Committed(bytes(outcomes))

    def hint(self, engine: Engine, request: wire.Hint) -> None:
        _checked_keys(request.keys)
        self.keeping.hint(engine, request)

    def report(self, engine: Engine, request: wire.Report) -> None:
        try:
            self.decisions.check(request)
            self._requests.add(request)
        except ValueError as error:
            raise ProtocolError(ErrorCode.BAD_REQUEST, str(error)) from None
        if self.recording is not None:
            self.recording.reported(engine.incarnation, request)
        self.decisions.add(request, self._catalog.namespaces[engine.namespace].label)

    def count_error(self, kind: str) -> None:
        self._errors.add(kind)

    def observe(self, request: wire.Observe) -> None:
        for kind, number in request.errors.items():
            self._errors.add(kind, number)

    def session_put(self, engine: Engine, request: wire.SessionPut) -> wire.SessionSaved:
        saved = self.sessions.put(request, engine.namespace)
        session = self._session_table.get((request.tenant, request.namespace, saved.id))
        if session is not None:
            self._writing.promised(session.blocks)
        return saved

    # ------------------------------------------------------------ operation

    def evict(self, request: wire.Evict, reply: Reply) -> None:
        check_order(request, self._links)
        only = None
        if request.session_id:
            only = set(self._session_table.find(request.session_id, "", b"").blocks.tolist())
        Eviction(self._catalog, self._room, request, self.sessions.doomed, reply, only)

    def verify(self, request: wire.Verify | wire.VerifyStatus | wire.VerifyCancel) -> wire.VerifyReport:
        """As the messages say. Raises ProtocolError."""
        match request:
            case wire.Verify():
                return self._verification.start(request)
            case wire.VerifyStatus():
                return self._verification.report()
            case wire.VerifyCancel():
                return self._verification.cancel()

    def stats(self) -> wire.StatsReply:
        ram = ram_stats(self._catalog, self._ram, self._room, self._requests)
        tiers: dict[str, object] = {
            "hbm": {
                "state": "ok" if len(self._engines) else "off",
                "hit_tokens": self._requests.hit_tokens(TierKind.HBM),
            },
            "ram": {
                **ram,
                "bytes_in": self._ram_bytes_in,
                "bytes_out": self._ram_bytes_out,
                "queue": len(self._fetches),
            },
        }
        for tier in (TierKind.SSD, TierKind.S3):
            link, demoter = self._links.get(tier), self._demoters.get(tier)
            of_tier = slow_tier_stats(tier, link, demoter, self._catalog, self._room, self._requests)
            if tier in self._admitting:
                of_tier["admission"] = self._admitting[tier].snapshot()
            tiers[tier.label] = of_tier
        return wire.StatsReply(
            {
                "daemon": {
                    "version": VERSION,
                    "epoch": self._epoch,
                    "uptime_s": self._clock() - self._started_at,
                    "engines": len(self._engines),
                    "tiers": [TierKind.RAM.label, *(tier.label for tier in self._links)],
                },
                "tiers": tiers,
                "requests": {**self._requests.snapshot(), "decisions": self.decisions.snapshot()},
                "errors": error_counts(self._errors, self._links),
                "sessions": self._census.snapshot(),
                "prefetch": self._prefetch.snapshot(),
                "pins": self.keeping.pins.snapshot(),
                "events": {} if self._announcing is None else self._announcing.snapshot(),
                "discovery": {} if self._discovery is None else self._discovery.counts.snapshot(),
                "store": {"blocks_stored": self._blocks_stored, "refused": self._refused.snapshot()},
            }
        )

    def check_integrity(self) -> None:
        """Catalog against RAM tier, leases, grants and sessions, and its own recounts; for tests, when nothing is being
        copied."""
        self._catalog.check_integrity()
        self._ram.check_integrity()
        pins = Counter(self._leases.pinned())
        pins.update([*self.sessions.doomed, *self._room.deleting[TierKind.SSD], *self._room.deleting[TierKind.S3]])
        grants = [grant for engine in self._engines for grant in engine.grants.values()]
        writing = {grant.block for grant in grants}
        pins.update(grant.parent for grant in grants if grant.parent >= 0)
        refs = Counter(block for session in self._session_table for block in session.blocks.tolist())
        refs.update(self.keeping.pins.blocks())
        self._catalog.check_uses(pins, writing, refs)
        in_ram = {self._catalog.key(block) for block in self._catalog.blocks_resident(TierKind.RAM)}
        reserved = sum(len(engine.grants) for engine in self._engines) + len(self._loader)
        assert self._ram.contains(list(in_ram)) == [Outcome.OK] * len(in_ram)
        assert len(in_ram) <= self._ram.usage().blocks <= len(in_ram) + reserved
        for tier, policy in self._room.policies.items():
            assert len(policy) == self._catalog.blocks_in(tier), (
                f"{tier.label}: the policy knows another number of blocks"
            )

    # ------------------------------------------------------------ private

    def _stored_on_ssd(self, block: int) -> None:
        self.recovery.review.saw(block)

    def _on_loaded(self, block: int) -> None:
        self._room.entered(TierKind.RAM, [block])
        if self._catalog.resident(block, TierKind.SSD):
            self._room.used(TierKind.SSD, [block])
        self._writing.loaded(block)

    def _on_lost(self, block: int, tier: TierKind, outcome: Outcome) -> None:
        if outcome != Outcome.CORRUPT:
            # Of those the tier that has read them keeps count.
            self._errors.add(f"{tier.label}_lost")
        if tier == TierKind.S3 and self._discovery is not None:
            self._discovery.lost(self._catalog.key(block))
        self._room.lost(block, tier, outcome)

    def _on_found_corrupt(self, block: int, tier: TierKind, outcome: Outcome) -> None:
        """A verification has found it, which is no read of the tier's."""
        self._errors.add(f"{tier.label}_corrupt")
        self._on_lost(block, tier, outcome)

    def _on_removed(self, block: int) -> None:
        self._writing.ended(block)
        self._borrowed.removed(block)
        if self._announcing is not None:
            self._announcing.ended(block)
        self._room.hints.ended(block)


def _nothing(_: int) -> None:
    pass


def _checked_keys(keys: bytes) -> bytes:
    if not keys or len(keys) % KEY_BYTES or len(keys) > wire.MAX_KEYS * KEY_BYTES:
        raise ProtocolError(
            ErrorCode.BAD_REQUEST,
            f"keys are 1 to {wire.MAX_KEYS} joined keys of {KEY_BYTES} bytes, not {len(keys)} bytes",
        )
    return keys
