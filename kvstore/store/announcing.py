"""Announcing: tells routers, through the publisher's process, which blocks entered and left which tier.

    catalog ── entered, left ──► pending changes ── 20 ms, or many ──► batches ──► outlet (kvstore/events_process.py)

Nothing here waits. A batch that the outlet does not take is lost, and so is its sequence, by which readers see it.
After that, and whenever readers may believe what is no longer so (the daemon or the publisher was started), everything
is cleared and all that is there is announced anew, a few blocks per turn: the *walk*. What the walk has not come to yet
is not announced otherwise, so that nothing is announced twice: llm-d counts announcements, and would keep a block that
left but once.

Token ids come from the engines that store (wire.Store), and are kept as long as the block is known, within a budget.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np

from kvstore.core.key import BlockKey, event_name
from kvstore.core.outcome import TierKind
from kvstore.events.changes import Batch, Change
from kvstore.store.catalog import Catalog
from kvstore.store.columns import NO_PARENT, STORED_TIERS, tier_bit

_FLUSH_EVERY_S: Final = 0.02
_MANY_CHANGES: Final = 1024
_CHANGES_PER_BATCH: Final = 256
_TOKEN_BYTES_PER_BATCH: Final = 256 << 10
# More than this in one turn is not worth its memory; the walk tells it all again.
_MAX_PENDING: Final = 65_536
_WALK_STEP: Final = 512
_WALK_AGAIN_AFTER_S: Final = 30.0
# Of a remembered block, beside its token ids: the entries of the dictionary, the bytes object.
_OVERHEAD_BYTES: Final = 250


class Outlet(Protocol):
    """Where batches go. `num_starts` goes up when what was kept for replay is lost."""

    @property
    def num_starts(self) -> int: ...

    @property
    def state(self) -> str:
        """`ok`, `down` (another will be started) or `off` (it cannot start with these settings)."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether there is room for more than what cannot wait."""
        ...

    def send(self, batch: Batch) -> bool:
        """False: the batch was not taken. Never blocks."""
        ...


