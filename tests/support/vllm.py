"""What the tests of the vLLM connector need of a daemon and of vLLM, in memory: no process, no vLLM, no clock of its
own."""

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self, cast

import msgspec

from kvstore import wire
from kvstore.client import Client, GrantedBlock, LandedBlock, LookupResult, StoreGrant
from kvstore.connectors.vllm_parts.seal import SEAL_BYTES
from kvstore.core.errors import TierUnavailable
from kvstore.core.key import BlockKey, Namespace
from kvstore.core.outcome import Outcome, TierKind

BLOCK_TOKENS = 4
BODY_BYTES = 64


def namespace(rank: int = 0, ranks: int = 1) -> Namespace:
    return Namespace(
        "model", "weights", "float32", "vllm-1", BLOCK_TOKENS, BODY_BYTES + SEAL_BYTES, 1, 1, 16, rank, ranks
    )


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class MemoryDaemon:
    """Blocks by key. What is wrong with it can be chosen: `is_away`, `silent` (fetches bring nothing), `busy_times`."""

    slots: dict[BlockKey, bytearray] = field(default_factory=dict)
    tier: TierKind = TierKind.RAM
    is_away: bool = False
    is_silent: bool = False
    busy_times: int = 0
    told_tokens: bytes = b""
    wants_tokens: bool = False
    sessions: dict[str, wire.SessionPut] = field(default_factory=dict)
    hints: list[dict[str, Any]] = field(default_factory=list)
    reports: list[wire.Report] = field(default_factory=list)
    stale: set[BlockKey] = field(default_factory=set)
    lookups: int = 0
    open_clients: int = 0
    before_commit: Callable[[], None] = lambda: None
    before_lookup: Callable[[], None] = lambda: None

    def client(self) -> Client:
        return cast(Client, MemoryClient(self))


class MemoryClient:
    """As `kvstore.client.Client`."""

    def __init__(self, daemon: MemoryDaemon) -> None:
        self.daemon = daemon
        self.region = None
        self._granted: dict[BlockKey, bytearray] = {}
        daemon.open_clients += 1

    def clone(self) -> "MemoryClient":
        return MemoryClient(self.daemon)

    def close(self) -> None:
        self.daemon.open_clients -= 1

    def attach(self, deadline_s: float) -> None:
        self._reach()

    def lookup(self, keys: Sequence[BlockKey], deadline_s: float | None = None) -> LookupResult:
        self._reach()
        self.daemon.before_lookup()
        self.daemon.lookups += 1
        count = next((i for i, key in enumerate(keys) if key not in self.daemon.slots), len(keys))
        return LookupResult(
            [self.daemon.tier] * count,
            Outcome.OK if count == len(keys) else Outcome.MISS,
            "" if count == len(keys) else "never_stored",
        )

    @property
    def wants_tokens(self) -> bool:
        return self.daemon.wants_tokens

    def store(self, keys: Sequence[BlockKey], parent: BlockKey, depth: int, tokens: bytes = b"") -> StoreGrant:
        self._reach()
        self.daemon.told_tokens += tokens
        if self.daemon.busy_times:
            self.daemon.busy_times -= 1
            return StoreGrant([GrantedBlock(Outcome.BUSY, None, 0, 0)] * len(keys), 0.01)
        blocks = []
        for key in keys:
            if key in self.daemon.slots:
                blocks.append(GrantedBlock(Outcome.EXISTS, None, 0, 0))
                continue
            self._granted[key] = slot = bytearray(BODY_BYTES + SEAL_BYTES)
            blocks.append(GrantedBlock(Outcome.OK, memoryview(slot), 0, 1))
        return StoreGrant(blocks, 0.0)

    def commit(self, keys: Sequence[BlockKey], generations: list[int], written: list[bool]) -> list[Outcome]:
        self.daemon.before_commit()
        self._reach()
        for key, is_written in zip(keys, written, strict=True):
            slot = self._granted.pop(key)
            if is_written:
                self.daemon.slots[key] = slot
        return [Outcome.OK] * len(keys)

    def fetch(self, keys: Sequence[BlockKey], deadline_s: float) -> "MemoryStream":
        self._reach()
        return MemoryStream(self.daemon, list(keys))

    def session_get(self, session_id: str, tenant: str = "", deadline_s: float | None = None) -> Any:
        self._reach()
        put = self.daemon.sessions.get(session_id)
        return None if put is None else SimpleNamespace(id=put.id, revision=put.revision + 1, messages=put.messages)

    def session_put(self, put: wire.SessionPut, deadline_s: float | None = None) -> wire.SessionSaved:
        self._reach()
        before = self.daemon.sessions.get(put.id)
        if before is not None and before.revision + 1 != put.revision:
            put = msgspec.structs.replace(put, id=f"{put.id}~{len(self.daemon.sessions)}", revision=0)
            self.daemon.sessions[put.id] = put
            return wire.SessionSaved(put.id, 1, True)
        self.daemon.sessions[put.id] = put
        return wire.SessionSaved(put.id, put.revision + 1, False)

    def session_delete(self, session_id: str, tenant: str = "", namespace: bytes = b"") -> None:
        self._reach()
        del self.daemon.sessions[session_id]

    def hint(self, keys: Sequence[BlockKey], **hints: Any) -> None:
        self._reach()
        self.daemon.hints.append(hints)

    def report(self, report: wire.Report) -> None:
        self.daemon.reports.append(report)

    def _reach(self) -> None:
        if self.daemon.is_away:
            raise TierUnavailable("no daemon runs there")


