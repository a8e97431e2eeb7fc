"""Enters whole batches of blocks into the catalog: a million blocks after a restart, in a few numpy calls each.

Does what `Catalog.ensure` does for each block of the batch in turn, but only where the order makes no difference:
where a block contradicts another or what is known already, it does nothing and says so.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.core.index import Ids, KeyIndex, Words, as_words
from kvstore.store.columns import Columns
from tiers.base import RecoveredBatch

_Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class BulkEntry:
    """What a batch adds to the catalog: who is new, be it as a block or as the parent of one, and who is whose parent.

    `blocks` and `parents` are the ids of the batch's rows; ~i stands for the id that `new_words[i]` will get. Where
    `has_parent` is false the parent means nothing.
    """

    new_words: Words
    new_depths: Ids
    blocks: Ids
    parents: Ids
    has_parent: npt.NDArray[np.bool_]
    depths: Ids

    def carry_out(self, index: KeyIndex, columns: Columns, namespace: int) -> tuple[Ids, Ids]:
        """Enter everything; return the ids of the batch's rows and those that are new."""
        new_ids = index.add_many(self.new_words)
        if index.capacity > len(columns):
            columns.grow(index.capacity)
        columns.begin(new_ids, namespace, ~self.new_depths)
        blocks = _resolved(self.blocks, new_ids)
        parents = _resolved(self.parents, new_ids)
        is_ghost = columns.depth[blocks] < 0
        columns.depth[blocks] = self.depths
        linked = is_ghost & self.has_parent
        columns.link(blocks[linked], parents[linked])
        return blocks, new_ids


def match(batch: RecoveredBatch, namespace: int, index: KeyIndex, columns: Columns) -> BulkEntry | None:
    """Compare the batch with itself and with what is known; None where not everything agrees. Changes nothing."""
    words, parent_words = as_words(batch.keys), as_words(batch.parents)
    depths = np.ascontiguousarray(batch.depths, dtype=np.int32)
    if int(depths.min(initial=0)) < 0:
        return None
    has_parent = depths > 0
    blocks = index.find_many(words)
    parents = np.where(has_parent, index.find_many(parent_words), np.int32(-1))
    known = np.flatnonzero(blocks >= 0)
    if not _blocks_agree(blocks[known], parents[known], depths[known], namespace, columns):
        return None
    known = np.flatnonzero(parents >= 0)
    if not _parents_agree(parents[known], depths[known] - 1, namespace, columns):
        return None
    new_blocks = np.flatnonzero(blocks < 0)
    new_parents = np.flatnonzero(has_parent & (parents < 0))
    claims = np.concatenate((words[new_blocks], parent_words[new_parents]))
    claimed = np.concatenate((depths[new_blocks], depths[new_parents] - 1))
    found = _distinct(index.mixed(claims), len(new_blocks))
    if found is None:
        return None
    first, which = found
    if not (claims[first][which] == claims).all() or not (claimed[first][which] == claimed).all():
        return None
    blocks[new_blocks] = ~which[: len(new_blocks)]
    parents[new_parents] = ~which[len(new_blocks) :]
    return BulkEntry(claims[first], claimed[first], blocks, parents, has_parent, depths)


def _blocks_agree(blocks: Ids, parents: Ids, depths: Ids, namespace: int, columns: Columns) -> bool:
    """Whether what is said of known blocks is what is known of them, and of each only once."""
    has_parent = depths > 0
    is_whole = columns.depth[blocks] >= 0
    return bool(
        len(np.unique(blocks)) == len(blocks)
        and (columns.namespace[blocks] == namespace).all()
        and (columns.known_depths(blocks) == depths).all()
        and (columns.parent[blocks] == parents)[is_whole & has_parent].all()
    )


def _parents_agree(parents: Ids, depths: Ids, namespace: int, columns: Columns) -> bool:
    return bool((columns.namespace[parents] == namespace).all() and (columns.known_depths(parents) == depths).all())


def _distinct(mixed: Words, num_blocks: int) -> tuple[_Rows, Ids] | None:
    """Return the first of each set of equal keys, and for each key the number of its set; None where two of the first
    `num_blocks`, which name blocks, are equal."""
    _, first, which = np.unique(mixed, return_index=True, return_inverse=True)
    if len(np.unique(which[:num_blocks])) != num_blocks:
        return None
    # Numbered as they came: how the keys are mixed is another secret in each process, and ids should not show it.
    order = np.argsort(first)
    number = np.empty(len(first), dtype=np.int32)
    number[order] = np.arange(len(first))
    return first[order], number[which]


def _resolved(ids: Ids, new_ids: Ids) -> Ids:
    """Put the new ids in place of ~i."""
    if not len(new_ids):
        return ids
    resolved = ids.copy()
    waiting = np.flatnonzero(ids < 0)
    resolved[waiting] = new_ids[~ids[waiting]]
    return resolved
