"""What there is in a bucket, by listing it: for expiry and size, which must see what no record names.

Covers: blocks and records under our prefix, page by page, and the deletion of blocks. Does not cover: which may go.
Whatever else lies under the prefix is left out, and so never touched.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.core.key import BlockKey


@dataclass(frozen=True, slots=True)
class BlockPage:
    """Some blocks: `keys` joined, `num_bytes` and `modified_s` (the server's clock) per block.

    `following` goes on from there, None at the end.
    """

    keys: bytes
    num_bytes: npt.NDArray[np.int64]
    modified_s: npt.NDArray[np.float64]
    following: str | None


@dataclass(frozen=True, slots=True)
class ListedRecord:
    """`modified_s` is the server's clock."""

    name: str
    etag: str
    modified_s: float


@dataclass(frozen=True, slots=True)
class RecordPage:
    """Some records; `following` goes on from there, None at the end."""

    records: list[ListedRecord]
    following: str | None


class Inventory(Protocol):
    """Calls block, make one request each, and raise TierUnavailable where the bucket does not answer."""

    def blocks(self, following: str | None = None) -> BlockPage:
        """In no particular order; what comes or goes meanwhile may or may not be there."""
        ...

    def records(self, prefix: str, following: str | None = None) -> RecordPage: ...

    def delete_blocks(self, keys: Sequence[BlockKey]) -> int:
        """Delete at most DELETE_AT_ONCE blocks, there or not; return how many the server refused to delete."""
        ...

    def abort_uploads(self, begun_before_s: float) -> int:
        """Free what uploads in parts left behind that began before that time of the server's clock; return how many.

        No listing shows them, and they are paid for all the same.
        """
        ...
