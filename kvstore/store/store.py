"""The store: everything the daemon does, behind one method per kind of request.

Covers: what each request means, and the turn of the control loop (`turn`). Does not cover: sockets and messages'
framing (daemon.py). One owner thread; a request is answered through `reply`, at once or in a later turn.
"""

import logging
import time
from collections.abc import Callable, Iterable

from kvstore import wire
from kvstore.config import Config
from kvstore.core.errors import ProtocolError
from kvstore.core.key import KEY_BYTES, BlockKey, split_keys
from kvstore.core.outcome import Outcome, TierKind
from kvstore.store import ops
from kvstore.store.catalog import Catalog
from kvstore.store.demoter import Demoter
from kvstore.store.engines import Engine, EngineTable
from kvstore.store.evict import Eviction, check_order
from kvstore.store.fetch import MAX_FETCHES, Fetches, Reply
from kvstore.store.grants import Grants
from kvstore.store.lease import LeaseTable
from kvstore.store.link import WorkerLink
from kvstore.store.loader import Loader
from kvstore.store.record import SessionRecord
from kvstore.store.room import Room
from kvstore.store.session import Session, SessionTable
from kvstore.store.session_sync import SessionSync
from kvstore.store.snapshot import error_counts, ram_stats, session_counts, slow_tier_stats
from kvstore.store.stats import Counts, RequestStats
from kvstore.version import VERSION
from kvstore.wire import ErrorCode
from tiers.ram import RamTier

