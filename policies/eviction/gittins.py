"""The session-aware policy: evict the leaf whose room is least likely to be worth its while.

Blocks fall into classes by the request that used them last:

    tail    the last block of the request, or not: a partial one is another when the prompt goes on
    new     how many blocks the request had that were never seen before; a long one often comes once
    gap     how long ago its prefix was used before
    turn    how often its prefix had been continued

For each class it is learned (hazards.py) when such blocks are used again. Of a sample of leaves those with the lowest
index go; then their parents, while they are lower than the next. What left is remembered by name for a while, so that a
session that returns after it was evicted counts as what it is and not as a new one: without that, 1 to 2 points of
token hit ratio were lost on the Mooncake traces.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from policies.base import EvictableView, Hint, Ids
from policies.eviction.hazards import Classes, Floats, Hazards
from policies.eviction.leafwise import grown, own_tail
from policies.eviction.leaves import Leaves

_HINTS, _TAILS, _NEWS, _GAPS, _TURNS = _SHAPE = 3, 2, 8, 8, 5
_HINT_KINDS = _TAILS * _NEWS * _GAPS * _TURNS
# What nothing, an end, and an expected request say before anything was learned of them.
_HINT_FACTORS = 1.0, 0.01, 4.0
# A priority is worth so many times the index.
_PRIORITY_FACTOR = 4.0
_SAMPLE = 256
# Where the sample does not do: so many leaves, or all.
_LARGE_SAMPLE = 16_384
_MAX_PASSED = 2_000
_LEARN_EVERY = 64
# The memory of lives should span this many times what is in the tier.
_SPAN = 8
_LIVES = 1 << 16
_MIN_ROWS = 1024
_MAX_TURN = 1_000
_ABSENT: Final = -1


@dataclass(frozen=True, slots=True)
class _Request:
    """What a request's blocks have in common. `path`: its blocks so far, in prefix order."""

    path: Ids
    at_s: float
    gap_s: float | None
    turn: int


