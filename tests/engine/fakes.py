"""A deterministic model whose KV is the token ids themselves, and an in-memory kvstore that fails on demand.

The model reads every token of a sequence back from the pool, so a wrong block table, a block reused too early or
wrong bytes from a fetch change the tokens that it makes.
"""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import torch

from engine.attention import SequenceSlice
from kvstore import wire
from kvstore.client import GrantedBlock, LandedBlock, LookupResult, StoreGrant
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.key import BlockKey, Namespace, join_keys
from kvstore.core.outcome import Outcome, TierKind
from tiers.region import Region

VOCAB = 97


def next_token(tokens: Sequence[int], vocab: int = VOCAB) -> int:
    """What the fake model says after `tokens`; depends on each of them and its place."""
    state = 7
    for position, token in enumerate(tokens):
        state = (state * 31 + token * (position + 3) + 11) % 1_000_003
    return state % vocab


def continuation(
    prompt: Sequence[int], count: int, stop: frozenset[int] = frozenset(), vocab: int = VOCAB
) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def namespace_of(block_tokens: int, tenant: str = "") -> Namespace:
    return Namespace("fake", "0", "float32", "LKTHD-1", block_tokens, block_tokens * 8, 1, 1, 1, tenant=tenant)


def fake_pool(num_pool_blocks: int, pool_block_tokens: int) -> torch.Tensor:
    """`[num_pool_blocks, 1, 2, pool_block_tokens, 1, 1]`, full of what must never be read."""
    return torch.full((num_pool_blocks, 1, 2, pool_block_tokens, 1, 1), -1e9)


