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
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.core.block import BlockMeta
from kvstore.core.key import KEY_BYTES, BlockKey
from kvstore.core.outcome import Outcome, TierKind
from kvstore.store.index import Ids, KeyIndex

STORED_TIERS = (TierKind.RAM, TierKind.SSD, TierKind.S3)
_MAX_REASONS = 65_536
_MAX_NAMESPACES = 4096  # each engine that attaches may bring one, so there must be an end
_MAX_DEPTH = (1 << 31) - 1
_NO_PARENT = -1
_Number = TypeVar("_Number", bound=np.generic)


@dataclass(slots=True)
class NamespaceInfo:
    """What is known of a namespace; `label` and `block_tokens` only since an engine attached with it."""

    digest: bytes
    root: bytes
    payload_bytes: int
    label: str = ""
    block_tokens: int = 0


def tier_bit(tier: TierKind) -> int:
    return 1 << tier


class Catalog:
    """See the module. Ids stay valid while the entry lives; hold one across calls only under a pin."""

    def __init__(self, on_removed: Callable[[int], None] = lambda _: None) -> None:
        """`on_removed` is told each id that ends, before it can be given out again."""
        self._on_removed = on_removed
        self._index = KeyIndex()
        self.namespaces: list[NamespaceInfo] = []
        self._namespace_ids: dict[bytes, int] = {}
        rows = self._index.capacity
        self._residency: npt.NDArray[np.uint8] = np.zeros(rows, dtype=np.uint8)
        self._writing: npt.NDArray[np.bool_] = np.zeros(rows, dtype=np.bool_)
        self._pins: Ids = np.zeros(rows, dtype=np.int32)
        self._parent: Ids = np.full(rows, _NO_PARENT, dtype=np.int32)
        self._links: Ids = np.zeros(rows, dtype=np.int32)
        # ~depth where the entry is known only as the parent of another.
        self._depth: Ids = np.zeros(rows, dtype=np.int32)
        self._namespace: npt.NDArray[np.int16] = np.full(rows, -1, dtype=np.int16)
        self._session_refs: Ids = np.zeros(rows, dtype=np.int32)
        self._children: dict[TierKind, Ids] = {tier: np.zeros(rows, dtype=np.int32) for tier in STORED_TIERS}
        self._blocks = dict.fromkeys(STORED_TIERS, 0)
        self._reasons: OrderedDict[BlockKey, str] = OrderedDict()

    # ------------------------------------------------------------ namespaces

    def namespace_id(self, digest: bytes, payload_bytes: int, root: bytes = b"") -> int:
        """Return the id of the namespace, adding it if new; -1 if it is known with another block size, or if there are
        too many."""
        known = self._namespace_ids.get(digest)
        if known is None:
            if payload_bytes <= 0 or len(self.namespaces) >= _MAX_NAMESPACES:
                return -1
            known = len(self.namespaces)
            self._namespace_ids[digest] = known
            self.namespaces.append(NamespaceInfo(digest, root, payload_bytes))
        info = self.namespaces[known]
        info.root = info.root or root
        return known if info.payload_bytes == payload_bytes else -1

    # ------------------------------------------------------------ reading

    def __len__(self) -> int:
        return len(self._index)

    def blocks_in(self, tier: TierKind) -> int:
        return self._blocks[tier]

    def find(self, key: BlockKey) -> int:
        return self._index.find(key)

    def find_joined(self, keys: bytes, namespace: int) -> Ids:
        """Return the id per joined key, -1 where unknown or of another namespace."""
        ids = self._index.find_joined(keys)
        other = (ids >= 0) & (self._namespace[np.maximum(ids, 0)] != namespace)
        ids[other] = -1
        return ids

    def lookup(self, keys: bytes, namespace: int) -> tuple[bytes, Outcome]:
        """Return the fastest tier of each leading block that exists, and what stopped the walk (OK: nothing did)."""
        ids = self.find_joined(keys, namespace)
        residency = self._residency[np.maximum(ids, 0)] * (ids >= 0)
        gaps = np.flatnonzero(residency == 0)
        hits = int(gaps[0]) if len(gaps) else len(ids)
        outcome = Outcome.OK
        if hits < len(ids):
            stopped = int(ids[hits])
            outcome = Outcome.PENDING if stopped >= 0 and self._writing[stopped] else Outcome.MISS
        return _FASTEST[residency[:hits]].tobytes(), outcome

    def why_missing(self, key: BlockKey) -> str:
        return self._reasons.get(key, "never_stored")

    def key(self, block: int) -> BlockKey:
        return self._index.key(block)

    def meta(self, block: int) -> BlockMeta:
        parent = int(self._parent[block])
        info = self.namespaces[int(self._namespace[block])]
        parent_key = BlockKey(info.root) if parent == _NO_PARENT else self._index.key(parent)
        return BlockMeta(self._index.key(block), parent_key, info.digest, int(self._depth[block]), info.payload_bytes)

    def resident(self, block: int, tier: TierKind) -> bool:
        return bool(self._residency[block] & tier_bit(tier))

    def blocks_resident(self, tier: TierKind) -> list[int]:
        """All blocks of a tier, in no particular order."""
        return [int(block) for block in np.flatnonzero(self._residency & tier_bit(tier))]

    def blocks_only_in_ram(self) -> list[int]:
        """The blocks that a loss of RAM would lose, parents before children."""
        blocks = np.flatnonzero(self._residency == tier_bit(TierKind.RAM))
        return [int(block) for block in blocks[np.argsort(self._depth[blocks], kind="stable")]]

    def pins(self, block: int) -> int:
        return int(self._pins[block])

    def residency(self, block: int) -> int:
        return int(self._residency[block])

    def residency_of(self, blocks: Ids) -> npt.NDArray[np.uint8]:
        return self._residency[blocks]

    def writing(self, block: int) -> bool:
        return bool(self._writing[block])

    def session_refs(self, block: int) -> int:
        return int(self._session_refs[block])

    # The four questions of policies.base.EvictableView that are the same for every tier.

    def pinned(self, block: int) -> bool:
        return bool(self._pins[block]) or bool(self._writing[block])

    def parent(self, block: int) -> int:
        return int(self._parent[block])

    def children_in(self, block: int, tier: TierKind) -> int:
        return int(self._children[tier][block])

    def size_bytes(self, block: int) -> int:
        return self.namespaces[int(self._namespace[block])].payload_bytes

    # ------------------------------------------------------------ changing

    def ensure(self, meta: BlockMeta) -> int:
        """Return the id of the block, adding an entry without copies if there is none.

        Returns -1 where the key or its parent is known with another identity (namespace, size, depth or parent):
        whoever says so is mistaken, and all entries stay as they are.
        """
        root = meta.parent if meta.depth == 0 else b""
        namespace = self.namespace_id(meta.namespace, meta.payload_bytes, root)
        if namespace < 0 or (root and root != self.namespaces[namespace].root) or not 0 <= meta.depth <= _MAX_DEPTH:
            return -1
        block = self._index.find(meta.key)
        if block >= 0 and (self._namespace[block] != namespace or self._known_depth(block) != meta.depth):
            return -1
        if block >= 0 and self._depth[block] >= 0:
            return block if not meta.depth or self._parent_key(block) == meta.parent else -1
        parent = _NO_PARENT
        if meta.depth:
            parent = self._ensure_parent(meta, namespace)
            if parent == _NO_PARENT:
                return -1
        if block < 0:
            block = self._add(meta.key, namespace)
        self._depth[block] = meta.depth
        if parent != _NO_PARENT:
            self._link(block, parent)
        return block

    def ensure_prefix(self, digest: bytes, root: bytes, payload_bytes: int, keys: bytes) -> Ids:
        """`ensure` for all blocks of one prefix, given as joined keys; ends before the first that answers -1.

        The ids are told apart; as long as nothing else keeps them, entries without copies live until the next call.
        """
        namespace = self.namespace_id(digest, payload_bytes, root)
        if namespace < 0:
            return np.zeros(0, dtype=np.int32)
        ids = self.find_joined(keys, namespace)
        before = np.concatenate(([_NO_PARENT], ids[:-1]))
        is_known = (ids >= 0) & (self._depth[ids] == np.arange(len(ids))) & (self._parent[ids] == before)
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

    def begin_write(self, block: int) -> None:
        assert not self._writing[block]
        self._writing[block] = True

    def finish_write(self, block: int) -> None:
        """The copy in RAM is complete and readable."""
        assert self._writing[block]
        self._writing[block] = False
        self.set_resident(block, TierKind.RAM)

    def abort_write(self, block: int) -> None:
        assert self._writing[block]
        self._writing[block] = False
        self._collect(block)

    def set_resident(self, block: int, tier: TierKind) -> None:
        if self.resident(block, tier):
            return
        self._residency[block] |= tier_bit(tier)
        self._blocks[tier] += 1
        parent = self._parent[block]
        if parent != _NO_PARENT:
            self._children[tier][parent] += 1

    def set_absent(self, block: int, tier: TierKind, reason: str) -> None:
        """The tier holds the block no more; if that was the last copy, remember why."""
        if not self.resident(block, tier):
            return
        self._residency[block] &= ~tier_bit(tier) & 0xFF
        self._blocks[tier] -= 1
        parent = self._parent[block]
        if parent != _NO_PARENT:
            self._children[tier][parent] -= 1
        if not self._residency[block]:
            self._remember(self._index.key(block), reason)
        self._collect(block)

    def pin(self, block: int) -> None:
        self._pins[block] += 1

    def unpin(self, block: int) -> None:
        assert self._pins[block] > 0
        self._pins[block] -= 1
        self._collect(block)

    def add_session_refs(self, blocks: Ids, change: int) -> None:
        """`blocks` are those of one session, in prefix order, so none comes twice."""
        self._session_refs[blocks] += change
        assert not len(blocks) or self._session_refs[blocks].min() >= 0
        if change < 0:
            for block in blocks[::-1].tolist():
                self._collect(block)

    def check_integrity(self) -> None:
        """Recount what is kept incrementally; for tests and `kvstore verify`."""
        rows = np.arange(len(self._residency))
        known = (self._namespace >= 0) & np.array([self._index.find(self._index.key(int(r))) == r for r in rows])
        assert int(known.sum()) == len(self._index), "the index knows another number of blocks"
        for column in (self._residency, self._writing, self._pins, self._links, self._session_refs):
            assert not column[~known].any(), "an entry that ended still counts for something"
        kept = self._residency | self._writing | (self._pins > 0) | (self._links > 0) | (self._session_refs > 0)
        assert kept[known].all(), "an entry is kept by nothing"
        parents = self._parent[known & (self._parent >= 0)]
        assert (np.bincount(parents, minlength=len(rows)) == self._links).all(), "links differ from a recount"
        for tier in STORED_TIERS:
            held = known & ((self._residency & tier_bit(tier)) != 0)
            assert int(held.sum()) == self._blocks[tier], f"{tier.label}: number of blocks differs from a recount"
            recount = np.bincount(self._parent[held & (self._parent >= 0)], minlength=len(rows))
            assert (recount == self._children[tier]).all(), f"{tier.label}: children differ from a recount"

    def check_uses(self, pins: Mapping[int, int], writing: Collection[int], session_refs: Mapping[int, int]) -> None:
        """Assert that exactly these pins, writes and references are there; for tests."""
        for name, column, wanted in (
            ("pins", self._pins, pins),
            ("writing", self._writing, dict.fromkeys(writing, 1)),
            ("session references", self._session_refs, session_refs),
        ):
            found = {int(block): int(column[block]) for block in np.flatnonzero(column)}
            assert found == dict(wanted), f"{name} of blocks: {found}, and {dict(wanted)} by their owners"

    # ------------------------------------------------------------ private

    def _add(self, key: BlockKey, namespace: int) -> int:
        block = self._index.add(key)
        if block >= len(self._residency):
            self._grow(self._index.capacity)
        self._namespace[block] = namespace
        self._parent[block] = _NO_PARENT
        self._reasons.pop(key, None)
        return block

    def _ensure_parent(self, meta: BlockMeta, namespace: int) -> int:
        """Depths go down by one from child to parent, so chains of parents have an end."""
        parent = self._index.find(meta.parent)
        if parent >= 0:
            is_right = self._namespace[parent] == namespace and self._known_depth(parent) == meta.depth - 1
            return parent if is_right else _NO_PARENT
        if meta.parent == meta.key:
            return _NO_PARENT
        parent = self._add(meta.parent, namespace)
        self._depth[parent] = ~(meta.depth - 1)
        return parent

    def _known_depth(self, block: int) -> int:
        depth = int(self._depth[block])
        return depth if depth >= 0 else ~depth

    def _link(self, block: int, parent: int) -> None:
        self._parent[block] = parent
        self._links[parent] += 1
        for tier in STORED_TIERS:
            self._children[tier][parent] += int(self.resident(block, tier))

    def _parent_key(self, block: int) -> BlockKey | None:
        parent = int(self._parent[block])
        return None if parent == _NO_PARENT else self._index.key(parent)

    def _remember(self, key: BlockKey, reason: str) -> None:
        self._reasons[key] = reason
        if len(self._reasons) > _MAX_REASONS:
            self._reasons.popitem(last=False)

    def _collect(self, block: int) -> None:
        """Remove the entry, and then its parents, as far as nothing keeps them. An entry that has ended stays so."""
        while block != _NO_PARENT and not (
            self._namespace[block] < 0
            or self._residency[block]
            or self._writing[block]
            or self._pins[block]
            or self._links[block]
            or self._session_refs[block]
        ):
            parent = int(self._parent[block])
            if parent != _NO_PARENT:
                self._links[parent] -= 1
            self._parent[block] = _NO_PARENT
            self._namespace[block] = -1
            self._index.remove(block)
            self._on_removed(block)
            block = parent

    def _grow(self, rows: int) -> None:
        self._residency = _grown(self._residency, rows)
        self._writing = _grown(self._writing, rows)
        self._pins = _grown(self._pins, rows)
        self._parent = _grown(self._parent, rows, _NO_PARENT)
        self._links = _grown(self._links, rows)
        self._depth = _grown(self._depth, rows)
        self._namespace = _grown(self._namespace, rows, -1)
        self._session_refs = _grown(self._session_refs, rows)
        self._children = {tier: _grown(column, rows) for tier, column in self._children.items()}


def _grown(column: npt.NDArray[_Number], rows: int, fill: int = 0) -> npt.NDArray[_Number]:
    larger = np.full(rows, fill, dtype=column.dtype)
    larger[: len(column)] = column
    return larger


def _fastest_table() -> npt.NDArray[np.uint8]:
    """For every residency the fastest tier in it, so that a whole prefix is answered by one take."""
    table = np.zeros(256, dtype=np.uint8)
    for residency in range(256):
        held = [tier for tier in STORED_TIERS if residency & tier_bit(tier)]
        table[residency] = min(held, default=TierKind.HBM)
    return table


_FASTEST = _fastest_table()
