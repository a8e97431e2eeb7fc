"""What every tier asks of the views in a batch call."""

from collections.abc import Sequence

from kvstore.core.block import BlockMeta


def check_lengths(blocks: Sequence[BlockMeta], views: Sequence[memoryview]) -> None:
    """Raise ValueError unless there is one view of exactly payload_bytes (at least one) bytes per block."""
    if len(blocks) != len(views):
        raise ValueError(f"{len(blocks)} blocks but {len(views)} views")
    for meta, view in zip(blocks, views, strict=True):
        if meta.payload_bytes <= 0 or len(view) != meta.payload_bytes or view.itemsize != 1:
            raise ValueError(f"block {meta.key.hex()[:12]} has {meta.payload_bytes} bytes, its view {view.nbytes}")