class Gittins:
    """Columns of 15 bytes by block id, the leaves, and what was learned. The same for the same calls and seed."""

    def __init__(self, view: EvictableView, clock: Callable[[], float], seed: int = 0) -> None:
        self._view = view
        self._clock = clock
        self._random = np.random.default_rng(seed)
        self._hazards = Hazards(_SHAPE, _HINT_FACTORS)
        self._leaves = Leaves(_MIN_ROWS)
        self._count = 0
        self._num_requests = 0
        self._used_s: Floats = np.zeros(_MIN_ROWS)
        self._kinds: Classes = np.full(_MIN_ROWS, _ABSENT, dtype=np.int16)
        self._turns: npt.NDArray[np.int16] = np.zeros(_MIN_ROWS, dtype=np.int16)
        # What was used last, and may be continued by what is inserted.
        self._open: _Request | None = None
        # Only of blocks that have one.
        self._priorities: dict[int, int] = {}

    def __len__(self) -> int:
        return self._count

    def on_access(self, blocks: Sequence[int] | Ids) -> None:
        ids = np.asarray(blocks, dtype=np.int32)
        ids = ids[ids < len(self._kinds)]
        ids = ids[self._kinds[ids] != _ABSENT]
        if not len(ids):
            return
        now_s = self._clock()
        last = int(ids[-1])
        turn = min(int(self._turns[last]) + 1, _MAX_TURN)
        self._open = _Request(ids, now_s, now_s - float(self._used_s[last]), turn)
        self._begin(ids, now_s)
        self._classify(self._open, ids, num_new=0, has_tail=True)

    def on_insert(self, blocks: Sequence[int] | Ids) -> None:
        ids = np.asarray(blocks, dtype=np.int32)
        if not len(ids):
            return
        self._grow(int(ids.max()) + 1)
        is_new = self._kinds[ids] == _ABSENT
        if not is_new.all():
            self.on_access(ids[~is_new])
            ids = ids[is_new]
        if len(ids) > 1:
            ids = ids[np.sort(np.unique(ids, return_index=True)[1])]
        if not len(ids):
            return
        now_s = self._clock()
        before = self._open if self._open is not None and self._continues(ids, self._open, now_s) else None
        request, num_new = self._request(ids, before, now_s)
        self._count += len(ids)
        self._begin(ids, now_s)
        self._classify(request, ids, num_new, has_tail=True)
        if before is not None:
            self._classify(request, before.path, num_new, has_tail=False)
        self._open = None
        for parent in self._view.parents_of(ids).tolist():
            if self._has(parent):
                self._leaves.discard(parent)
        for block in ids[self._view.children_of(ids) == 0].tolist():
            self._leaves.add(block)
        self._num_requests += 1
        if self._num_requests % _LEARN_EVERY == 0:
            self._hazards.learn(now_s)

    def on_hint(self, blocks: Sequence[int] | Ids, hint: Hint) -> None:
        ids = np.asarray(blocks, dtype=np.int32)
        ids = ids[ids < len(self._kinds)]
        ids = ids[self._kinds[ids] != _ABSENT]
        for block in ids.tolist():
            self._priorities.pop(block, None)
            if hint.priority:
                self._priorities[block] = hint.priority
        if hint.returns is False:
            ids = own_tail(self._view, ids)
        said = 0 if hint.returns is None else 1 + hint.returns
        self._kinds[ids] = self._kinds[ids] % _HINT_KINDS + said * _HINT_KINDS
        for block in ids[self._sampled(ids)].tolist():
            self._hazards.classify(self._view.name(block), int(self._kinds[block]), int(self._turns[block]))

    def on_remove(self, block: int) -> None:
        if not self._has(block):
            return
        self._leaves.discard(block)
        self._priorities.pop(block, None)
        self._kinds[block] = _ABSENT
        self._count -= 1
        self._open = None
        parent = self._view.parent(block)
        if self._has(parent) and self._view.children(parent) <= 1:  # the block itself is still counted
            self._leaves.add(parent)

    def victims(self, bytes_needed: int) -> list[int]:
        for most in (_SAMPLE, _LARGE_SAMPLE):
            chosen = self._search(bytes_needed, self._leaves.some(most, self._random))
            if chosen or len(self._leaves) <= most:
                return chosen
        return []

    # ------------------------------------------------------------ private

    def _search(self, bytes_needed: int, leaves: Ids) -> list[int]:
        """Return victims among these leaves and what they leave as leaves; [] where that is not enough."""
        view, now_s = self._view, self._clock()
        # Of equal indices what was used longest ago.
        indices = self._index(leaves, now_s)
        heap = list(zip(indices.tolist(), self._used_s[leaves].tolist(), leaves.tolist(), strict=True))
        heapq.heapify(heap)
        chosen: list[int] = []
        orphaned: dict[int, int] = {}
        freed_bytes = num_passed = 0
        while heap and freed_bytes < bytes_needed and num_passed < _MAX_PASSED:
            _, _, block = heapq.heappop(heap)
            if view.pinned(block):
                num_passed += 1
                continue
            chosen.append(block)
            freed_bytes += view.size_bytes(block)
            parent = view.parent(block)
            if self._has(parent):
                orphaned[parent] = orphaned.get(parent, 0) + 1
                if orphaned[parent] == view.children(parent):
                    ids = np.array([parent], dtype=np.int32)
                    heapq.heappush(heap, (float(self._index(ids, now_s)[0]), float(self._used_s[parent]), parent))
        return chosen if freed_bytes >= bytes_needed else []

    def _index(self, blocks: Ids, now_s: float) -> Floats:
        indices = self._hazards.index(self._kinds[blocks], now_s - self._used_s[blocks])
        if self._priorities:
            priorities = np.array([self._priorities.get(block, 0) for block in blocks.tolist()])
            indices = indices * _PRIORITY_FACTOR**priorities
        return indices

    def _request(self, ids: Ids, before: _Request | None, now_s: float) -> tuple[_Request, int]:
        """Return what the new blocks' request is, and how many of them were never seen before."""
        gap_s = before.gap_s if before else None
        turn = before.turn if before else 1
        num_new = len(ids)
        is_sampled = self._sampled(ids)
        for at in np.flatnonzero(is_sampled)[::-1].tolist():
            seen = self._hazards.last_seen(self._view.name(int(ids[at])))
            if seen is not None:
                gap_s, turn = now_s - seen[0], min(seen[1] + 1, _MAX_TURN)
                num_new = len(ids) - 1 - at
                break
        path = np.concatenate([before.path, ids]) if before else ids
        return _Request(path, now_s, gap_s, turn), num_new

    def _continues(self, ids: Ids, request: _Request, now_s: float) -> bool:
        return request.at_s == now_s and self._view.parent(int(ids[0])) == int(request.path[-1])

    def _begin(self, ids: Ids, now_s: float) -> None:
        self._used_s[ids] = now_s
        if self._priorities:
            for block in ids.tolist():
                self._priorities.pop(block, None)
        for block in ids[self._sampled(ids)].tolist():
            self._hazards.begin(self._view.name(block), now_s)

    def _classify(self, request: _Request, ids: Ids, num_new: int, *, has_tail: bool) -> None:
        new = min(int(math.log2(num_new + 1)), _NEWS - 1)
        gap = 0
        if request.gap_s is not None:
            gap = min(int(math.log2(max(request.gap_s, 1.0)) / 1.5) + 1, _GAPS - 1)
        turn = min(request.turn - 1 if request.turn < 3 else int(math.log2(request.turn)) + 1, _TURNS - 1)
        kind = (new * _GAPS + gap) * _TURNS + turn
        self._kinds[ids] = kind
        self._turns[ids] = request.turn
        if has_tail:
            self._kinds[ids[-1]] = kind + _NEWS * _GAPS * _TURNS
        for block in ids[self._sampled(ids)].tolist():
            self._hazards.classify(self._view.name(block), int(self._kinds[block]), request.turn)

    def _sampled(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return which of the blocks are watched: all, or in a large tier a share that its size decides."""
        one_in = 1 << max(0, (_SPAN * self._count // _LIVES).bit_length())
        if one_in == 1:
            return np.ones(len(ids), dtype=np.bool_)
        names = np.array([self._view.name(block) for block in ids.tolist()], dtype=np.uint64)
        mixed = (names * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
        is_sampled: npt.NDArray[np.bool_] = (mixed & np.uint64(one_in - 1)) == 0
        return is_sampled

    def _has(self, block: int) -> bool:
        return 0 <= block < len(self._kinds) and bool(self._kinds[block] != _ABSENT)

    def _grow(self, rows: int) -> None:
        old = len(self._kinds)
        if rows > old:
            rows = max(rows, 2 * old)
            self._used_s = grown(self._used_s, rows)
            self._turns = grown(self._turns, rows)
            self._kinds = grown(self._kinds, rows)
            self._kinds[old:] = _ABSENT
            self._leaves.grow(rows)
