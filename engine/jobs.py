"""What the step loop gives the movers to do, and how it learns what became of it.

A job belongs to one side at a time: the step loop until it is queued, the mover until it reports it done, then
the step loop again. The one thing both touch is a fetch's claim.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome, TierKind


@dataclass(eq=False, slots=True)
class FetchJob:
    """Bring blocks into HBM: `keys[i]`, last seen in tier `expected[i]`, into the pool blocks `pool_blocks[i]`.

    `give_up_at_s[j]` is when (engine clock) to stop waiting while only j leading blocks have landed. The fields from
    `landed` on are the mover's answer: so many leading blocks are in place and valid, from `sources`; `outcome`
    says why it ended there; `loads` holds (tier, bytes, seconds since it was asked) per tier that served.
    """

    request_id: str
    tenant: str
    keys: Sequence[BlockKey]
    pool_blocks: Sequence[Sequence[int]]
    give_up_at_s: Sequence[float]
    expected: Sequence[TierKind]
    block_bytes: int
    landed: int = 0
    sources: list[TierKind] = field(default_factory=list)
    outcome: Outcome = Outcome.OK
    loads: list[tuple[TierKind, int, float]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _claimed: bool = False
    _cancelled: bool = False

    def claim(self) -> bool:
        """By the mover, before it begins: True once, unless the step loop has taken the job back."""
        with self._lock:
            if self._claimed or self._cancelled:
                return False
            self._claimed = True
            return True

    def cancel(self) -> bool:
        """By the step loop. True: no mover has begun or ever will. False: it ends soon, and then reports."""
        with self._lock:
            self._cancelled = True
            return not self._claimed

    def take_back(self) -> bool:
        """By the step loop: like `cancel`, but a mover that has begun goes on undisturbed."""
        with self._lock:
            self._cancelled = self._cancelled or not self._claimed
            return not self._claimed

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def claimed(self) -> bool:
        return self._claimed


@dataclass(eq=False, slots=True)
class StoreJob:
    """Offer consecutive blocks of one prefix to kvstore; `pool_blocks[i]` are held until the job is done.

    `num_stored` is the mover's answer: so many leading blocks need no further attempt.
    """

    request_id: str
    tenant: str
    keys: Sequence[BlockKey]
    parent: BlockKey
    depth: int
    pool_blocks: Sequence[Sequence[int]]
    num_stored: int = 0

    def all_pool_blocks(self) -> list[int]:
        return [block for group in self.pool_blocks for block in group]
