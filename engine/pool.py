"""Which pool block of the HBM pool is free, in use, held, or kept because its prefix may come again.

Covers: bookkeeping by number. Does not cover: the bytes, see `tiers/hbm.py`. Not thread-safe: the step loop owns it.

What a pool block is, by its counts:

    free ── allocate ──► in use (references > 0) ── release ──► free, or cached where a key is indexed to it
    cached ── acquire_prefix ──► in use               cached ── allocate ──► in use, the key forgotten
    any of them in use ── hold ──► also held; it is not reused before `unhold`, whatever its references

A *block* (the unit that has a key) is `pool_blocks_per_block` pool blocks. Cached blocks are reused the least
recently used leaf first, so that what stays is closed under prefixes as far as it can be.
"""

import heapq
from collections.abc import Iterable, Sequence

from kvstore.core.key import BlockKey

_STALE_LEAVES = 64


class _Entry:
    """One indexed block. `in_use` counts its pool blocks that have a reference or a hold."""

    __slots__ = ("idle_since", "in_use", "key", "num_children", "parent", "pool_blocks")

    def __init__(self, key: BlockKey, parent: BlockKey, pool_blocks: tuple[int, ...]) -> None:
        self.key = key
        self.parent = parent
        self.pool_blocks = pool_blocks
        self.in_use = 0
        self.num_children = 0
        self.idle_since = 0


