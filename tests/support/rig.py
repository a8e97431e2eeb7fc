"""The store of a daemon in this thread: real store, real links and real worker code, tiers and clock of the test's own.

Nothing happens by itself: `turn` runs one turn of the control loop, `work` lets the workers answer, `settle` does both
until nothing changes any more.
"""

import fcntl
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import zmq

from kvstore import wire
from kvstore.config import Config, EventsConfig, PrefetchConfig, RamConfig, S3Config, SessionsConfig, SsdConfig
from kvstore.core.errors import ProtocolError
from kvstore.core.key import BlockKey, Namespace, join_keys
from kvstore.core.outcome import Outcome, TierKind
from kvstore.store.engines import Engine, EngineTable
from kvstore.store.link import WorkerLink
from kvstore.store.store import Store
from kvstore.worker import ops
from kvstore.worker.janitor import Janitor, JanitorSettings
from kvstore.worker.opening import WorkerSettings
from kvstore.worker.serving import Worker
from tests.support.chats import parents, payload
from tests.support.clock import Clock
from tests.support.memory import MemoryInventory, MemoryRecords, MemoryTier
from tiers.base import RecordStore, Tier
from tiers.ram import RamTier
from tiers.region import Region

_MANY_TURNS = 5000
JANITOR = JanitorSettings(30.0, 900.0, 3600.0, 0, 7 * 86400.0, "sessions")


class _Wire:
    """Both ends of a socket in one object: what is sent waits in `sent`, what `answers` holds is received."""

    def __init__(self) -> None:
        self.sent: deque[ops.Op] = deque()
        self.answers: deque[bytes] = deque()
        self.has_peer = True

    def send(self, frame: bytes, flags: int = 0) -> None:
        if not self.has_peer:
            assert flags & zmq.NOBLOCK, "this would wait for ever"
            raise zmq.Again
        self.sent.extend(ops.op_decoder.decode(frame))

    def recv(self, _: int) -> bytes:
        if not self.answers:
            raise zmq.Again
        return self.answers.popleft()

    def close(self) -> None:
        self.sent.clear()
        self.answers.clear()


class _AtOnce:
    """A pool of threads without threads."""

    def submit(self, action: Callable[..., object], *arguments: object) -> None:
        action(*arguments)


class _Process:
    def __init__(self) -> None:
        self.status: int | None = None

    def poll(self) -> int | None:
        return self.status

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None:
        self.status = -9


class ThreadlessLink(WorkerLink):
    """A link whose worker does nothing until `work` is called."""

    def __init__(
        self,
        kind: TierKind,
        tier: Tier,
        records: RecordStore,
        region: Region,
        clock: Clock,
        janitor: JanitorSettings,
    ) -> None:
        settings = WorkerSettings(
            tier="ssd" if kind == TierKind.SSD else "s3",
            socket="ipc://unused",
            parent=0,
            log_level="info",
            region_path=str(region.path),
            epoch=region.epoch,
        )
        is_ssd = kind == TierKind.SSD
        super().__init__(
            kind,
            settings,
            cast("zmq.Context[zmq.Socket[bytes]]", None),
            load_window=4,
            store_window_bytes=1 << 20,
            store_window_ops=64 if is_ssd else 2,
            on_recovered=lambda reply: self.recovered(reply),
            clock=clock,
        )
        self.recovered: Callable[[ops.Recovered], None] = lambda reply: None
        self.can_start = True
        self.is_tidying = True
        self.worker = Worker(cast(Any, None), tier, records, region, 1, batching=is_ssd)
        self.worker._readers = cast(Any, _AtOnce())
        if not is_ssd:
            assert isinstance(records, MemoryRecords)
            inventory = MemoryInventory(tier, records, clock)
            self.worker.janitor = Janitor(
                records, inventory, janitor, self.worker.report, clock=clock, sleep=lambda _: None
            )
        self.worker._recovery_room = threading.Semaphore(1 << 20)  # nobody could make room while we recover

    def start(self) -> None:
        self._started_at = self._clock()
        self._restart_at = None
        self._socket = cast(Any, _Wire())
        self._process = cast(Any, _Process())
        if self.can_start:
            self._answer([ops.Ready(), self.worker._level()])

    def work(self, max_ops: int = 1 << 30) -> int:
        """Carry out what was sent, in order; return how much that was."""
        if self._socket is None or self._gone_at is not None:
            return 0
        sent = self.wire.sent
        done = 0
        if self.worker.janitor is not None and self.is_tidying:
            self.worker.janitor.step()
        while sent and done < max_ops:
            op = sent.popleft()
            done += 1
            match op:
                case ops.Read():
                    self.worker._run(op.op, partial(self.worker._read, op))
                case ops.RecordGet():
                    self.worker._run(op.op, partial(self.worker._record_get, op))
                case ops.RecordPut() | ops.RecordDelete():
                    self.worker._run(op.op, partial(self.worker._record, op))
                case ops.Write() | ops.Delete():
                    self.worker._run_batch([op])
                case ops.Discover():
                    self.worker._discover(op)
                case ops.Recover():
                    self.worker._recover(op)
                case ops.Scrub():
                    self.worker._scrubber.run(op)
        if done:
            self.worker.answer(self.worker._level())
        answers = []
        while not self.worker._answers.empty():
            answers.append(self.worker._answers.get())
        if answers:
            self._answer(answers)
        return done

    @property
    def wire(self) -> _Wire:
        return cast(_Wire, self._socket)

    def die(self) -> None:
        """The worker's process ends, and with it what it was sent and has not answered."""
        self.wire.close()
        self.wire.has_peer = False
        cast(_Process, self._process).status = -9

    def close(self) -> None:
        os.close(self.worker._wake)

    def _answer(self, replies: list[ops.Reply]) -> None:
        self.wire.answers.append(ops.encoder.encode(replies))


