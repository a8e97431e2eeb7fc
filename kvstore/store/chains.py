"""Puts blocks that came in any order behind their parents, prefix by prefix."""

import numpy as np

from kvstore.core.index import Ids


def by_prefix(blocks: Ids, parents: Ids) -> Ids:
    """Return the same blocks, all different, so that those of one prefix stand together, parents before children.

    They come parents before children; `parents[i]` is that of `blocks[i]`, which may be none of them. Where prefixes
    branch, the branches of one head stand between each other.
    """
    if not len(blocks):
        return blocks
    order = np.argsort(blocks, kind="stable")
    places = order[np.minimum(np.searchsorted(blocks, parents, sorter=order), len(blocks) - 1)]
    is_here = blocks[places] == parents
    heads = np.where(is_here, places, np.arange(len(blocks)))
    # Each step doubles the distance, so it takes about as many as a depth has bits.
    while True:
        further = heads[heads]
        if (further == heads).all():
            return blocks[np.argsort(heads, kind="stable")]
        heads = further
