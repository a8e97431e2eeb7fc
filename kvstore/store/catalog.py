"""The catalog: for every known block, its identity, which tiers hold it, and who pins it.

One owner thread. Columns indexed by a dense id, not one object per block. An entry's life in RAM:

    (absent) --begin_write--> WRITING --finish_write--> resident --set_absent--> (ghost or absent)
                                 └------abort_write---> (absent)

WRITING is invisible to lookups but for PENDING. An entry lives while a tier holds the block, somebody writes or pins
it, a session names it, or an entry exists that names it as its parent; without a copy it is a ghost and counts as
missing.
Does not cover: bytes and places (tiers), who may pin (lease.py), when to evict (demoter.py).
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.core.block import BlockMeta
from kvstore.core.index import Ids, KeyIndex, Words, as_words
from kvstore.core.key import KEY_BYTES, BlockKey
from kvstore.core.outcome import Outcome, TierKind
from kvstore.store import bulk
from kvstore.store.columns import NO_NAMESPACE, NO_PARENT, STORED_TIERS, Columns, tier_bit
from kvstore.store.namespaces import NamespaceInfo, Namespaces
from tiers.base import RecoveredBatch

_MAX_REASONS = 65_536
_MAX_DEPTH = (1 << 31) - 1


class Watcher(Protocol):
    """Is told when a tier has a copy of a block from now on, and when not any more; not by `set_resident_many`."""

    def entered(self, block: int, tier: TierKind) -> None: ...

    def left(self, block: int, tier: TierKind) -> None: ...


class Catalog:
    """See the module. Ids stay valid while the entry lives; hold one across calls only under a pin."""

    def __init__(self, on_removed: Callable[[int], None] = lambda _: None, capacity: int = 1024) -> None:
        """`on_removed` is told each id that ends, before it can be given out again. Up to `capacity` blocks nothing has
        to grow; what is not used of it takes next to no memory."""
        self._on_removed = on_removed
        self._index = KeyIndex(capacity)
        self.namespaces = Namespaces()
        self._columns = Columns(self._index.capacity)
        self._blocks = dict.fromkeys(STORED_TIERS, 0)
        self._reasons: OrderedDict[BlockKey, str] = OrderedDict()
        self.watcher: Watcher | None = None

    # ------------------------------------------------------------ reading

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_ids(self) -> int:
        """All ids that were ever given out lie below."""
        return self._index.num_ids

    def blocks_in(self, tier: TierKind) -> int:
        return self._blocks[tier]

    def find(self, key: BlockKey) -> int:
        return self._index.find(key)

    def find_joined(self, keys: bytes, namespace: int) -> Ids:
        """Return the id per joined key, -1 where unknown or of another namespace."""
        ids = self._index.find_joined(keys)
        other = (ids >= 0) & (self._columns.namespace[np.maximum(ids, 0)] != namespace)
        ids[other] = -1
        return ids

    def lookup(self, keys: bytes, namespace: int) -> tuple[bytes, Outcome]:
        """Return the fastest tier of each leading block that exists, and what stopped the walk (OK: nothing did)."""
        ids = self._index.find_joined(keys)
        # An id of -1 takes the last row, which then counts for nothing.
        is_other = self._columns.namespace.take(ids, mode="wrap") != namespace
        is_other |= ids < 0
        # As bytes, of which each question takes a fraction of what numpy takes to begin.
        residency = self._columns.residency.take(ids, mode="wrap").tobytes()
        hits = min(_first(is_other.tobytes(), 1), _first(residency, 0))
        tiers = residency[:hits].translate(_FASTEST)
        if hits == len(ids):
            return tiers, Outcome.OK
        is_writing = not is_other[hits] and self._columns.writing[ids[hits]]
        return tiers, Outcome.PENDING if is_writing else Outcome.MISS

    def why_missing(self, key: BlockKey) -> str:
        return self._reasons.get(key, "never_stored")

    def key(self, block: int) -> BlockKey:
        return self._index.key(block)

    def names_of(self, blocks: Ids) -> Words:
        """Return 64 bits of each block's key."""
        return self._index.first_words(blocks)

    def meta(self, block: int) -> BlockMeta:
        parent = int(self._columns.parent[block])
        info = self.namespaces[int(self._columns.namespace[block])]
        parent_key = BlockKey(info.root) if parent == NO_PARENT else self._index.key(parent)
        return BlockMeta(
            self._index.key(block), parent_key, info.digest, int(self._columns.depth[block]), info.payload_bytes
        )

    def resident(self, block: int, tier: TierKind) -> bool:
        return bool(self._columns.residency[block] & tier_bit(tier))

    def blocks_resident(self, tier: TierKind) -> list[int]:
        """All blocks of a tier, in no particular order."""
        return [int(block) for block in np.flatnonzero(self._columns.residency[: self._index.num_ids] & tier_bit(tier))]

    def blocks_only_in_ram(self) -> list[int]:
        """The blocks that a loss of RAM would lose, parents before children."""
        blocks = np.flatnonzero(self._columns.residency[: self._index.num_ids] == tier_bit(TierKind.RAM))
        return [int(block) for block in blocks[np.argsort(self._columns.depth[blocks], kind="stable")]]

    def blocks_only_in_bucket(self) -> list[int]:
        """The blocks that nobody but the bucket has and no session of ours names, parents before children."""
        rows = slice(0, self._index.num_ids)
        columns = self._columns
        is_there = columns.residency[rows] == tier_bit(TierKind.S3)
        blocks = np.flatnonzero(is_there & (columns.session_refs[rows] == 0) & (columns.pins[rows] == 0))
        return [int(block) for block in blocks[np.argsort(columns.depth[blocks], kind="stable")]]

    def is_only_in_bucket(self, block: int) -> bool:
        """Whether the block is one of `blocks_only_in_bucket`."""
        is_there = self.residency(block) == tier_bit(TierKind.S3)
        return is_there and not self.session_refs(block) and not self.pinned(block)

    def pins(self, block: int) -> int:
        return int(self._columns.pins[block])

    def residency(self, block: int) -> int:
        return int(self._columns.residency[block])

    def residency_of(self, blocks: Ids) -> npt.NDArray[np.uint8]:
        return self._columns.residency[blocks]

    def writing(self, block: int) -> bool:
        return bool(self._columns.writing[block])

    def session_refs(self, block: int) -> int:
        return int(self._columns.session_refs[block])

    # The questions of policies.base.EvictableView that are the same for every tier.

    def pinned(self, block: int) -> bool:
        return bool(self._columns.pins[block]) or bool(self._columns.writing[block])

    def parent(self, block: int) -> int:
        return int(self._columns.parent[block])

    def children_in(self, block: int, tier: TierKind) -> int:
        return int(self._columns.children[tier][block])

    def parents_of(self, blocks: Ids) -> Ids:
        return self._columns.parent[blocks]

    def by_depth(self, blocks: Ids) -> Ids:
        """Return the blocks, parents before children."""
        return blocks[np.argsort(self._columns.depth[blocks], kind="stable")]

    def children_of(self, blocks: Ids, tier: TierKind) -> Ids:
        return self._columns.children[tier][blocks]

    def namespace_of(self, block: int) -> int:
        return int(self._columns.namespace[block])

    def size_bytes(self, block: int) -> int:
        return self.namespaces[self.namespace_of(block)].payload_bytes

    # ------------------------------------------------------------ changing

    def ensure(self, meta: BlockMeta) -> int:
        """Return the id of the block, adding an entry without copies if there is none.

        Returns -1 where the key or its parent is known with another identity (namespace, size, depth or parent):
        whoever says so is mistaken, and all entries stay as they are.
        """
        root = meta.parent if meta.depth == 0 else b""
        namespace = self.namespaces.id_of(meta.namespace, meta.payload_bytes, root)
        if namespace < 0 or (root and root != self.namespaces[namespace].root) or not 0 <= meta.depth <= _MAX_DEPTH:
            return -1
        block = self._index.find(meta.key)
        if block >= 0 and (self._columns.namespace[block] != namespace or self._known_depth(block) != meta.depth):
            return -1
        if block >= 0 and self._columns.depth[block] >= 0:
            return block if not meta.depth or self._parent_key(block) == meta.parent else -1
        parent = NO_PARENT
        if meta.depth:
            parent = self._ensure_parent(meta, namespace)
            if parent == NO_PARENT:
                return -1
        if block < 0:
            block = self._add(meta.key, namespace, meta.depth)
        self._columns.depth[block] = meta.depth
        if parent != NO_PARENT:
            self._link(block, parent)
        return block

    def ensure_prefix(self, digest: bytes, root: bytes, payload_bytes: int, keys: bytes) -> Ids:
        """`ensure` for all blocks of one prefix, given as joined keys; ends before the first that answers -1.

        The ids are told apart; as long as nothing else keeps them, entries without copies live until the next call.
        """
        namespace = self.namespaces.id_of(digest, payload_bytes, root)
        if namespace < 0:
            return np.zeros(0, dtype=np.int32)
        ids = self.find_joined(keys, namespace)
        before = np.concatenate(([NO_PARENT], ids[:-1]))
        is_known = (
            (ids >= 0) & (self._columns.depth[ids] == np.arange(len(ids))) & (self._columns.parent[ids] == before)
        )
        gaps = np.flatnonzero(~is_known)
        blocks: list[int] = []
        for depth in range(int(gaps[0]) if len(gaps) else len(ids), len(ids)):
            key = BlockKey(keys[depth * KEY_BYTES : (depth + 1) * KEY_BYTES])
            parent = BlockKey(keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES] if depth else root)
            block = self.ensure(BlockMeta(key, parent, digest, depth, payload_bytes))
            if block < 0:
                break
            blocks.append(block)
        return np.concatenate((ids[: len(ids) if not len(gaps) else int(gaps[0])], np.array(blocks, dtype=np.int32)))

    def ensure_many(self, batch: RecoveredBatch) -> Ids:
        """`ensure` for a batch; out[i] is the id of block i or -1."""
        if not len(batch):
            return np.zeros(0, dtype=np.int32)
        namespace = self.namespaces.id_of(batch.namespace, batch.payload_bytes)
        entry = None
        if namespace >= 0 and self._has_root(self.namespaces[namespace], batch):
            entry = bulk.match(batch, namespace, self._index, self._columns)
        if entry is None:
            # Somebody is mistaken; as everywhere, who came first is believed.
            return np.array([self.ensure(meta) for meta in batch.metas()], dtype=np.int32)
        blocks, new_ids = entry.carry_out(self._index, self._columns, namespace)
        if self._reasons:
            for new_id in new_ids.tolist():
                self._reasons.pop(self._index.key(new_id), None)
        return blocks

    def begin_write(self, block: int) -> None:
        assert not self._columns.writing[block]
        self._columns.writing[block] = True

    def finish_write(self, block: int) -> None:
        """The copy in RAM is complete and readable."""
        assert self._columns.writing[block]
        self._columns.writing[block] = False
        self.set_resident(block, TierKind.RAM)

    def abort_write(self, block: int) -> None:
        assert self._columns.writing[block]
        self._columns.writing[block] = False
        self._collect(block)

    def set_resident(self, block: int, tier: TierKind) -> None:
        if self.resident(block, tier):
            return
        self._columns.residency[block] |= tier_bit(tier)
        self._blocks[tier] += 1
        parent = self._columns.parent[block]
        if parent != NO_PARENT:
            self._columns.children[tier][parent] += 1
        if self.watcher is not None:
            self.watcher.entered(block, tier)

    def set_resident_many(self, blocks: Ids, tier: TierKind) -> Ids:
        """`set_resident` for blocks that are all different; return those that were not there before."""
        columns, bit = self._columns, tier_bit(tier)
        blocks = blocks[columns.residency[blocks] & bit == 0]
        columns.residency[blocks] |= np.uint8(bit)
        self._blocks[tier] += len(blocks)
        parents = columns.parent[blocks]
        np.add.at(columns.children[tier], parents[parents != NO_PARENT], 1)
        return blocks

    def set_absent(self, block: int, tier: TierKind, reason: str) -> None:
        """The tier holds the block no more; if that was the last copy, remember why."""
        if not self.resident(block, tier):
            return
        self._columns.residency[block] &= ~tier_bit(tier) & 0xFF
        self._blocks[tier] -= 1
        parent = self._columns.parent[block]
        if parent != NO_PARENT:
            self._columns.children[tier][parent] -= 1
        if self.watcher is not None:
            self.watcher.left(block, tier)
        if not self._columns.residency[block]:
            self._remember(self._index.key(block), reason)
        self._collect(block)

    def pin(self, block: int) -> None:
        self._columns.pins[block] += 1

    def unpin(self, block: int) -> None:
        assert self._columns.pins[block] > 0
        self._columns.pins[block] -= 1
        self._collect(block)

    def add_session_refs(self, blocks: Ids, change: int) -> None:
        """`blocks` are those of one session, in prefix order, so none comes twice."""
        self._columns.session_refs[blocks] += change
        assert not len(blocks) or self._columns.session_refs[blocks].min() >= 0
        if change < 0:
            for block in blocks[::-1].tolist():
                self._collect(block)

    def check_integrity(self) -> None:
        """Recount what is kept incrementally; for tests and `kvstore verify`."""
        self._columns.check_integrity(self._index, self._blocks)

    def check_uses(self, pins: Mapping[int, int], writing: Collection[int], session_refs: Mapping[int, int]) -> None:
        """Assert that exactly these pins, writes and references are there; for tests."""
        self._columns.check_uses(self._index.num_ids, pins, writing, session_refs)

    # ------------------------------------------------------------ private

    def _has_root(self, info: NamespaceInfo, batch: RecoveredBatch) -> bool:
        """Whether all first blocks of the batch have the namespace's root as their parent; takes that from them where
        it is not known yet."""
        roots = as_words(batch.parents)[batch.depths == 0]
        if len(roots):
            info.root = info.root or roots[0].tobytes()
        return bool((roots == as_words(info.root)).all()) if len(roots) else True

    def _add(self, key: BlockKey, namespace: int, depth: int) -> int:
        block = self._index.add(key)
        if block >= len(self._columns):
            self._columns.grow(self._index.capacity)
        self._columns.begin(block, namespace, depth)
        self._reasons.pop(key, None)
        return block

    def _ensure_parent(self, meta: BlockMeta, namespace: int) -> int:
        """Depths go down by one from child to parent, so chains of parents have an end."""
        parent = self._index.find(meta.parent)
        if parent >= 0:
            is_right = self._columns.namespace[parent] == namespace and self._known_depth(parent) == meta.depth - 1
            return parent if is_right else NO_PARENT
        if meta.parent == meta.key:
            return NO_PARENT
        return self._add(meta.parent, namespace, ~(meta.depth - 1))

    def _known_depth(self, block: int) -> int:
        depth = int(self._columns.depth[block])
        return depth if depth >= 0 else ~depth

    def _link(self, block: int, parent: int) -> None:
        self._columns.parent[block] = parent
        self._columns.links[parent] += 1
        for tier in STORED_TIERS:
            self._columns.children[tier][parent] += int(self.resident(block, tier))

    def _parent_key(self, block: int) -> BlockKey | None:
        parent = int(self._columns.parent[block])
        return None if parent == NO_PARENT else self._index.key(parent)

    def _remember(self, key: BlockKey, reason: str) -> None:
        self._reasons[key] = reason
        if len(self._reasons) > _MAX_REASONS:
            self._reasons.popitem(last=False)

    def _collect(self, block: int) -> None:
        """Remove the entry, and then its parents, as far as nothing keeps them. An entry that has ended stays so."""
        while block != NO_PARENT and not (
            self._columns.namespace[block] < 0
            or self._columns.residency[block]
            or self._columns.writing[block]
            or self._columns.pins[block]
            or self._columns.links[block]
            or self._columns.session_refs[block]
        ):
            parent = int(self._columns.parent[block])
            if parent != NO_PARENT:
                self._columns.links[parent] -= 1
            self._columns.parent[block] = NO_PARENT
            self._columns.namespace[block] = NO_NAMESPACE
            self._index.remove(block)
            self._on_removed(block)
            block = parent


def _first(values: bytes, wanted: int) -> int:
    """Return where that value is first, or the number of values."""
    at = values.find(wanted)
    return len(values) if at < 0 else at


def _fastest_table() -> bytes:
    """For every residency the fastest tier in it, so that a whole prefix is answered by one translation."""
    table = bytearray(256)
    for residency in range(256):
        held = [tier for tier in STORED_TIERS if residency & tier_bit(tier)]
        table[residency] = min(held, default=TierKind.HBM)
    return bytes(table)


_FASTEST = _fastest_table()
