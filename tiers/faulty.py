"""A tier that fails to a plan: wraps any other and puts outcomes, delays and exceptions in its way, for tests.

Covers: what the tier above must survive. Without a plan for a call it is the inner tier. A planned outcome stands for
a medium that did not do it: a block that is answered UNAVAILABLE was not written, one that is answered CORRUPT was
deleted, as `Tier` says.
"""

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Literal, Protocol

from kvstore.core.block import BlockMeta
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome, TierKind
from tiers.base import RecoveredBatch, Tier, Usage
from tiers.batch import check_lengths

Verb = Literal["contains", "read", "write", "delete"]

# What each call may answer beside what it answers when all is well (`tiers/base.py`).
FAULTS: dict[Verb, tuple[Outcome, ...]] = {
    "contains": (Outcome.UNAVAILABLE,),
    "read": (Outcome.UNAVAILABLE, Outcome.CORRUPT, Outcome.MISS),
    "write": (Outcome.UNAVAILABLE, Outcome.FULL),
    "delete": (Outcome.UNAVAILABLE,),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one block in one call: first the delay, then the exception or the outcome (None: none)."""

    outcome: Outcome | None = None
    error: Exception | None = None
    delay_s: float = 0.0


class FaultPlan(Protocol):
    """Decides, block by block."""

    def next_fault(self, verb: Verb, key: BlockKey) -> Fault | None:
        """Return what is to happen to this block in this call, or None for nothing. Any thread may ask."""
        ...


@dataclass(slots=True)
class ScriptedPlan:
    """The faults of each verb, in order, one per block (None: that block is left alone); none after the last."""

    faults: dict[Verb, deque[Fault | None]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def add(self, verb: Verb, faults: Iterable[Fault | None]) -> "ScriptedPlan":
        with self._lock:
            self.faults.setdefault(verb, deque()).extend(faults)
        return self

    def next_fault(self, verb: Verb, key: BlockKey) -> Fault | None:
        with self._lock:
            left = self.faults.get(verb)
            return left.popleft() if left else None


class SeededPlan:
    """Each block of each call fails with probability `rate`, in one of the ways the call may fail; the same seed gives
    the same faults for the same calls."""

    def __init__(self, seed: int, rate: float, *, delay_s: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._lock = Lock()
        self._rate = rate
        self._delay_s = delay_s

    def next_fault(self, verb: Verb, key: BlockKey) -> Fault | None:
        with self._lock:
            if self._random.random() >= self._rate:
                return None
            outcome = self._random.choice(FAULTS[verb])
            return Fault(outcome, delay_s=self._random.uniform(0, self._delay_s))


class FaultyTier:
    """Implements `tiers.base.Tier` around `inner`, which it closes at the end. Thread-safe if `inner` is."""

    def __init__(self, inner: Tier, plan: FaultPlan, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.inner = inner
        self._plan = plan
        self._sleep = sleep
        self._lock = Lock()
        self._counts: Counter[str] = Counter()

    @property
    def kind(self) -> TierKind:
        return self.inner.kind

    def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self._around("contains", keys, lambda spared: self.inner.contains([keys[i] for i in spared]))

    def read(self, blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> list[Outcome]:
        check_lengths(blocks, into)
        return self._around(
            "read",
            [meta.key for meta in blocks],
            lambda spared: self.inner.read([blocks[i] for i in spared], [into[i] for i in spared]),
        )

    def write(self, blocks: Sequence[BlockMeta], payloads: Sequence[memoryview]) -> list[Outcome]:
        check_lengths(blocks, payloads)
        return self._around(
            "write",
            [meta.key for meta in blocks],
            lambda spared: self.inner.write([blocks[i] for i in spared], [payloads[i] for i in spared]),
        )

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return self._around("delete", keys, lambda spared: self.inner.delete([keys[i] for i in spared]))

    def usage(self) -> Usage:
        return self.inner.usage()

    def recover_batches(self) -> Iterator[RecoveredBatch]:
        return self.inner.recover_batches()

    def faults(self) -> dict[str, int]:
        """Return how often which outcome was put in the way."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        self.inner.close()

    def _around(
        self, verb: Verb, keys: Sequence[BlockKey], call: Callable[[Sequence[int]], list[Outcome]]
    ) -> list[Outcome]:
        planned = [self._carry_out(self._plan.next_fault(verb, key)) for key in keys]
        broken = [key for key, outcome in zip(keys, planned, strict=True) if outcome is Outcome.CORRUPT]
        if broken:
            self.inner.delete(broken)
        spared = [index for index, outcome in enumerate(planned) if outcome is None]
        answered = dict(zip(spared, call(spared), strict=True))
        return [answered[index] if outcome is None else outcome for index, outcome in enumerate(planned)]

    def _carry_out(self, fault: Fault | None) -> Outcome | None:
        if fault is None:
            return None
        if fault.delay_s:
            self._sleep(fault.delay_s)
        if fault.error is not None:
            raise fault.error
        if fault.outcome is not None:
            with self._lock:
                self._counts[fault.outcome.label] += 1
        return fault.outcome
