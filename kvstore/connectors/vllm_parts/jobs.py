"""What the worker's threads work on: one order each, and what has become of it."""

import threading
from dataclasses import dataclass, field

from kvstore.connectors.vllm_parts.fence import Read
from kvstore.connectors.vllm_parts.orders import LoadOrder, StoreOrder
from kvstore.core.key import BlockKey


@dataclass(eq=False, slots=True)
class StoreJob:
    """`reads[i]` stands for block i at the fence. `mark` is the point in the device's work after which the blocks are
    complete. `num_settled` blocks, from the first on, need no further attempt."""

    order: StoreOrder
    keys: list[BlockKey]
    parent: BlockKey
    reads: list[Read]
    mark: object
    queued_s: float
    num_settled: int = 0
    unstored_from: int | None = None

    def left_out(self, index: int) -> None:
        """Block `index` is not stored, though its request may try again."""
        if self.unstored_from is None or index < self.unstored_from:
            self.unstored_from = index


class LoadJob:
    """Claimed by a thread or taken back by the worker, whoever comes first; only who claimed it writes blocks."""

    def __init__(self, order: LoadOrder, num_blocks: int, now_s: float) -> None:
        self.order = order
        self.keys: list[BlockKey] = []
        self.queued_s = now_s
        self.deadline_s = now_s + order.patience_s
        self.is_loaded = [False] * num_blocks
        # After which point in the device's work its blocks may be written; None: at once.
        self.mark: object = None
        self.by_tier: dict[int, int] = {}
        self.over = threading.Event()
        self._lock = threading.Lock()
        self._is_claimed = False

    def claim(self) -> bool:
        """Whether the caller is the one to end this job."""
        with self._lock:
            was_claimed, self._is_claimed = self._is_claimed, True
            return not was_claimed

    @property
    def num_missing(self) -> int:
        return self.is_loaded.count(False)

    def failed_from(self) -> int | None:
        return self.is_loaded.index(False) if False in self.is_loaded else None

    def failed_blocks(self) -> list[int]:
        return [block for block, loaded in zip(self.order.block_ids, self.is_loaded, strict=True) if not loaded]


@dataclass(slots=True)
class Busy:
    """A time in which loads kept a tier busy: since when, and what has landed until when."""

    since_s: float
    num_jobs: int = 0
    landed_bytes: int = 0
    last_s: float = 0.0


@dataclass(slots=True)
class LoadMeter:
    """Measures tiers over whole times in which they are busy: of loads at once each one alone says too little.
    Thread-safe."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _busy: dict[int, Busy] = field(default_factory=dict)

    def begin(self, tiers: set[int], now_s: float) -> None:
        with self._lock:
            for tier in tiers:
                self._busy.setdefault(tier, Busy(now_s)).num_jobs += 1

    def landed(self, tier: int, num_bytes: int, now_s: float) -> None:
        with self._lock:
            busy = self._busy.get(tier)
            if busy is not None:
                busy.landed_bytes += num_bytes
                busy.last_s = now_s

    def end(self, tiers: set[int]) -> list[tuple[int, int, float]]:
        """Return (tier, bytes, seconds) of each tier that nothing is asked of any more."""
        measured = []
        with self._lock:
            for tier in tiers:
                busy = self._busy[tier]
                busy.num_jobs -= 1
                if not busy.num_jobs:
                    del self._busy[tier]
                    if busy.landed_bytes:
                        measured.append((tier, busy.landed_bytes, busy.last_s - busy.since_s))
        return measured
