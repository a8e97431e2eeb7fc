"""What the catalog knows of each entry: one numpy array per fact, indexed by the entry's id.

A million small objects would take 270 MiB. Rows that were never used are zero pages that take no memory.
Does not cover: keys (index.py), what the facts mean together (catalog.py).
"""

from collections.abc import Collection, Mapping
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.core.index import Ids, KeyIndex
from kvstore.core.outcome import TierKind

STORED_TIERS: Final = (TierKind.RAM, TierKind.SSD, TierKind.S3)
NO_PARENT: Final = -1
NO_NAMESPACE: Final = -1
_Number = TypeVar("_Number", bound=np.generic)


def tier_bit(tier: TierKind) -> int:
    return 1 << tier


class Columns:
    """Owned by the catalog. A row means something only while its id is given out."""

    def __init__(self, num_rows: int) -> None:
        self.residency: npt.NDArray[np.uint8] = np.zeros(num_rows, dtype=np.uint8)
        self.writing: npt.NDArray[np.bool_] = np.zeros(num_rows, dtype=np.bool_)
        self.pins: Ids = np.zeros(num_rows, dtype=np.int32)
        self.parent: Ids = np.zeros(num_rows, dtype=np.int32)
        """The parent's id or NO_PARENT."""
        self.links: Ids = np.zeros(num_rows, dtype=np.int32)
        """How many entries name this one as their parent."""
        self.depth: Ids = np.zeros(num_rows, dtype=np.int32)
        """~depth where the entry is known only as the parent of another."""
        self.namespace: npt.NDArray[np.int16] = np.zeros(num_rows, dtype=np.int16)
        """NO_NAMESPACE once the entry has ended."""
        self.session_refs: Ids = np.zeros(num_rows, dtype=np.int32)
        self.children: dict[TierKind, Ids] = {tier: np.zeros(num_rows, dtype=np.int32) for tier in STORED_TIERS}
        """How many blocks of the tier have this one as their parent."""

    def __len__(self) -> int:
        return len(self.residency)

    def begin(self, ids: int | Ids, namespace: int, depth: int | Ids) -> None:
        """New entries, without copies and parents."""
        self.namespace[ids] = namespace
        self.parent[ids] = NO_PARENT
        self.depth[ids] = depth

    def known_depths(self, ids: Ids) -> Ids:
        """The depth of each, be it known only as a parent or in its own right."""
        depths: Ids = self.depth[ids]
        return np.where(depths >= 0, depths, ~depths)

    def link(self, ids: Ids, parents: Ids) -> None:
        """Name the parents of entries that have none yet."""
        self.parent[ids] = parents
        np.add.at(self.links, parents, 1)
        for tier in STORED_TIERS:
            np.add.at(self.children[tier], parents, (self.residency[ids] & tier_bit(tier)) != 0)

    def grow(self, num_rows: int) -> None:
        """Keep all and have room for `num_rows`; one column after the other, so that only one is there twice."""
        self.residency = _grown(self.residency, num_rows)
        self.writing = _grown(self.writing, num_rows)
        self.pins = _grown(self.pins, num_rows)
        self.parent = _grown(self.parent, num_rows)
        self.links = _grown(self.links, num_rows)
        self.depth = _grown(self.depth, num_rows)
        self.namespace = _grown(self.namespace, num_rows)
        self.session_refs = _grown(self.session_refs, num_rows)
        for tier, column in self.children.items():
            self.children[tier] = _grown(column, num_rows)

    def check_integrity(self, index: KeyIndex, blocks: Mapping[TierKind, int]) -> None:
        """Recount what is kept incrementally; `blocks` is how many each tier is said to hold."""
        used = slice(0, index.num_ids)
        known = (self.namespace[used] >= 0) & index.is_known()
        num_rows = len(known)
        assert int(known.sum()) == len(index), "the index knows another number of blocks"
        residency, links, parent = self.residency[used], self.links[used], self.parent[used]
        for column in (self.residency, self.writing, self.pins, self.links, self.session_refs):
            assert not column[used][~known].any(), "an entry that ended still counts for something"
        kept = residency | self.writing[used] | (self.pins[used] > 0) | (links > 0) | (self.session_refs[used] > 0)
        assert kept[known].all(), "an entry is kept by nothing"
        parents = parent[known & (parent >= 0)]
        assert (np.bincount(parents, minlength=num_rows) == links).all(), "links differ from a recount"
        for tier, children in self.children.items():
            held = known & ((residency & tier_bit(tier)) != 0)
            assert int(held.sum()) == blocks[tier], f"{tier.label}: number of blocks differs from a recount"
            recount = np.bincount(parent[held & (parent >= 0)], minlength=num_rows)
            assert (recount == children[used]).all(), f"{tier.label}: children differ from a recount"

    def check_uses(
        self, num_ids: int, pins: Mapping[int, int], writing: Collection[int], session_refs: Mapping[int, int]
    ) -> None:
        """Assert that exactly these pins, writes and references are there, among the ids below `num_ids`."""
        for name, column, wanted in (
            ("pins", self.pins, pins),
            ("writing", self.writing, dict.fromkeys(writing, 1)),
            ("session references", self.session_refs, session_refs),
        ):
            found = {int(block): int(column[block]) for block in np.flatnonzero(column[:num_ids])}
            assert found == dict(wanted), f"{name} of blocks: {found}, and {dict(wanted)} by their owners"


def _grown(column: npt.NDArray[_Number], num_rows: int) -> npt.NDArray[_Number]:
    larger = np.zeros(num_rows, dtype=column.dtype)
    larger[: len(column)] = column
    return larger
