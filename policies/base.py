"""The interface of eviction policies: they order blocks, the store moves them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Names = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Hint:
    """What a client says of the session whose last request used some blocks.

    `returns`: another request of the session is expected (`expect_followup`), or none (`end`), or nothing is said.
    `priority`: above 0 stays longer, below 0 goes sooner; it says how much, not for how long.
    """

    returns: bool | None = None
    priority: int = 0


class EvictableView(Protocol):
    """What a policy may know of the blocks of its tier; blocks go by their dense ids.

    A policy gets its view when it is made and may ask it at any time about blocks that were inserted and not removed.
    """

    def pinned(self, block: int) -> bool:
        """Whether the block must stay for now (leased, being written or read)."""
        ...

    def children(self, block: int) -> int:
        """How many blocks of the same tier continue the prefix that this block ends."""
        ...

    def parent(self, block: int) -> int:
        """The block before it in its prefix, in this tier or not, or -1."""
        ...

    def children_of(self, blocks: Ids) -> Ids:
        """`children` of each of the blocks."""
        ...

    def parents_of(self, blocks: Ids) -> Ids:
        """`parent` of each of the blocks."""
        ...

    def name(self, block: int) -> int:
        """What names the block also after it left, when its id may have become another's; 64 bits."""
        ...

    def names_of(self, blocks: Ids) -> Names:
        """`name` of each of the blocks."""
        ...

    def size_bytes(self, block: int) -> int: ...


class EvictionPolicy(Protocol):
    """Knows the blocks of one tier and which to give up next. Not thread-safe."""

    def on_insert(self, blocks: Sequence[int] | Ids) -> None:
        """New in the tier, in prefix order; the view counts them already."""
        ...

    def on_access(self, blocks: Sequence[int] | Ids) -> None:
        """Used again, in prefix order. Blocks that are not in the tier are passed over."""
        ...

    def on_request(self, names: Names, known: int) -> None:
        """A request begins whose prompt has blocks of these names, in prefix order, of which the first `known` are in
        the tier. A hint only: its blocks come in pieces or not at all, and also unannounced. What continues the known
        ones next is this request's, and not more of an earlier one."""
        ...

    def on_hint(self, blocks: Sequence[int] | Ids, hint: Hint) -> None:
        """The blocks of a session's last request, in prefix order, after they were inserted or used.

        Holds until they are used again; a later hint replaces an earlier one. What others continue as well is theirs,
        too: an end leaves it alone. Blocks that are not in the tier are passed over.
        """
        ...

    def on_remove(self, block: int) -> None:
        """Leaves the tier; the view still knows it. A block that is not in the tier is passed over."""
        ...

    def on_remove_many(self, blocks: Sequence[int]) -> None:
        """`on_remove` for each of the blocks, in this order; the view still knows all of them."""
        ...

    def victims(self, bytes_needed: int) -> list[int]:
        """Return blocks to evict, in this order, that free at least `bytes_needed`; [] if not so much can be freed.

        All or nothing, and leaf blocks first: no returned block has a child that stays, so a tier remains closed under
        prefixes. Nothing is removed: the caller does that, or not, and says so by `on_remove`. The time it takes is
        bounded, so where very much is pinned [] may also mean that it was not found; asking again goes on looking.
        """
        ...

    def __len__(self) -> int: ...