class Rig:
    """One daemon's store. Several in a row may share tiers and records, as restarts and a bucket do."""

    def __init__(
        self,
        folder: Path,
        *,
        ram_bytes: int = 40 * 8192,
        ssd: Tier | None = None,
        s3: Tier | None = None,
        ssd_records: MemoryRecords | None = None,
        s3_records: MemoryRecords | None = None,
        sessions: SessionsConfig | None = None,
        s3_config: S3Config | None = None,
        janitor: JanitorSettings | None = None,
        is_started: bool = True,
        clock: Clock | None = None,
        ram_config: RamConfig | None = None,
        ssd_config: SsdConfig | None = None,
        prefetch: PrefetchConfig | None = None,
        events: EventsConfig | None = None,
    ) -> None:
        """`ram_config`'s size and `ssd_config`'s `enabled` are those of the other arguments."""
        folder.mkdir(exist_ok=True)
        self.clock = Clock(1000.0) if clock is None else clock
        self.folder = folder
        self.region = Region.create(folder / f"region-{os.urandom(4).hex()}", ram_bytes, 7)
        self.ram = RamTier(self.region)
        self.ssd_records = MemoryRecords() if ssd_records is None else ssd_records
        self.s3_records = MemoryRecords() if s3_records is None else s3_records
        self.links: dict[TierKind, ThreadlessLink] = {}
        for kind, tier, records in ((TierKind.SSD, ssd, self.ssd_records), (TierKind.S3, s3, self.s3_records)):
            if tier is not None:
                self.links[kind] = ThreadlessLink(kind, tier, records, self.region, self.clock, janitor or JANITOR)
        self.engines = EngineTable(folder)
        self.config = Config(
            ram=msgspec.structs.replace(
                ram_config or RamConfig(policy="lru", high_watermark=1.0, low_watermark=0.9), size_bytes=ram_bytes
            ),
            ssd=msgspec.structs.replace(ssd_config or SsdConfig(policy="lru"), enabled=ssd is not None),
            prefetch=PrefetchConfig() if prefetch is None else prefetch,
            s3=S3Config() if s3_config is None else s3_config,
            sessions=SessionsConfig() if sessions is None else sessions,
            events=EventsConfig() if events is None else events,
        )
        self.store = Store(
            self.config,
            7,
            self.ram,
            cast("dict[TierKind, WorkerLink]", self.links),
            self.engines,
            self.clock,
            self.clock,
        )
        self._locks: dict[int, int] = {}
        for link in self.links.values():
            link.recovered = self.store.recovery.take_in
            link.start()
        if is_started:
            self.settle()

    # ------------------------------------------------------------ time

    def turn(self) -> None:
        for link in self.links.values():
            link.receive()
        self.store.turn()

    def work(self) -> int:
        return sum(link.work() for link in self.links.values())

    def settle(self, seconds: float = 0.0) -> None:
        """Let everything happen that can, for at least so many seconds of the clock."""
        until = self.clock.now + seconds
        quiet = 0
        for _ in range(_MANY_TURNS):
            self.turn()
            quiet = 0 if self.work() else quiet + 1
            # In larger steps where nothing happens but that time passes.
            self.clock.now += 0.02 if quiet < 3 else max(0.1, seconds / 2000)
            if quiet > 4 and self.clock.now >= until:
                return
        raise AssertionError("the store does not come to rest")

    # ------------------------------------------------------------ engines

    def attach(self, namespace: Namespace, name: str = "engine") -> Engine:
        file_name = os.urandom(4).hex()
        lock = os.open(self.folder / "clients" / file_name, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        spec = wire.NamespaceSpec(
            namespace.digest(), namespace.root(), namespace.model, namespace.block_tokens, namespace.block_bytes
        )
        try:
            attached = self.store.attach(wire.Attach(spec, file_name, name))
        except ProtocolError:
            os.close(lock)
            raise
        self._locks[attached.incarnation] = lock
        engine = self.engines.get(attached.incarnation)
        assert engine is not None
        return engine

    def die(self, engine: Engine) -> None:
        """The engine's process ends."""
        os.close(self._locks.pop(engine.incarnation))
        self.clock.now += 1.0

    def grant(self, engine: Engine, namespace: Namespace, keys: Sequence[BlockKey], start: int = 0) -> list[wire.Slot]:
        parent = parents(namespace, keys)[start]
        return self.store.store(engine, wire.Store(join_keys(keys[start:]), parent, start)).slots

    def write(self, key: BlockKey, slot: wire.Slot, num_bytes: int = 8192) -> None:
        self.region.view(slot.offset, num_bytes)[:] = payload(key, num_bytes)

    def put(self, engine: Engine, namespace: Namespace, keys: Sequence[BlockKey], start: int = 0) -> list[Outcome]:
        """Store the blocks from `start` on; return what became of each."""
        slots = self.grant(engine, namespace, keys, start)
        granted = [(keys[start + slot.index], slot) for slot in slots if slot.outcome == Outcome.OK]
        for key, slot in granted:
            self.write(key, slot, namespace.block_bytes)
        if granted:
            self.commit(engine, granted)
        return [Outcome(slot.outcome) for slot in slots]

    def commit(
        self, engine: Engine, granted: Sequence[tuple[BlockKey, wire.Slot]], written: bool = True
    ) -> list[Outcome]:
        request = wire.Commit(
            join_keys([key for key, _ in granted]), [slot.generation for _, slot in granted], [written] * len(granted)
        )
        return [Outcome(outcome) for outcome in self.store.commit(engine, request).outcomes]

    def lookup(self, engine: Engine, keys: Sequence[BlockKey]) -> list[TierKind]:
        request = wire.Lookup(join_keys(keys))
        found = self.store.lookup(engine, request)
        self.store.asked(engine, request, found)
        return [TierKind(tier) for tier in found.tiers]

    def begin_fetch(self, engine: Engine, keys: Sequence[BlockKey], deadline_s: float = 5.0) -> "Fetch":
        fetch = Fetch(self, engine, list(keys))
        self.store.fetch(engine, wire.Fetch(join_keys(keys), deadline_s), fetch.take)
        return fetch

    def fetch(self, engine: Engine, keys: Sequence[BlockKey], deadline_s: float = 5.0) -> "Fetch":
        """Fetch, check every byte, release; the fetch says what became of each block."""
        fetch = self.begin_fetch(engine, keys, deadline_s)
        for _ in range(_MANY_TURNS):
            self.turn()
            fetch.copy()
            if fetch.done:
                break
            self.work()
            self.clock.now += 0.02
        assert fetch.done, "a fetch was never answered to its end"
        fetch.release()
        return fetch

    # ------------------------------------------------------------ the end

    def stats(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self.store.stats().stats)

    def check(self) -> None:
        """Settle, then nothing may be pinned and everything must agree."""
        self.settle()
        self.store.check_integrity()

    def close(self) -> None:
        for lock in self._locks.values():
            os.close(lock)
        self.engines.close()
        for link in self.links.values():
            link.close()
        self.region.close()
        self.region.unlink()


class Fetch:
    """One fetch of one engine, and what it has got."""

    def __init__(self, rig: Rig, engine: Engine, keys: list[BlockKey]) -> None:
        self._rig = rig
        self.engine = engine
        self.keys = keys
        self.lease = 0
        self.done = False
        self.given_up = False
        self.answers: dict[int, Outcome] = {}
        self.sources: dict[int, TierKind] = {}
        self.slots: dict[int, wire.Slot] = {}

    def take(self, message: wire.Message) -> None:
        assert isinstance(message, wire.Landed) and not self.done
        self.lease, self.done = message.lease, message.done
        for slot in message.slots:
            assert slot.index not in self.answers, "a block was answered twice"
            self.answers[slot.index] = Outcome(slot.outcome)
            if slot.outcome == Outcome.OK:
                self.slots[slot.index] = slot
                self.sources[slot.index] = TierKind(slot.source)
        if self.done and not self.given_up:
            assert len(self.answers) == len(self.keys), "a block was never answered"

    def copy(self, release: bool = True) -> None:
        """Check what landed and give the pins back."""
        for index, slot in self.slots.items():
            view = self._rig.region.view(slot.offset, self.num_bytes)
            assert view == payload(self.keys[index], self.num_bytes), "another block's bytes"
            assert self._rig.region.generation(slot.offset) == slot.generation
        if release and self.slots:
            self.release(list(self.slots))
            self.slots.clear()

    @property
    def num_bytes(self) -> int:
        return self._rig.store._catalog.namespaces[self.engine.namespace].payload_bytes

    def release(self, indexes: list[int] | None = None) -> None:
        self.given_up = self.given_up or indexes is None
        self.given_up = self.given_up or indexes is None
        self._rig.store.release(self.engine, wire.Release(self.lease, indexes))

    @property
    def outcomes(self) -> list[Outcome]:
        return [self.answers[index] for index in range(len(self.keys))]


def memory(kind: TierKind, num_blocks: int | None = None) -> MemoryTier:
    """A tier with room for so many blocks of 8192 bytes."""
    return MemoryTier(kind, None if num_blocks is None else num_blocks * 8192)