class MemoryStream:
    """As `kvstore.stream.FetchStream`: lands everything at once, or nothing."""

    def __init__(self, daemon: MemoryDaemon, keys: list[BlockKey]) -> None:
        self._daemon = daemon
        self._keys = keys
        self.done = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def landed(self, timeout_s: float) -> list[LandedBlock]:
        if self._daemon.is_silent or self.done:
            # A tick, so that whoever waits for time to pass does not spin.
            threading.Event().wait(0.001)
            return []
        self.done = True
        blocks = []
        for index, key in enumerate(self._keys):
            slot = self._daemon.slots.get(key)
            outcome = Outcome.MISS if slot is None else Outcome.OK
            view = None if slot is None else memoryview(slot)
            blocks.append(LandedBlock(index, outcome, view, index, 1, self._daemon.tier))
        return blocks

    def still_valid(self, block: LandedBlock) -> bool:
        return self._keys[block.index] not in self._daemon.stale

    def release_blocks(self, indexes: list[int]) -> None:
        return

    def damaged(self, blocks: Sequence[LandedBlock]) -> None:
        for block in blocks:
            self._daemon.slots.pop(self._keys[block.index], None)


class MemoryPages:
    """A KV cache of one layer, `[num_blocks, BODY_BYTES]`. `before_gather` is called before each copy out of it,
    `before_scatter` before each copy into it."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [bytearray(BODY_BYTES) for _ in range(num_blocks)]
        self.payload_bytes = BODY_BYTES + SEAL_BYTES
        self.before_gather: Callable[[int], None] = lambda block_id: None
        self.before_scatter: Callable[[], None] = lambda: None

    def mark(self) -> object:
        return None

    def gather(self, block_ids: Sequence[int], outs: Sequence[memoryview], after: object) -> None:
        for block_id, out in zip(block_ids, outs, strict=True):
            self.before_gather(block_id)
            out[:] = self.blocks[block_id]

    def scatter(self, payloads: Sequence[memoryview], block_ids: Sequence[int], after: object) -> None:
        self.before_scatter()
        for block_id, payload in zip(block_ids, payloads, strict=True):
            self.blocks[block_id][:] = payload

    def pin(self, address: int, num_bytes: int, goes_on: Callable[[], bool]) -> None:
        return

    def unpin(self, address: int) -> None:
        return


def kv_of(block_hash: bytes, rank: int = 0, era: int = 0) -> bytearray:
    """What a rank computes of a block: it follows from the hash, so that every mix-up shows. `era` counts the weights
    that a process has had."""
    return bytearray(hashlib.shake_256(b"kv%d,%d" % (rank, era) + block_hash).digest(BODY_BYTES))


def hashes_of(token_ids: Sequence[int]) -> list[bytes]:
    """vLLM's chained hashes of the full blocks."""
    hashes = []
    parent = b"none"
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = hashlib.sha256(parent + repr(tuple(token_ids[start : start + BLOCK_TOKENS])).encode()).digest()
        hashes.append(parent)
    return hashes


class FakeRequest:
    """As `vllm.v1.request.Request`."""

    def __init__(self, request_id: str, token_ids: Sequence[int], params: object = None) -> None:
        self.request_id = request_id
        self.all_token_ids: list[int] = list(token_ids)
        self.num_prompt_tokens = len(token_ids)
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.num_in_flight_tokens = 0
        self.status = "RUNNING"
        self.skip_reading_prefix_cache = False
        self.kv_transfer_params = params

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        return hashes_of(self.all_token_ids)
