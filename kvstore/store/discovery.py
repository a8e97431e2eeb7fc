"""Asks the bucket, in the background, for blocks that are not known here.

A lookup never waits: it answers from what is known, says `s3: unknown` of what the bucket was not asked for, and
leaves a question here. What is found enters the catalog, so that the next lookup and fetch hit; what is not there is
remembered for a while. Questions wait behind everything else, and are dropped where there are too many.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore.bucket.prefix_search import MAX_ASKED
from kvstore.core.block import BlockMeta
from kvstore.core.counts import Counts
from kvstore.core.key import KEY_BYTES, BlockKey
from kvstore.core.outcome import Outcome, TierKind
from kvstore.store.borrowed import Borrowed
from kvstore.store.catalog import Catalog
from kvstore.store.link import WorkerLink
from kvstore.worker import ops

REMEMBER_MISS_S: Final = 60.0
_MAX_MISSES = 65_536
_MAX_QUESTIONS = 64
_MAX_OUT = 2
_AGAIN_AFTER_S = 5.0
# About 2 ms of the control thread.
_ENTERED_PER_TURN = 128


@dataclass(frozen=True, slots=True)
class _Question:
    """`keys` are the first blocks that are not known, joined; the first of them has `parent` and `depth`."""

    namespace: int
    parent: BlockKey
    depth: int
    keys: bytes

    @property
    def first(self) -> BlockKey:
        return BlockKey(self.keys[:KEY_BYTES])


class Discovery:
    """Owned by the control thread."""

    def __init__(
        self,
        catalog: Catalog,
        link: WorkerLink,
        borrowed: Borrowed,
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._link = link
        self._borrowed = borrowed
        self._clock = clock
        self._waiting: OrderedDict[BlockKey, _Question] = OrderedDict()
        self._out: set[BlockKey] = set()
        self._found: deque[tuple[_Question, int, int]] = deque()
        self._misses: OrderedDict[BlockKey, float] = OrderedDict()
        self._not_before = 0.0
        self.counts = Counts()

    def __len__(self) -> int:
        """How many questions are still to be answered, or answers to be entered."""
        return len(self._waiting) + len(self._out) + len(self._found)

    def look(self, namespace: int, keys: bytes, num_known: int) -> Outcome:
        """Say of the block behind the first `num_known` ones whether the bucket has it: MISS (it was asked lately), or
        UNKNOWN, and then it will be asked. `keys` are those of a whole prefix."""
        start = num_known * KEY_BYTES
        first = BlockKey(keys[start : start + KEY_BYTES])
        until = self._misses.get(first)
        if until is not None and self._clock() < until:
            return Outcome.MISS
        self.counts.add("unknown_lookups")
        if first in self._waiting or first in self._out:
            return Outcome.UNKNOWN
        if len(self._waiting) >= _MAX_QUESTIONS:
            self.counts.add("dropped")
            return Outcome.UNKNOWN
        root = self._catalog.namespaces[namespace].root
        parent = BlockKey(keys[start - KEY_BYTES : start] if num_known else root)
        tail = keys[start : start + MAX_ASKED * KEY_BYTES]
        self._waiting[first] = _Question(namespace, parent, num_known, tail)
        return Outcome.UNKNOWN

    def lost(self, key: BlockKey) -> None:
        """The bucket turned out not to have the block."""
        self._remember_miss(key)

    def pump(self, now: float) -> None:
        """Enter some of what was found; ask, where nothing else wants the bucket."""
        self._enter()
        while (
            self._waiting
            and len(self._out) < _MAX_OUT
            and now >= self._not_before
            and self._link.ready
            and not self._link.is_loading
        ):
            first, question = self._waiting.popitem(last=False)
            self._out.add(first)
            self._ask(question)

    # ------------------------------------------------------------ private

    def _ask(self, question: _Question) -> None:
        def answered(result: ops.Result) -> None:
            self._out.discard(question.first)
            if result.outcome != Outcome.OK:
                self.counts.add("unanswered")
                self._not_before = self._clock() + _AGAIN_AFTER_S
                return
            self.counts.add("answered")
            self.counts.add("found_blocks", result.count)
            if result.count * KEY_BYTES < len(question.keys):
                start = result.count * KEY_BYTES
                self._remember_miss(BlockKey(question.keys[start : start + KEY_BYTES]))
            if result.count:
                self._found.append((question, 0, result.count))

        self._link.record(ops.Discover(self._link.next_op(), question.keys), answered)

    def _remember_miss(self, key: BlockKey) -> None:
        self._misses[key] = self._clock() + REMEMBER_MISS_S
        self._misses.move_to_end(key)
        if len(self._misses) > _MAX_MISSES:
            self._misses.popitem(last=False)

    def _enter(self) -> None:
        room = _ENTERED_PER_TURN
        while self._found and room:
            question, start, end = self._found.popleft()
            stop = min(end, start + room)
            room -= stop - start
            if self._enter_some(question, start, stop) and stop < end:
                self._found.appendleft((question, stop, end))

    def _enter_some(self, question: _Question, start: int, stop: int) -> bool:
        """Return whether the catalog took them all."""
        info = self._catalog.namespaces[question.namespace]
        for index in range(start, stop):
            key, parent = _key(question.keys, index), question.parent if index == 0 else _key(question.keys, index - 1)
            meta = BlockMeta(key, parent, info.digest, question.depth + index, info.payload_bytes)
            block = self._catalog.ensure(meta)
            if block < 0:
                self.counts.add("inconsistent")
                return False
            self._catalog.set_resident(block, TierKind.S3)
            self._borrowed.add(block)
        return True


def _key(keys: bytes, index: int) -> BlockKey:
    return BlockKey(keys[index * KEY_BYTES : (index + 1) * KEY_BYTES])
