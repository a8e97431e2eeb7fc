"""Blocks as the columns of a RecoveredBatch."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvstore.core.block import BlockMeta
from kvstore.core.key import join_keys
from tiers.base import RecoveredBatch

RECOVERED_BLOCKS = 8192


def batches_of(blocks: Iterable[BlockMeta]) -> Iterator[RecoveredBatch]:
    """Yield the blocks in batches of at most RECOVERED_BLOCKS of one namespace and size; holds back no more than one
    batch of each."""
    waiting: defaultdict[tuple[bytes, int], list[BlockMeta]] = defaultdict(list)
    for meta in blocks:
        alike = waiting[meta.namespace, meta.payload_bytes]
        alike.append(meta)
        if len(alike) == RECOVERED_BLOCKS:
            yield _batch(alike)
            alike.clear()
    yield from (_batch(alike) for alike in waiting.values() if alike)


def _batch(blocks: Sequence[BlockMeta]) -> RecoveredBatch:
    return RecoveredBatch(
        blocks[0].namespace,
        blocks[0].payload_bytes,
        join_keys([meta.key for meta in blocks]),
        join_keys([meta.parent for meta in blocks]),
        np.array([meta.depth for meta in blocks], dtype=np.int32),
    )
