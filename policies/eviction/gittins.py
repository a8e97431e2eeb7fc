"""The session-aware policy: evict the leaf whose room is least likely to be worth its while.

Blocks fall into classes by the request that used them last:

    hint    what the client said of the session
    place   a session's own; the last block of the request, which is another when the prompt goes on; or shared, which
            means continued in more than one way: then only how often, and its own gap, count
    new     how many blocks the request had that were never seen before; a long one often comes once
    gap     how long ago its prefix was used before
    turn    how often its prefix had been continued

For each class it is learned (hazards.py) when such blocks are used again. Blocks go in runs (runs.py). Of a sample of
leaves those with the lowest index go; then their parents, while they are lower than the next. What left is remembered
by name for a while, so that a session that returns after it was evicted counts as what it is and not as a new one:
without that, 1 to 2 points of token hit ratio were lost on the Mooncake traces.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.base import EvictableView, Hint, Ids
from policies.eviction.hazards import Hazards
from policies.eviction.leafwise import own_tail
from policies.eviction.lives import Lives
from policies.eviction.runs import NONE, Runs

_HINTS, _PLACES, _NEWS, _GAPS, _TURNS = _SHAPE = 3, 3, 8, 8, 7
_PLACE_KINDS = _NEWS * _GAPS * _TURNS
_HINT_KINDS = _PLACES * _PLACE_KINDS
_OWN, _TAIL, _SHARED = range(_PLACES)
# What nothing, an end, and an expected request say before anything was learned of them.
_HINT_FACTORS = 1.0, 0.01, 4.0
# A priority is worth so many times the index.
_PRIORITY_FACTOR = 4.0
_SAMPLE = 128
# Where the sample does not do: so many leaves, or all.
_LARGE_SAMPLE = 16_384
_MAX_PASSED = 2_000
_TIE = 1e-6
_NEWEST = 0.5
_SHORTEST_S = 0.25
_GAP_OCTAVES = 1.5
_LEARN_EVERY = 128
_LEARN_FIRST = 16, 32, 64, 96
_MAX_TURN = 1_000
_MAX_SEEN = 32_768


@dataclass(slots=True)
class _Request:
    """What was used last, and may be continued by what is inserted."""

    end: int
    runs: list[int]
    at_s: float
    gap_s: float | None
    turn: int
    kind: int


class _Ghost(NamedTuple):
    """What is known of a run by its last block's name, also after it left. `fan` above 1: it is shared."""

    life: int
    used_s: float
    turn: int
    gap_s: float
    fan: int


