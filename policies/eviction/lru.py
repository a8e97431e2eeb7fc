"""Least recently used, leaf first.

A request's blocks are touched from the tail to the head, so a child is always colder than its parent and one
walk from the cold end meets leaves first. Measured on the public Mooncake traces this order alone is worth up to
20 points of token hit ratio against touching head first.
"""

from array import array
from collections.abc import Iterator, Sequence

from policies.base import EvictableView

_OUT = -2
# A walk that meets this many blocks which must stay gives up: better a refusal than a stalled control thread.
_MAX_SKIPPED = 20_000


class Lru:
    """A doubly linked list in two int arrays, 8 bytes a block."""

    def __init__(self) -> None:
        # index block + 1; entry 0 is the ring's anchor: next of the anchor is the coldest, previous the hottest.
        self._next = array("i", [0])
        self._previous = array("i", [0])
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def on_insert(self, blocks: Sequence[int]) -> None:
        self._touch(blocks)

    def on_access(self, blocks: Sequence[int]) -> None:
        self._touch(blocks)

    def on_remove(self, block: int) -> None:
        if self._known(block):
            self._unlink(block + 1)
            self._count -= 1

    def victims(self, bytes_needed: int, view: EvictableView) -> list[int]:
        chosen: list[int] = []
        orphaned: dict[int, int] = {}
        freed = skipped = 0
        for block in self._cold_to_hot():
            if freed >= bytes_needed:
                break
            if view.pinned(block) or view.children(block) > orphaned.get(block, 0):
                skipped += 1
                if skipped > _MAX_SKIPPED:
                    break
                continue
            chosen.append(block)
            freed += view.size_bytes(block)
            parent = view.parent(block)
            if parent >= 0:
                orphaned[parent] = orphaned.get(parent, 0) + 1
        return chosen if freed >= bytes_needed else []

    def _touch(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            node = block + 1
            if self._known(block):
                self._unlink(node)
            else:
                while len(self._next) <= node:
                    self._next.append(_OUT)
                    self._previous.append(_OUT)
                self._count += 1
            hottest = self._previous[0]
            self._next[hottest] = node
            self._previous[node] = hottest
            self._next[node] = 0
            self._previous[0] = node

    def _known(self, block: int) -> bool:
        return block + 1 < len(self._next) and self._next[block + 1] != _OUT

    def _unlink(self, node: int) -> None:
        before, after = self._previous[node], self._next[node]
        self._next[before] = after
        self._previous[after] = before
        self._next[node] = self._previous[node] = _OUT

    def _cold_to_hot(self) -> Iterator[int]:
        node = self._next[0]
        while node:
            after = self._next[node]
            yield node - 1
            node = after