class Announcing:
    """Owned by the control thread."""

    def __init__(
        self,
        catalog: Catalog,
        outlet: Outlet,
        token_budget_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`token_budget_bytes` 0: token ids are neither asked for nor published."""
        self._catalog = catalog
        self._outlet = outlet
        self._token_budget_bytes = token_budget_bytes
        self._clock = clock
        self._wall_clock = wall_clock
        self._pending: list[Change] = []
        self._next_flush = 0.0
        self._sequence = 0
        self._tokens: OrderedDict[int, bytes] = OrderedDict()
        self._token_bytes = 0
        # The walk: the id it has come to; None while it is not under way. Begins as soon as the outlet is there.
        self._walk_at: int | None = None
        self._walk_due_s: float | None = 0.0
        self._outlet_starts = 0
        self._num_published = self._num_dropped = self._num_walks = 0

    @property
    def wants_tokens(self) -> bool:
        return self._token_budget_bytes > 0

    @property
    def is_busy(self) -> bool:
        return bool(self._pending) or self._walk_at is not None

    # ------------------------------------------------------------ what happens to blocks

    def entered(self, block: int, tier: TierKind) -> None:
        """The tier has a readable copy from now on, and had none."""
        if self._is_announced(block):
            self._add(self._stored(block, tier))

    def left(self, block: int, tier: TierKind) -> None:
        """The tier has no copy any more; the entry is still there."""
        if self._is_announced(block):
            self._add(Change(False, tier, event_name(self._catalog.key(block))))

    def ended(self, block: int) -> None:
        """The id may become another block's."""
        tokens = self._tokens.pop(block, None)
        if tokens is not None:
            self._token_bytes -= len(tokens) + _OVERHEAD_BYTES

    def learn(self, keys: list[BlockKey], tokens: bytes) -> None:
        """Remember the token ids of blocks: of each key, the next share of `tokens`."""
        share = len(tokens) // len(keys)
        if not self.wants_tokens or not share:
            return
        for index, key in enumerate(keys):
            block = self._catalog.find(key)
            if block >= 0 and block not in self._tokens:
                self._tokens[block] = tokens[index * share : (index + 1) * share]
                self._token_bytes += share + _OVERHEAD_BYTES
        while self._token_bytes > self._token_budget_bytes:
            self.ended(next(iter(self._tokens)))

    # ------------------------------------------------------------ the control loop

    def turn(self, now: float) -> None:
        if self._outlet.num_starts != self._outlet_starts:
            self._outlet_starts = self._outlet.num_starts
            self._walk_due_s = now
        if self._walk_due_s is not None and now >= self._walk_due_s and self._outlet.is_ready:
            self._begin_walk()
        if self._walk_at is not None and self._outlet.is_ready:
            self._walk(self._walk_at)
        if self._pending and (now >= self._next_flush or len(self._pending) >= _MANY_CHANGES):
            self._next_flush = now + _FLUSH_EVERY_S
            self._flush()

    def snapshot(self) -> dict[str, object]:
        return {
            "state": self._outlet.state,
            "published_changes": self._num_published,
            "dropped_changes": self._num_dropped,
            "sequence": self._sequence,
            "walks": self._num_walks,
            "blocks_with_tokens": len(self._tokens),
        }

    # ------------------------------------------------------------ private

    def _is_announced(self, block: int) -> bool:
        """Whether readers are to know about the block yet: else the walk will tell them, or a later one."""
        if self._num_walks == 0:
            return False
        return self._walk_at is None or block < self._walk_at

    def _stored(self, block: int, tier: TierKind) -> Change:
        catalog = self._catalog
        parent = catalog.parent(block)
        return Change(
            True,
            tier,
            event_name(catalog.key(block)),
            None if parent == NO_PARENT else event_name(catalog.key(parent)),
            self._tokens.get(block, b""),
            catalog.namespaces[catalog.namespace_of(block)].block_tokens,
        )

    def _add(self, change: Change) -> None:
        if len(self._pending) < _MAX_PENDING:
            self._pending.append(change)
        else:
            self._lose(1)

    def _flush(self) -> None:
        changes, self._pending = self._pending, []
        begin = num_bytes = 0
        for index, change in enumerate(changes):
            if index > begin and (
                index - begin >= _CHANGES_PER_BATCH or num_bytes + len(change.tokens) > _TOKEN_BYTES_PER_BATCH
            ):
                self._send(changes[begin:index])
                begin, num_bytes = index, 0
            num_bytes += len(change.tokens)
        self._send(changes[begin:])

    def _send(self, changes: list[Change], is_cleared: bool = False) -> bool:
        batch = Batch(self._sequence, self._wall_clock(), changes, is_cleared)
        self._sequence += 1
        if self._outlet.send(batch):
            self._num_published += len(changes)
            return True
        self._lose(len(changes))
        return False

    def _lose(self, num_changes: int) -> None:
        self._num_dropped += num_changes
        self._walk_at = None
        if self._walk_due_s is None:
            self._walk_due_s = self._clock() + _WALK_AGAIN_AFTER_S

    def _begin_walk(self) -> None:
        self._pending.clear()
        self._walk_due_s = None
        if self._send([], is_cleared=True):
            self._walk_at = 0
            self._num_walks += 1

    def _walk(self, begin: int) -> None:
        """Announce what is there among the next ids, parents before their children as far as these are concerned."""
        end = min(begin + _WALK_STEP, self._catalog.num_ids)
        ids = np.arange(begin, end, dtype=np.int32)
        residency = self._catalog.residency_of(ids)
        for tier in STORED_TIERS:  # first, so that blocks that follow each other share an event
            for block in self._catalog.by_depth(ids[residency & tier_bit(tier) != 0]).tolist():
                self._add(self._stored(block, tier))
        self._walk_at = None if end >= self._catalog.num_ids else end