_log = logging.getLogger(__name__)
_LIVENESS_EVERY_S = 0.5
_HOUSEKEEPING_EVERY_S = 0.1
_EXPIRY_EVERY_S = 5.0
_BUSY_RETRY_S = 0.05
MAX_BLOCKS_PER_STORE = 4096


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
        self._blocks_stored = 0
        self._ram_bytes_in = self._ram_bytes_out = 0
        self._demoters: dict[TierKind, Demoter] = {}
        self._catalog = catalog = Catalog(self._on_removed)
        self._room = Room(catalog, ram, links)
        self._loader = Loader(catalog, ram, links, self._room, self._on_loaded, self._on_lost)
        self._grants = Grants(catalog, ram, self._room)
        self._leases = LeaseTable(catalog)
        self._fetches = Fetches(catalog, ram, self._loader, self._leases)
        for tier, link in links.items():
            self._demoters[tier] = Demoter(tier, catalog, ram, link, self._room, self._loader, self._errors.add)
        self._sessions = SessionTable(
            catalog,
            ttl_s=config.sessions.ttl_s,
            max_sessions=config.sessions.max_sessions,
            max_tokens=config.sessions.max_tokens_per_session,
        )
        self._sync = SessionSync(catalog, self._sessions, links, self._demoters.get(TierKind.S3), self._errors.add)
        # Blocks that are to be deleted everywhere but are in use; each is pinned once by us.
        self._doomed: set[int] = set()
        self._next_liveness = self._next_housekeeping = self._next_expiry = 0.0
        self._was_ready = dict.fromkeys(links, False)

    # ------------------------------------------------------------ the control loop

    def turn(self) -> None:
        """Do what has become due; called after every batch of messages, and at `next_deadline` at the latest."""
        now = self._clock()
        self._fetches.expire(now)
        self._sync.expire(now)
        if now >= self._next_liveness:
            self._next_liveness = now + _LIVENESS_EVERY_S
            for engine in self._engines.dead():
                _log.warning("engine %d (%s) is gone; what it held is given back", engine.incarnation, engine.name)
                self._errors.add("engine_died")
                self.detach(engine)
        if now >= self._next_expiry:
            self._next_expiry = now + _EXPIRY_EVERY_S
            for session in self._sessions.expired():
                self._delete_session(session)
        if now >= self._next_housekeeping:
            self._next_housekeeping = now + _HOUSEKEEPING_EVERY_S
            self._room.keep_below(self._config.ram.high_watermark, self._config.ram.low_watermark)
            self._delete_doomed()
        for tier, link in self._links.items():
            if link.ready and not self._was_ready[tier] and tier == TierKind.SSD:
                self._write_down(self._catalog.blocks_only_in_ram())
            self._was_ready[tier] = link.ready
        self._sync.pump(now)
        self._loader.pump()
        for demoter in self._demoters.values():
            demoter.pump(now)
        for link in self._links.values():
            link.pump()
        self._fetches.flush()

    def next_deadline(self) -> float:
        """When `turn` must be called even if nothing happens."""
        busy = len(self._loader) or any(len(demoter) for demoter in self._demoters.values()) or self._sessions.dirty
        deadlines = [self._clock() + (0.02 if busy else _HOUSEKEEPING_EVERY_S)]
        for deadline in (self._fetches.next_deadline(), self._sync.next_deadline()):
            if deadline is not None:
                deadlines.append(deadline)
        return min(deadlines)

    def recovered(self, reply: ops.Recovered) -> None:
        """Enter blocks and session records that the SSD tier kept from before the start."""
        inserted = []
        for packed in reply.blocks:
            block = self._catalog.ensure(packed.unpack())
            if block < 0:
                self._errors.add("ssd_recovered_inconsistent")
                continue
            self._catalog.set_resident(block, TierKind.SSD)
            inserted.append(block)
        self._room.policies[TierKind.SSD].on_insert(inserted)
        for data in reply.records:
            self._sync.recover(data)

    def is_drained(self) -> bool:
        """Whether everything that was stored is as far down as it will go: nothing is lost if we stop now."""
        blocks_wait = any(len(demoter) for tier, demoter in self._demoters.items() if self._links[tier].ready)
        return not blocks_wait and not self._loader and not self._sync.has_work()

    # ------------------------------------------------------------ engines

    def attach(self, request: wire.Attach) -> wire.Attached:
        spec = request.namespace
        if len(spec.digest) != KEY_BYTES or len(spec.root) != KEY_BYTES:
            raise ProtocolError(ErrorCode.BAD_REQUEST, f"a namespace's digest and root have {KEY_BYTES} bytes")
        if not 0 < spec.block_bytes <= self._ram.max_slot_bytes or spec.block_tokens <= 0:
            raise ProtocolError(
                ErrorCode.BAD_REQUEST,
                f"blocks of {spec.block_bytes} bytes do not fit: a block has at most {self._ram.max_slot_bytes} bytes "
                "with this ram.size; raise it, or lower the block tokens",
            )
        namespace = self._catalog.namespace_id(spec.digest, spec.block_bytes, spec.root)
        info = self._catalog.namespaces[namespace]
        if namespace < 0 or info.root != spec.root or info.block_tokens not in (0, spec.block_tokens):
            raise ProtocolError(ErrorCode.BAD_REQUEST, "this namespace is known with another block size or root")
        info.label, info.block_tokens = spec.label[:200], spec.block_tokens
        engine = self._engines.attach(namespace, request.name[:200], request.liveness_file)
        _log.info("engine %d (%s) attached to %s", engine.incarnation, engine.name, info.label)
        region = self._ram.region
        tiers = [TierKind.RAM.label, *(tier.label for tier in self._links)]
        return wire.Attached(self._epoch, engine.incarnation, str(region.path), region.data_bytes, tiers)

    def detach(self, engine: Engine) -> None:
        """End all grants and leases of the engine, which writes and reads no more."""
        self._fetches.release_all(engine.incarnation)
        self._grants.abandon_all(engine)
        self._engines.remove(engine)

    # ------------------------------------------------------------ lookup and fetch

    def lookup(self, engine: Engine, request: wire.Lookup) -> wire.Found:
        keys = _checked_keys(request.keys)
        tiers, stopped = self._catalog.lookup(keys, engine.namespace)
        if stopped != Outcome.MISS:
            return wire.Found(tiers, stopped)
        start = len(tiers) * KEY_BYTES
        return wire.Found(tiers, stopped, self._catalog.why_missing(BlockKey(keys[start : start + KEY_BYTES])))

    def fetch(self, engine: Engine, request: wire.Fetch, reply: Reply) -> None:
        keys = _checked_keys(request.keys)
        if not 0.0 < request.deadline_s <= 600.0:
            raise ProtocolError(ErrorCode.BAD_REQUEST, "deadline_s lies between 0 and 600 seconds")
        if len(self._fetches) >= MAX_FETCHES:
            raise ProtocolError(ErrorCode.BUSY, f"{MAX_FETCHES} fetches are running")
        now = self._clock()
        touched = self._fetches.begin(keys, engine.namespace, engine.incarnation, now, request.deadline_s, reply)
        self._ram_bytes_out += len(touched) * self._catalog.namespaces[engine.namespace].payload_bytes
        self._room.policies[TierKind.RAM].on_access(touched)
        on_ssd = [block for block in touched if self._catalog.resident(block, TierKind.SSD)]
        self._room.policies[TierKind.SSD].on_access(on_ssd)

    def release(self, engine: Engine, request: wire.Release) -> None:
        self._errors.add("stale_slot", request.stale)
        self._fetches.release(request.lease, engine.incarnation, request.indexes)

    # ------------------------------------------------------------ store

    def store(self, engine: Engine, request: wire.Store) -> wire.Granted:
        keys = split_keys(_checked_keys(request.keys))
        if len(keys) > MAX_BLOCKS_PER_STORE or len(request.parent) != KEY_BYTES or not 0 <= request.depth < 1 << 30:
            raise ProtocolError(
                ErrorCode.BAD_REQUEST, f"a store has at most {MAX_BLOCKS_PER_STORE} keys, one parent key and a depth"
            )
        slots = self._grants.give(engine, keys, BlockKey(request.parent), request.depth)
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
        self._room.policies[TierKind.RAM].on_insert(committed)
        self._write_down(committed)
        return wire.Committed(bytes(outcomes))

    def report(self, request: wire.Report) -> None:
        try:
            self._requests.add(request)
        except ValueError as error:
            raise ProtocolError(ErrorCode.BAD_REQUEST, str(error)) from None

    def count_error(self, kind: str) -> None:
        self._errors.add(kind)

    def observe(self, request: wire.Observe) -> None:
        for kind, number in request.errors.items():
            self._errors.add(kind, number)

    # ------------------------------------------------------------ sessions

    def session_get(self, request: wire.SessionGet, reply: Reply) -> None:
        if not 0.0 < request.deadline_s <= 60.0:
            raise ProtocolError(ErrorCode.BAD_REQUEST, "deadline_s lies between 0 and 60 seconds")

        def got(record: SessionRecord | None) -> None:
            session = None if record is None else self._sessions.get(record.session_key)
            if record is None or session is None:
                reply(wire.Error(ErrorCode.NOT_FOUND, f"no session {request.id!r}"))
            else:
                reply(wire.SessionFound(self._sessions.view(session, record)))

        if request.namespace:
            key = (request.tenant, request.namespace, request.id)
            self._sync.get(key, self._clock(), request.deadline_s, got)
        else:
            self._sync.read(self._sessions.find(request.id, request.tenant, b""), got)

    def session_put(self, engine: Engine, request: wire.SessionPut) -> wire.SessionSaved:
        info = self._catalog.namespaces[engine.namespace]
        if request.namespace != info.digest:
            raise ProtocolError(ErrorCode.BAD_REQUEST, "an engine records sessions of its own namespace only")
        if request.keys:
            _checked_keys(request.keys)
        session, forked = self._sessions.put(request, info.root, info.label, info.payload_bytes)
        return wire.SessionSaved(session.key[2], session.revision, forked)

    def session_list(self, request: wire.SessionList) -> wire.Sessions:
        chosen = [s for s in self._sessions if request.tenant is None or s.key[0] == request.tenant]
        chosen.sort(key=lambda session: session.last_turn_s, reverse=True)
        views = [self._sessions.view(session) for session in chosen[: max(0, min(request.limit, 10_000))]]
        return wire.Sessions(views, len(chosen))

    def session_pin(self, request: wire.SessionPin, reply: Reply) -> None:
        session = self._sessions.find(request.id, request.tenant, request.namespace)

        def got(record: SessionRecord | None) -> None:
            if record is None:
                reply(wire.Error(ErrorCode.NOT_FOUND, f"the record of session {request.id!r} cannot be read now"))
                return
            self._sync.set_pinned(record, request.pinned)
            reply(wire.Done())

        self._sync.read(session, got)

    def session_delete(self, request: wire.SessionDelete) -> wire.SessionDeleted:
        session = self._sessions.find(request.id, request.tenant, request.namespace)
        num_blocks = len(session.blocks)
        deleted = self._delete_session(session)
        return wire.SessionDeleted(deleted, num_blocks - deleted)

    # ------------------------------------------------------------ operation

    def evict(self, request: wire.Evict, reply: Reply) -> None:
        check_order(request, self._links)
        Eviction(self._catalog, self._room, request, self._doomed, reply)

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
            tiers[tier.label] = slow_tier_stats(tier, link, demoter, self._catalog, self._room, self._requests)
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
                "requests": self._requests.snapshot(),
                "errors": error_counts(self._errors, self._links),
                "sessions": session_counts(self._sessions),
                "store": {"blocks_stored": self._blocks_stored, "refused": self._refused.snapshot()},
            }
        )

    def check_integrity(self) -> None:
        """Catalog against RAM tier and its own recounts; for tests, when nothing is under way."""
        self._catalog.check_integrity()
        self._ram.check_integrity()
        in_ram = {self._catalog.key(block) for block in self._catalog.blocks_resident(TierKind.RAM)}
        reserved = sum(len(engine.grants) for engine in self._engines) + len(self._loader)
        assert self._ram.contains(list(in_ram)) == [Outcome.OK] * len(in_ram)
        assert len(in_ram) <= self._ram.usage().blocks <= len(in_ram) + reserved
        for tier, policy in self._room.policies.items():
            assert len(policy) == self._catalog.blocks_in(tier), (
                f"{tier.label}: the policy knows another number of blocks"
            )

    # ------------------------------------------------------------ private

    def _write_down(self, blocks: Iterable[int]) -> None:
        """Every block goes to SSD; without one, sessions bring theirs to the bucket themselves (session_sync.py)."""
        demoter = self._demoters.get(TierKind.SSD)
        if demoter is not None:
            for block in blocks:
                demoter.add(block)

    def _on_loaded(self, block: int) -> None:
        self._room.policies[TierKind.RAM].on_insert([block])
        if self._catalog.resident(block, TierKind.SSD):
            self._room.policies[TierKind.SSD].on_access([block])
        else:
            self._write_down([block])

    def _on_lost(self, block: int, tier: TierKind, outcome: Outcome) -> None:
        self._errors.add(f"{tier.label}_{'corrupt' if outcome == Outcome.CORRUPT else 'lost'}")
        self._room.lost(block, tier, outcome)

    def _on_removed(self, block: int) -> None:
        for demoter in self._demoters.values():
            demoter.forget(block)

    def _delete_session(self, session: Session) -> int:
        """Return how many blocks go with it."""
        self._sync.delete(session)
        alone = self._sessions.remove(session)
        for block in alone:
            for demoter in self._demoters.values():
                demoter.forget(block)
        self._doomed.update(alone)
        self._delete_doomed()
        return len(alone)

    def _delete_doomed(self) -> None:
        """Delete, in every tier, the blocks of deleted sessions that nobody uses any more."""
        for block in list(self._doomed):
            if self._catalog.session_refs(block):
                self._doomed.discard(block)  # a new session has come to share it
                self._catalog.unpin(block)
            elif self._catalog.pins(block) == 1 and not self._catalog.writing(block):
                self._doomed.discard(block)
                for tier in (TierKind.SSD, TierKind.S3):
                    if self._catalog.resident(block, tier) and tier in self._links:
                        self._room.delete(tier, [block], "deleted")
                if self._catalog.resident(block, TierKind.RAM):
                    self._room.free_ram(block, "deleted")
                self._catalog.unpin(block)


def _checked_keys(keys: bytes) -> bytes:
    if not keys or len(keys) % KEY_BYTES or len(keys) > wire.MAX_KEYS * KEY_BYTES:
        raise ProtocolError(
            ErrorCode.BAD_REQUEST,
            f"keys are 1 to {wire.MAX_KEYS} joined keys of {KEY_BYTES} bytes, not {len(keys)} bytes",
        )
    return keys
