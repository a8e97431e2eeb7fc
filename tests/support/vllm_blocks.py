"""Blocks of a KV cache as vLLM deals them out: free ones in the order in which they came free, and a prefix cache that
keeps their names until they are dealt out again."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class Blocks:
    """Block 0 is nobody's."""

    def __init__(self, num_blocks: int) -> None:
        self._refs = dict.fromkeys(range(1, num_blocks), 0)
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in self._refs)
        self._cached: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._refs) - len(self._free)

    @property
    def has_cached(self) -> bool:
        return bool(self._cached)

    def take(self, count: int) -> list[int]:
        """Deal out as many, which must be free."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        self.evict(taken)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """Have one more user of each, free or not."""
        for block in blocks:
            self._free.pop(block, None)
            self._refs[block] += 1

    def let_go(self, blocks: Sequence[int]) -> None:
        """Have one user less of each; the last ones are dealt out first."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free[block] = None

    def hits(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the leading names that are known."""
        found = []
        for block_hash in hashes:
            if block_hash not in self._cached:
                break
            found.append(self._cached[block_hash])
        return found

    def name(self, block: int, block_hash: bytes) -> None:
        """Enter it in the prefix cache, unless another is there under that name."""
        if block_hash not in self._cached and block not in self._hash_of:
            self._cached[block_hash], self._hash_of[block] = block, block_hash

    def evict(self, blocks: Iterable[int]) -> None:
        """Take the names of these blocks out of the prefix cache."""
        for block in blocks:
            block_hash = self._hash_of.pop(block, None)
            if block_hash is not None:
                del self._cached[block_hash]

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._cached.clear()
        self._hash_of.clear()