class BlockPool:
    """Hands out pool blocks 0 … num_pool_blocks - 1 and finds those of a known prefix again."""

    def __init__(self, num_pool_blocks: int, pool_blocks_per_block: int = 1) -> None:
        if num_pool_blocks < 1 or pool_blocks_per_block < 1:
            raise ValueError("a pool needs at least one pool block, and a block too")
        self.num_pool_blocks = num_pool_blocks
        self.pool_blocks_per_block = pool_blocks_per_block
        self._free = list(range(num_pool_blocks - 1, -1, -1))
        self._references = [0] * num_pool_blocks
        self._holds = [0] * num_pool_blocks
        self._entry_of: list[_Entry | None] = [None] * num_pool_blocks
        self._index: dict[BlockKey, _Entry] = {}
        # Children that are indexed, by parent key; the parent itself may not be.
        self._num_children: dict[BlockKey, int] = {}
        self._num_idle_entries = 0
        self._num_held_only = 0
        self._clock = 0
        # (idle_since, key) of leaves that became idle; stale pairs are skipped when they come up.
        self._idle_leaves: list[tuple[int, BlockKey]] = []

    # ------------------------------------------------------------ what there is

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pool blocks that nobody uses but whose block can still be found."""
        return self._num_idle_entries * self.pool_blocks_per_block

    @property
    def num_available(self) -> int:
        """How many pool blocks `allocate` can give now."""
        return self.num_free + self.num_cached

    @property
    def num_held_only(self) -> int:
        """Pool blocks that will be available once their stores are acknowledged."""
        return self._num_held_only

    @property
    def num_indexed_blocks(self) -> int:
        return len(self._index)

    def num_resident(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading blocks of `keys` are indexed; changes nothing."""
        for position, key in enumerate(keys):
            if key not in self._index:
                return position
        return len(keys)

    # ------------------------------------------------------------ references

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` pool blocks with one reference each, or None, and then nothing changed."""
        if count > self.num_available:
            return None
        while len(self._free) < count:
            self._forget_one()
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def acquire_prefix(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the pool blocks of the longest indexed prefix of `keys`, with one more reference each."""
        found: list[int] = []
        for key in keys[: self.num_resident(keys)]:
            for block in self._index[key].pool_blocks:
                self._begin_use(block)
                self._references[block] += 1
                found.append(block)
        return found

    def release(self, pool_blocks: Sequence[int]) -> None:
        """Give back one reference of each, last first, so that a prefix's tail is reused before its head."""
        for block in reversed(pool_blocks):
            if self._references[block] < 1:
                raise ValueError(f"pool block {block} has no reference to release")
            self._references[block] -= 1
            if self._references[block] == 0 and self._holds[block]:
                self._num_held_only += 1
            self._end_use(block)

    def hold(self, pool_blocks: Iterable[int]) -> None:
        """Keep these in-use pool blocks as they are until `unhold`, even when their last reference goes."""
        for block in pool_blocks:
            if not self._references[block]:
                raise ValueError(f"pool block {block} is not in use and cannot be held")
            self._holds[block] += 1

    def unhold(self, pool_blocks: Iterable[int]) -> None:
        for block in pool_blocks:
            if self._holds[block] < 1:
                raise ValueError(f"pool block {block} is not held")
            self._holds[block] -= 1
            if self._holds[block] == 0 and not self._references[block]:
                self._num_held_only -= 1
            self._end_use(block)

    # ------------------------------------------------------------ the index

    def index(self, key: BlockKey, parent: BlockKey, pool_blocks: Sequence[int]) -> bool:
        """Make a computed block, in use, findable. False where another copy of it is already: nothing changed."""
        if len(pool_blocks) != self.pool_blocks_per_block:
            raise ValueError(f"a block is {self.pool_blocks_per_block} pool blocks, not {len(pool_blocks)}")
        if key in self._index:
            return False
        entry = _Entry(key, parent, tuple(pool_blocks))
        for block in pool_blocks:
            if not self._references[block] or self._entry_of[block] is not None:
                raise ValueError(f"pool block {block} is unused or belongs to another block")
            self._entry_of[block] = entry
        entry.in_use = len(pool_blocks)
        entry.num_children = self._num_children.get(key, 0)
        self._index[key] = entry
        self._num_children[parent] = self._num_children.get(parent, 0) + 1
        above = self._index.get(parent)
        if above is not None:
            above.num_children += 1
        return True

    def drop(self) -> int:
        """Forget every cached block that nobody uses and return how many pool blocks that freed."""
        idle = [entry for entry in self._index.values() if entry.in_use == 0]
        for entry in idle:
            self._forget(entry)
        return len(idle) * self.pool_blocks_per_block

    def _begin_use(self, block: int) -> None:
        if self._references[block]:
            return
        if self._holds[block]:
            self._num_held_only -= 1
            return
        entry = self._entry_of[block]
        assert entry is not None, "a block without a key is free when it is not in use"
        if entry.in_use == 0:
            self._num_idle_entries -= 1
        entry.in_use += 1

    def _end_use(self, block: int) -> None:
        if self._references[block] or self._holds[block]:
            return
        entry = self._entry_of[block]
        if entry is None:
            self._free.append(block)
            return
        entry.in_use -= 1
        if entry.in_use == 0:
            self._num_idle_entries += 1
            self._clock += 1
            entry.idle_since = self._clock
            if entry.num_children == 0:
                self._push_leaf(entry)

    def _push_leaf(self, entry: _Entry) -> None:
        heapq.heappush(self._idle_leaves, (entry.idle_since, entry.key))
        if len(self._idle_leaves) > 2 * len(self._index) + _STALE_LEAVES:
            # A prefix that is used over and over leaves a stale pair each time.
            self._idle_leaves = [
                (e.idle_since, e.key) for e in self._index.values() if not e.in_use and not e.num_children
            ]
            heapq.heapify(self._idle_leaves)

    def _forget_one(self) -> None:
        while self._idle_leaves:
            idle_since, key = heapq.heappop(self._idle_leaves)
            entry = self._index.get(key)
            if entry is not None and entry.in_use == 0 and entry.idle_since == idle_since and not entry.num_children:
                self._forget(entry)
                return
        # Only inner blocks are idle: their children are in use as a second copy's tail. The children stay
        # indexed and are found again once an equal parent is.
        self._forget(min((e for e in self._index.values() if e.in_use == 0), key=lambda e: e.idle_since))

    def _forget(self, entry: _Entry) -> None:
        del self._index[entry.key]
        self._num_idle_entries -= 1
        for block in entry.pool_blocks:
            self._entry_of[block] = None
            self._free.append(block)
        self._num_children[entry.parent] -= 1
        if not self._num_children[entry.parent]:
            del self._num_children[entry.parent]
        above = self._index.get(entry.parent)
        if above is not None:
            above.num_children -= 1
            if above.num_children == 0 and above.in_use == 0:
                self._push_leaf(above)

    # ------------------------------------------------------------ for tests

    def check_integrity(self) -> None:
        """Raises AssertionError where counts, free list and index do not agree. Slow."""
        assert len(set(self._free)) == len(self._free), "a pool block is free twice"
        free = set(self._free)
        held_only = 0
        for block in range(self.num_pool_blocks):
            references, holds, entry = self._references[block], self._holds[block], self._entry_of[block]
            assert references >= 0
            assert holds >= 0
            idle = not references and not holds
            assert (block in free) == (idle and entry is None), f"pool block {block} is lost or free by mistake"
            held_only += bool(holds and not references)
        assert held_only == self._num_held_only
        children: dict[BlockKey, int] = {}
        num_idle = 0
        owned: set[int] = set()
        for key, entry in self._index.items():
            assert key == entry.key
            assert len(entry.pool_blocks) == self.pool_blocks_per_block
            assert owned.isdisjoint(entry.pool_blocks), "two blocks share a pool block"
            owned.update(entry.pool_blocks)
            assert all(self._entry_of[block] is entry for block in entry.pool_blocks)
            in_use = sum(bool(self._references[b] or self._holds[b]) for b in entry.pool_blocks)
            assert in_use == entry.in_use
            num_idle += in_use == 0
            children[entry.parent] = children.get(entry.parent, 0) + 1
        assert children == self._num_children
        assert num_idle == self._num_idle_entries
        leaves = set(self._idle_leaves)
        for key, entry in self._index.items():
            assert entry.num_children == children.get(key, 0)
            if not entry.in_use and not entry.num_children:
                assert (entry.idle_since, key) in leaves, "an idle leaf can not be found for reuse"
        assert {block for block, entry in enumerate(self._entry_of) if entry is not None} == owned