class FakeModel:
    """K is the token id, V the position. `fail_on` makes the step that computes this token raise."""

    def __init__(self, pool_block_tokens: int, vocab: int = VOCAB) -> None:
        self._stride = pool_block_tokens
        self._vocab = vocab
        self.fail_on: int | None = None
        self.num_steps = 0

    def forward(self, slices: Sequence[SequenceSlice], pool: torch.Tensor) -> torch.Tensor:
        self.num_steps += 1
        logits = torch.zeros(len(slices), self._vocab)
        for row, piece in enumerate(slices):
            if self.fail_on is not None and self.fail_on in piece.token_ids:
                raise ValueError("a token that this model refuses")
            end = piece.start + len(piece.token_ids)
            if piece.before_layer is not None:
                piece.before_layer(0)
            table = torch.tensor(piece.block_table)
            positions = torch.arange(piece.start, end)
            blocks, offsets = table[positions // self._stride], positions % self._stride
            pool[blocks, 0, 0, offsets, 0, 0] = torch.tensor(list(piece.token_ids), dtype=torch.float32)
            pool[blocks, 0, 1, offsets, 0, 0] = positions.float()
            positions = torch.arange(end)
            blocks, offsets = table[positions // self._stride], positions % self._stride
            # What is still on its way may never have come, and the step be dropped.
            is_sure = piece.before_layer is None
            told = pool[blocks, 0, 1, offsets, 0, 0].tolist()
            assert not is_sure or told == list(range(end)), "KV of other positions"
            known = [int(token) for token in pool[blocks, 0, 0, offsets, 0, 0].tolist()]
            logits[row, next_token(known, self._vocab)] = 1.0
        return logits


class FakeHbm:
    """Bytes of the fake pool; a block is its pool blocks' K, then their V."""

    def __init__(self, pool: torch.Tensor) -> None:
        self._pool = pool

    def gather(self, pool_blocks: Sequence[int], out: memoryview) -> None:
        out[:] = self._pool[list(pool_blocks), 0].transpose(0, 1).contiguous().numpy().tobytes()

    def pin(self, address: int, num_bytes: int, goes_on: Callable[[], bool]) -> None:
        return None

    def unpin(self, address: int) -> None:
        return None

    def scatter(self, payload: memoryview, pool_blocks: Sequence[int]) -> None:
        values = torch.frombuffer(bytearray(payload), dtype=torch.float32)
        self._pool[list(pool_blocks), 0] = values.reshape(2, len(pool_blocks), -1, 1, 1).transpose(0, 1)

    def scatter_layers(
        self, payloads: Sequence[memoryview], groups: Sequence[Sequence[int]], first: int, end: int
    ) -> None:
        assert (first, end) == (0, 1), "the fake pool has one layer"
        for payload, pool_blocks in zip(payloads, groups, strict=True):
            self.scatter(payload, pool_blocks)


@dataclass
class Faults:
    """Probabilities of what goes wrong, per call or per block."""

    down: float = 0.0
    refused: float = 0.0
    miss: float = 0.0
    stale: float = 0.0
    silent: float = 0.0
    busy: float = 0.0
    full: float = 0.0
    lost_commit: float = 0.0


@dataclass
class FakeStore:
    """What the daemon holds; shared by all clients. `up` False: every call raises TierUnavailable.
    `put_refused`: the code with which sessions are refused."""

    faults: Faults = field(default_factory=Faults)
    seed: int = 0
    block_bytes: int = 32
    up: bool = True
    put_refused: str = ""
    refuses_pins: bool = False
    puts: list[wire.SessionPut] = field(default_factory=list)
    tier: TierKind = TierKind.RAM
    blocks: dict[BlockKey, bytes] = field(default_factory=dict)
    sessions: dict[tuple[str, str], wire.SessionView] = field(default_factory=dict)
    reports: list[wire.Report] = field(default_factory=list)
    hints: list[wire.Hint] = field(default_factory=list)
    observed: list[dict[str, int]] = field(default_factory=list)
    deadlines: list[float] = field(default_factory=list)
    lookups: list[list[BlockKey]] = field(default_factory=list)
    writing: dict[BlockKey, bytearray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.random = random.Random(self.seed)
        self.num_forks = 0

    def happens(self, probability: float) -> bool:
        with self.lock:
            return self.random.random() < probability

    def check(self) -> None:
        if not self.up or self.happens(self.faults.down):
            raise TierUnavailable("the daemon does not answer")
        if self.happens(self.faults.refused):
            raise ProtocolError(wire.ErrorCode.STALE_EPOCH, "an older epoch")


class FakeStream:
    def __init__(self, store: FakeStore, keys: Sequence[BlockKey]) -> None:
        self._store = store
        self._todo = list(enumerate(keys))
        with store.lock:
            if store.happens(0.5):
                store.random.shuffle(self._todo)
        self.done = False
        self.num_released = 0

    def landed(self, timeout_s: float) -> list[LandedBlock]:
        store = self._store
        if not self._todo:
            self.done = True
            return []
        if store.happens(store.faults.silent):
            threading.Event().wait(timeout_s)
            return []
        blocks = []
        for _ in range(min(len(self._todo), 1 + int(store.happens(0.5)) * 4)):
            index, key = self._todo.pop(0)
            payload = store.blocks.get(key)
            if payload is None or store.happens(store.faults.miss):
                blocks.append(LandedBlock(index, Outcome.MISS, None, 0, 0, TierKind.RAM))
            else:
                stale = store.happens(store.faults.stale)
                content = bytearray(b"\x7f" * len(payload) if stale else payload)
                blocks.append(LandedBlock(index, Outcome.OK, memoryview(content), 0, int(stale), store.tier))
        return blocks

    def still_valid(self, block: LandedBlock) -> bool:
        return block.generation == 0

    def release_blocks(self, indexes: list[int]) -> None:
        self.num_released += len(indexes)

    def __enter__(self) -> "FakeStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class FakeClient:
    """One thread's client of a FakeStore; checks that it stays on one thread."""

    def __init__(self, store: FakeStore, tenant: str = "") -> None:
        self._store = store
        self._tenant = tenant
        self._thread: int | None = None
        self.closed = False
        self.region: Region | None = None

    def clone(self) -> "FakeClient":
        return FakeClient(self._store, self._tenant)

    def close(self) -> None:
        self.closed = True

    def _call(self) -> FakeStore:
        here = threading.get_ident()
        assert self._thread in (None, here), "a client belongs to one thread"
        assert not self.closed
        self._thread = here
        self._store.check()
        return self._store

    def ping(self) -> float:
        self._call()
        return 0.0

    def lookup(self, keys: Sequence[BlockKey], deadline_s: float | None = None) -> LookupResult:
        store = self._call()
        store.lookups.append(list(keys))
        found = 0
        while found < len(keys) and keys[found] in store.blocks:
            found += 1
        if found == len(keys):
            return LookupResult([store.tier] * found, Outcome.OK, "")
        return LookupResult([store.tier] * found, Outcome.MISS, "never_stored")

    def fetch(self, keys: Sequence[BlockKey], deadline_s: float) -> FakeStream:
        store = self._call()
        store.deadlines.append(deadline_s)
        return FakeStream(store, keys)

    def store(
        self, keys: Sequence[BlockKey], parent: BlockKey, depth: int, deadline_s: float | None = None
    ) -> StoreGrant:
        store = self._call()
        blocks = []
        with store.lock:
            for key in keys:
                if key in store.blocks:
                    blocks.append(GrantedBlock(Outcome.EXISTS, None, 0, 0))
                elif store.happens(store.faults.busy):
                    blocks.append(GrantedBlock(Outcome.BUSY, None, 0, 0))
                elif store.happens(store.faults.full):
                    blocks.append(GrantedBlock(Outcome.FULL, None, 0, 0))
                else:
                    room = bytearray(store.block_bytes)
                    store.writing[key] = room
                    blocks.append(GrantedBlock(Outcome.OK, memoryview(room), 0, 5))
        return StoreGrant(blocks, 0.001)

    def commit(self, keys: Sequence[BlockKey], generations: list[int], written: list[bool]) -> list[Outcome]:
        store = self._call()
        outcomes = []
        with store.lock:
            for key, generation, done in zip(keys, generations, written, strict=True):
                assert generation == 5
                room = store.writing.pop(key, None)
                if store.happens(store.faults.lost_commit) or room is None:
                    outcomes.append(Outcome.STALE)
                    continue
                if done:
                    store.blocks[key] = bytes(room)
                outcomes.append(Outcome.OK)
        return outcomes

    def hint(
        self,
        keys: Sequence[BlockKey],
        *,
        expect_followup: bool = False,
        end: bool = False,
        priority: int = 0,
        ttl_s: float = 0.0,
        pin_s: float | None = None,
        pin_name: str = "",
    ) -> None:
        joined = join_keys(keys)
        self._store.hints.append(wire.Hint(joined, expect_followup, end, priority, ttl_s, pin_s, pin_name))

    def report(self, report: wire.Report) -> None:
        self._store.reports.append(report)

    def observe(self, errors: dict[str, int]) -> None:
        self._store.observed.append(errors)

    def session_get(
        self, session_id: str, tenant: str = "", deadline_s: float | None = None
    ) -> wire.SessionView | None:
        return self._call().sessions.get((tenant, session_id))

    def session_put(self, put: wire.SessionPut, deadline_s: float | None = None) -> wire.SessionSaved:
        store = self._call()
        if store.put_refused:
            raise ProtocolError(store.put_refused, "not now")
        if store.refuses_pins and put.pin:
            raise ProtocolError(wire.ErrorCode.BUSY, "not pinned")
        store.puts.append(put)
        with store.lock:
            now = store.sessions.get((put.tenant, put.id))
            forked = put.fork or (now.revision if now else 0) != put.revision
            session_id = put.id
            if forked:
                store.num_forks += 1
                session_id = f"{put.id}-fork{store.num_forks}"
            revision = 1 if forked else put.revision + 1
            store.sessions[put.tenant, session_id] = wire.SessionView(
                id=session_id,
                tenant=put.tenant,
                namespace=put.namespace.hex(),
                model="fake",
                revision=revision,
                messages=put.messages,
                num_messages=len(put.messages),
                num_tokens=sum(len(m.token_ids) for m in put.messages),
                num_blocks=len(put.keys) // 32,
                durable="none",
                pinned=False,
                created_s=0.0,
                last_turn_s=0.0,
                expires_s=None,
                forked_from=put.id if forked else "",
            )
        return wire.SessionSaved(session_id, revision, forked)
