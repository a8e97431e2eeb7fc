"""Keeps a pool block from being overwritten while a store reads it, without ever holding up a step for a store that has
not begun.

    waiting ── begin ──► reading ── end ──► over
       └── clear ──► withdrawn

vLLM gives a block to another request as soon as nobody holds it, and a preempted request lets go of its blocks at once.
So before each step the blocks that it may write are cleared: a read that waits is withdrawn (that block is not stored),
one under way, the copy of one block, is waited for.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable
from enum import Enum, auto


class ReadState(Enum):
    WAITING = auto()
    READING = auto()
    WITHDRAWN = auto()
    OVER = auto()


class Read:
    """One block that a store is going to read."""

    __slots__ = ("block_id", "state")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.state = ReadState.WAITING


class Fence:
    """Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reads: defaultdict[int, list[Read]] = defaultdict(list)

    def __len__(self) -> int:
        """Return how many blocks are still to be read."""
        return len(self._reads)

    def expect(self, block_ids: Iterable[int]) -> list[Read]:
        reads = [Read(block_id) for block_id in block_ids]
        with self._changed:
            for read in reads:
                self._reads[read.block_id].append(read)
        return reads

    def begin(self, read: Read) -> bool:
        """Whether the block may be read now; `end` must follow, whatever comes of it. False: it was withdrawn."""
        with self._changed:
            if read.state is not ReadState.WAITING:
                return False
            read.state = ReadState.READING
            return True

    def end(self, read: Read) -> None:
        """The read is over, or will not take place. Idempotent."""
        with self._changed:
            if read.state is ReadState.OVER:
                return
            read.state = ReadState.OVER
            self._forget(read)
            self._changed.notify_all()

    def clear(self, block_ids: Iterable[int]) -> int:
        """Return once nobody reads these blocks any more; how many reads were withdrawn."""
        num_withdrawn = 0
        with self._changed:
            if not self._reads:
                return 0
            wanted = [block_id for block_id in block_ids if block_id in self._reads]
            # All that waits first, so that none of it begins while others are waited for.
            for read in [read for block_id in wanted for read in self._reads[block_id]]:
                if read.state is ReadState.WAITING:
                    read.state = ReadState.WITHDRAWN
                    self._forget(read)
                    num_withdrawn += 1
            for block_id in wanted:
                while block_id in self._reads:
                    self._changed.wait()
        return num_withdrawn

    def clear_all(self) -> int:
        """As `clear`, of every block."""
        with self._changed:
            block_ids = list(self._reads)
        return self.clear(block_ids)

    def _forget(self, read: Read) -> None:
        reads = self._reads.get(read.block_id)
        if reads is not None and read in reads:
            reads.remove(read)
            if not reads:
                del self._reads[read.block_id]