class Gittins:
    """The same for the same calls and seed."""

    def __init__(self, view: EvictableView, clock: Callable[[], float], seed: int = 0) -> None:
        self._view = view
        self._clock = clock
        self._random = np.random.default_rng(seed)
        self._hazards = Hazards(_SHAPE, _HINT_FACTORS)
        self._lives = Lives()
        self._runs = Runs(view)
        self._num_requests = 0
        self._seen: dict[int, _Ghost] = {}
        self._open: _Request | None = None
        self._has_priorities = False

    def __len__(self) -> int:
        return self._runs.num_blocks

    def on_access(self, blocks: Sequence[int] | Ids) -> None:
        ids = np.asarray(blocks, dtype=np.int32)
        ids = ids[self._runs.known(ids)]
        if not len(ids):
            return
        now_s = self._clock()
        runs = self._runs
        path, ends = runs.path(ids)
        last = path[-1]
        gap_s = None
        turn = 1
        if not runs.is_shared[last]:
            gap_s = _smooth(now_s - float(runs.used_s[last]), float(runs.gap_s[last]))
            turn = min(int(runs.turn[last]) + 1, _MAX_TURN)
        kind = _kind(0, gap_s, turn)
        for run in path:
            self._finish(int(runs.life[run]), now_s)
            own = kind
            if runs.is_shared[run]:
                runs.gap_s[run] = shared_gap_s = _smooth(now_s - float(runs.used_s[run]), float(runs.gap_s[run]))
                own = _shared_kind(int(runs.fan[run]), shared_gap_s)
            else:
                runs.gap_s[run] = gap_s or 0.0
                if runs.is_tail[run] and not runs.kids[run]:
                    own = kind + _TAIL * _PLACE_KINDS
            runs.kind[run] = own
        runs.priority[path] = 0
        if len(path) > 1:
            path = runs.join(path, ends, ids)
        for run in path:
            self._begin(run, int(runs.kind[run]), now_s, turn)
        self._open = _Request(int(ids[-1]), path, now_s, gap_s, turn, kind)

    def on_insert(self, blocks: Sequence[int] | Ids) -> None:
        ids = np.asarray(blocks, dtype=np.int32)
        if not len(ids):
            return
        runs = self._runs
        runs.grow(int(ids.max()) + 1)
        is_known = runs.known(ids)
        if is_known.any():
            self.on_access(ids[is_known])
            ids = ids[~is_known]
        if len(ids) > 1:
            # Each prefix on its own.
            breaks = (self._view.parents_of(ids)[1:] != ids[:-1]).nonzero()[0] + 1
            if len(breaks):
                if len(np.unique(ids)) != len(ids):
                    ids = ids[np.sort(np.unique(ids, return_index=True)[1])]
                    breaks = (self._view.parents_of(ids)[1:] != ids[:-1]).nonzero()[0] + 1
                for part in np.split(ids, breaks):
                    self._insert(part)
                return
        if len(ids):
            self._insert(ids)

    def on_hint(self, blocks: Sequence[int] | Ids, hint: Hint) -> None:
        ids = np.asarray(blocks, dtype=np.int32)
        ids = ids[self._runs.known(ids)]
        if not len(ids):
            return
        runs = self._runs
        path, _ = runs.path(ids)
        if hint.priority:
            self._has_priorities = True
        runs.priority[path] = hint.priority
        if hint.returns is False:
            ids = own_tail(self._view, ids)
            if not len(ids):
                return
            if int(runs.at[ids[0]]) in path:
                above = self._view.parent(int(ids[0]))
                if runs.has(above) and runs.at[above] == runs.at[ids[0]]:
                    runs.cut(above)
            path, _ = runs.path(ids)
        said = 0 if hint.returns is None else 1 + hint.returns
        runs.kind[path] = runs.kind[path] % _HINT_KINDS + said * _HINT_KINDS
        for run in path:
            self._lives.set_kind(int(runs.life[run]), int(runs.kind[run]))
            self._hazards.saw(int(runs.kind[run]))

    def on_remove(self, block: int) -> None:
        self.on_remove_many((block,))

    def on_remove_many(self, blocks: Sequence[int]) -> None:
        ids = np.asarray(blocks, dtype=np.int32)
        ids = ids[self._runs.known(ids)]
        runs = self._runs
        at = runs.at[ids]
        starts = [0, *((at[1:] != at[:-1]).nonzero()[0] + 1).tolist()] if len(ids) else []
        for block, run in zip(ids[starts].tolist(), at[starts].tolist(), strict=True):
            # Others are remembered by where their requests end.
            if runs.is_shared[run]:
                self._remember(self._view.name(block), run)
        runs.remove_many(ids)
        self._open = None

    def victims(self, bytes_needed: int) -> list[int]:
        leaves = self._runs.leaves
        for most in (_SAMPLE, _LARGE_SAMPLE):
            chosen = self._search(bytes_needed, leaves.some(most, self._random))
            if chosen or len(leaves) <= most:
                return chosen
        return []

    # ------------------------------------------------------------ private

    def _search(self, bytes_needed: int, leaves: Ids) -> list[int]:
        """Return victims among these leaves and what they leave as leaves; [] where that is not enough."""
        view, runs, now_s = self._view, self._runs, self._clock()
        order, values = self._ordered(leaves, now_s)
        at = 0
        heap: list[tuple[float, int]] = []  # what became a leaf meanwhile
        chosen: list[int] = []
        tried: set[int] = set()
        orphaned: dict[int, int] = {}
        freed_bytes = num_passed = 0
        while freed_bytes < bytes_needed and num_passed < _MAX_PASSED:
            if heap and (at == len(order) or heap[0][0] <= values[at]):
                _, run = heapq.heappop(heap)
            elif at < len(order):
                run = order[at]
                at += 1
                if run in tried:
                    continue  # drawn twice
            else:
                break
            tried.add(run)
            blocks = runs.blocks(run, bytes_needed - freed_bytes)  # a block is at least a byte
            num_children = view.children_of(np.array(blocks, dtype=np.int32)).tolist()
            num_children[0] -= orphaned.get(run, 0) - 1
            for block, children in zip(blocks, num_children, strict=True):
                if children > 1 or view.pinned(block):
                    num_passed += 1
                    break
                chosen.append(block)
                freed_bytes += view.size_bytes(block)
                if freed_bytes >= bytes_needed:
                    break
            else:
                above = runs.parent(run)
                if above != NONE:
                    orphaned[above] = orphaned.get(above, 0) + 1
                    if orphaned[above] == runs.kids[above]:
                        heapq.heappush(heap, (self._index(above, now_s), above))
        return chosen if freed_bytes >= bytes_needed else []

    def _ordered(self, leaves: Ids, now_s: float) -> tuple[list[int], list[float]]:
        """Return the leaves and their indices, the lowest index first."""
        runs = self._runs
        ages_s = now_s - runs.used_s[leaves]
        # Of equal indices what was used longest ago.
        indices = self._hazards.index(runs.kind[leaves], ages_s) * (1 - _TIE * ages_s / (ages_s + 60))
        if self._has_priorities:
            indices = indices * _PRIORITY_FACTOR ** runs.priority[leaves].astype(np.float64)
        order = np.argsort(indices)
        return leaves[order].tolist(), indices[order].tolist()

    def _index(self, run: int, now_s: float) -> float:
        runs = self._runs
        index: float = self._hazards.index_of(int(runs.kind[run]), now_s - float(runs.used_s[run]))
        return index * float(_PRIORITY_FACTOR ** int(runs.priority[run]))

    def _insert(self, ids: Ids) -> None:
        """New blocks, each the parent of the next."""
        now_s = self._clock()
        runs = self._runs
        before = self._open
        if before is not None and (before.at_s != now_s or self._view.parent(int(ids[0])) != before.end):
            before = None
        gap_s = before.gap_s if before else None
        turn = before.turn if before else 1
        num_new = len(ids)
        if before is None and runs.has(self._view.parent(int(ids[0]))):
            gap_s, turn = self._goes_on(int(runs.at[self._view.parent(int(ids[0]))]))
        names = self._view.names_of(ids).tolist()
        known = self._seen
        seen = [(at + 1, known[name]) for at, name in enumerate(names) if name in known]
        start = 0
        for stop, ghost in seen:
            self._finish(ghost.life, now_s)
            if ghost.fan > 1:
                # What more than one continued comes back as that, on its own.
                run = runs.add(ids[start:stop], is_tail=False)
                runs.fan[run], runs.is_shared[run] = ghost.fan, True
                runs.gap_s[run] = shared_gap_s = _smooth(now_s - ghost.used_s, ghost.gap_s)
                self._begin(run, _shared_kind(ghost.fan, shared_gap_s), now_s, 1)
                start = stop
        if seen:
            stop, ghost = seen[-1]
            num_new = len(ids) - 1 - stop + 1
            gap_s, turn = None, 1
            if ghost.fan <= 1:
                gap_s, turn = _smooth(now_s - ghost.used_s, ghost.gap_s), min(ghost.turn + 1, _MAX_TURN)
        kind = _kind(num_new, gap_s, turn)
        if before is not None:
            for above in before.runs:
                if runs.kind[above] in (before.kind, before.kind + _TAIL * _PLACE_KINDS):
                    runs.is_tail[above] = False
                    runs.kind[above] = kind
                    self._lives.set_kind(int(runs.life[above]), kind)
                    runs.gap_s[above] = gap_s or 0.0
                runs.turn[above] = turn
            self._hazards.saw(kind)
        end = len(ids) - 1
        if start < end:
            body = runs.add(ids[start:end], is_tail=False)
            self._begin(body, kind, now_s, turn)
            runs.gap_s[body] = gap_s or 0.0
            self._remember(names[end - 1], body)
        elif before is not None and not start:
            self._remember(self._view.name(before.end), before.runs[-1])
        if start <= end:
            tail = runs.add(ids[end:], is_tail=True)
            self._begin(tail, kind + _TAIL * _PLACE_KINDS, now_s, turn)
            runs.gap_s[tail] = gap_s or 0.0
        self._open = None
        self._num_requests += 1
        if self._num_requests % _LEARN_EVERY == 0 or self._num_requests in _LEARN_FIRST:
            self._hazards.learn(self._lives, now_s)

    def _goes_on(self, run: int) -> tuple[float | None, int]:
        """A request's blocks come piece by piece: what was its tail is none. Return its gap and turn."""
        runs = self._runs
        if not runs.is_tail[run] or runs.kids[run] or int(runs.kind[run]) % _HINT_KINDS // _PLACE_KINDS != _TAIL:
            return None, 1
        runs.is_tail[run] = False
        runs.kind[run] -= _TAIL * _PLACE_KINDS
        self._hazards.saw(int(runs.kind[run]))
        self._lives.set_kind(int(runs.life[run]), int(runs.kind[run]))
        gap_s, turn = float(runs.gap_s[run]) or None, int(runs.turn[run])
        above = runs.parent(run)
        if above != NONE and runs.turn[above] == turn:
            self._lives.void(int(runs.life[run]))
            runs.join([above, run], [0, int(runs.length[run])], np.array(runs.blocks(run, 1), dtype=np.int32))
        return gap_s, turn

    def _begin(self, run: int, kind: int, now_s: float, turn: int) -> None:
        runs = self._runs
        runs.used_s[run] = now_s
        runs.kind[run] = kind
        runs.turn[run] = turn
        runs.life[run] = self._lives.begin(kind, now_s)
        self._hazards.saw(kind)

    def _finish(self, life: int, now_s: float) -> None:
        ended = self._lives.finish(life, now_s)
        if ended is not None:
            self._hazards.end(*ended)

    def _remember(self, name: int, run: int) -> None:
        """The last block of a run, by which that is known when it returns."""
        runs = self._runs
        self._seen.pop(name, None)
        self._seen[name] = _Ghost(
            int(runs.life[run]),
            float(runs.used_s[run]),
            int(runs.turn[run]),
            float(runs.gap_s[run]),
            int(runs.fan[run]) if runs.is_shared[run] else 0,
        )
        if len(self._seen) > _MAX_SEEN:
            del self._seen[next(iter(self._seen))]


def _smooth(gap_s: float, before_s: float) -> float:
    gap_s = max(gap_s, _SHORTEST_S)
    return gap_s**_NEWEST * before_s ** (1 - _NEWEST) if before_s else gap_s


def _kind(num_new: int, gap_s: float | None, turn: int) -> int:
    new = min((num_new + 1).bit_length() - 1, _NEWS - 1)
    gap = 0 if gap_s is None else min(int(math.log2(max(gap_s, 1.0)) / _GAP_OCTAVES) + 1, _GAPS - 1)
    return (new * _GAPS + gap) * _TURNS + min(turn - 1 if turn < 3 else turn.bit_length(), _TURNS - 1)


def _shared_kind(fan: int, gap_s: float) -> int:
    gap = min(int(math.log2(max(gap_s, 0.125))) + 4, _GAPS * _TURNS - 1)
    return _SHARED * _PLACE_KINDS + min(fan.bit_length(), _NEWS - 1) * _GAPS * _TURNS + gap
