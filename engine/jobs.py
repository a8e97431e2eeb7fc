"""What the step loop gives the movers to do, and how it learns what became of it.

A store belongs to one side at a time: the step loop until it is queued, the mover until it reports it done, then the
step loop again. A fetch is shared while it runs: each of its blocks belongs to one side at a time.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from engine.layers import LayerGate
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome, TierKind


class Fill(IntEnum):
    """Who may write a block of a fetch.

        WANTED ── begin ──► FILLING ── end ──► LANDED, or FAILED
          ├───── refuse ─────────────────────────────────► FAILED
          └───── withdraw ──► WITHDRAWN

    The mover writes only while FILLING; the step loop computes into a block only once it is WITHDRAWN or FAILED, and
    reads it only once it is LANDED.
    """

    WANTED = 0
    FILLING = 1
    LANDED = 2
    FAILED = 3
    WITHDRAWN = 4


@dataclass(frozen=True, slots=True)
class Landing:
    """What became of block `index` of a fetch; `at_s` of the engine's clock."""

    index: int
    outcome: Outcome
    source: TierKind
    at_s: float


@dataclass(eq=False, slots=True)
class FetchJob:
    """Bring blocks into HBM, asked for in this order: `keys[i]`, last seen in tier `expected[i]`, into the pool blocks
    `pool_blocks[i]`. They land in any order. After `deadline_s` (engine clock) the mover ends by itself.

    `outcome` is the mover's, once it reports: why it ended before every block was settled; OK where all were.
    """

    request_id: str
    tenant: str
    keys: Sequence[BlockKey]
    pool_blocks: Sequence[Sequence[int]]
    expected: Sequence[TierKind]
    deadline_s: float
    outcome: Outcome = Outcome.OK
    # When a mover began.
    began_s: float | None = None
    num_open: int = 0
    # While all blocks that are left are copied layer by layer. The step loop takes it away where it came to nothing.
    layers: LayerGate | None = None
    _states: bytearray = field(default_factory=bytearray)
    _news: list[Landing] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._states = bytearray(len(self.keys))
        self.num_open = len(self.keys)

    def state(self, index: int) -> Fill:
        return Fill(self._states[index])

    # ------------------------------------------------------------ the mover's

    def claim(self, now: float) -> bool:
        """Before it begins. False: there is nothing to do any more."""
        with self._lock:
            if self.num_open:
                self.began_s = now
            return self.num_open > 0

    def begin(self, index: int) -> bool:
        """Before writing a block. False: it has been withdrawn, or is there; it must not be touched."""
        with self._lock:
            if self._states[index] != Fill.WANTED:
                return False
            self._states[index] = Fill.FILLING
            return True

    def begin_last(self, indexes: Sequence[int], gate: LayerGate) -> list[int]:
        """Before writing blocks layer by layer: return those of `indexes` that are wanted, all of them FILLING now.
        [], with nothing changed, where another block is still wanted."""
        with self._lock:
            wanted = [index for index in indexes if self._states[index] == Fill.WANTED]
            if len(wanted) < self.num_open:
                return []
            for index in wanted:
                self._states[index] = Fill.FILLING
            if wanted:
                self.layers = gate
            return wanted

    def end(self, index: int, outcome: Outcome, source: TierKind, now: float) -> None:
        """After it: OK where its bytes are in place and valid."""
        self._settle(index, Fill.FILLING, Landing(index, outcome, source, now))

    def refuse(self, index: int, outcome: Outcome, source: TierKind, now: float) -> None:
        """Instead, where there is nothing to write."""
        self._settle(index, Fill.WANTED, Landing(index, outcome, source, now))

    def close(self, now: float) -> None:
        """At its end: what is not settled fails for the job's reason."""
        reason = self.outcome if self.outcome is not Outcome.OK else Outcome.UNAVAILABLE
        with self._lock:
            for index, state in enumerate(self._states):
                if state in (Fill.WANTED, Fill.FILLING):
                    self._states[index] = Fill.FAILED
                    self._news.append(Landing(index, reason, self.expected[index], now))
            self.num_open = 0

    def _settle(self, index: int, before: Fill, landing: Landing) -> None:
        with self._lock:
            if self._states[index] == before:
                self._states[index] = Fill.LANDED if landing.outcome is Outcome.OK else Fill.FAILED
                self.num_open -= 1
                self._news.append(landing)

    # ------------------------------------------------------------ the step loop's

    def withdraw(self, index: int) -> bool:
        """Take a block back to compute it. False: it is there, or is being written this moment."""
        with self._lock:
            if self._states[index] == Fill.WANTED:
                self._states[index] = Fill.WITHDRAWN
                self.num_open -= 1
            return self._states[index] in (Fill.WITHDRAWN, Fill.FAILED)

    def withdraw_all(self) -> list[int]:
        """Take back everything, and so end the fetch; return the blocks that are being written this moment."""
        with self._lock:
            states = self._states
            self.num_open -= states.count(Fill.WANTED)
            self._states = states.replace(b"\0", bytes([Fill.WITHDRAWN]))
            return [index for index, state in enumerate(self._states) if state == Fill.FILLING]

    def take_news(self) -> list[Landing]:
        """Return what has been settled since the last call, in order of time."""
        if not self._news:
            return []
        with self._lock:
            news, self._news = self._news, []
        return news


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
