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

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from policies.base import EvictableView, Hint, Ids, Names
from policies.eviction.expected import Expected, Told
from policies.eviction.hazards import Hazards
from policies.eviction.kinds import HINT_KINDS, PLACE_KINDS, SHAPE, TAIL, kind_of, shared_kind, smooth
from policies.eviction.leafwise import own_tail
from policies.eviction.lives import Floats, Lives
from policies.eviction.open import Open
from policies.eviction.request import MAX_TURN, Ghost, Request
from policies.eviction.runs import NONE, Runs
from policies.eviction.search import search

# What nothing, an end, and an expected request say before anything was learned of them.
_HINT_FACTORS = 1.0, 0.01, 4.0
# A priority is worth so many times the index.
_PRIORITY_FACTOR = 4.0
_SAMPLE = 128
# Where the sample does not do: so many leaves, or all.
_LARGE_SAMPLE = 16_384
_TIE = 1e-6
_LEARN_EVERY = 128
_LEARN_FIRST = 16, 32, 64, 96
_MAX_SEEN = 32_768


class Gittins:
    """The same for the same calls and seed."""

    def __init__(self, view: EvictableView, clock: Callable[[], float], seed: int = 0) -> None:
        self._view = view
        self._clock = clock
        self._random = np.random.default_rng(seed)
        self._hazards = Hazards(SHAPE, _HINT_FACTORS)
        self._lives = Lives()
        self._runs = Runs(view)
        self._num_requests = 0
        self.last_request = 0
        self._seen: dict[int, Ghost] = {}
        self._open: Open[Request] = Open()
        self._expected = Expected()
        self._has_priorities = False

    def __len__(self) -> int:
        return self._runs.num_blocks

    def on_access(self, blocks: Sequence[int] | Ids) -> None:
        ids = np.asarray(blocks, dtype=np.int32)
        ids = ids[self._runs.known(ids)]
        if not len(ids):
            return
        now_s = self._clock()
        path, ends = self._runs.path(ids)
        request = self._open.take(self._view, int(ids[0]), now_s)
        if request is None:
            request = self._new_request()
        self._use(request, path, ends, ids, now_s)
        name = self._view.name(int(ids[-1]))
        self._close(name)
        told = self._expected.after(name)
        if told is not None:
            self._expect(request, told, now_s)
            self._change(request, self._own(request, int(ids[-1])))
        self._open.put(name, request, now_s)

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

    def on_request(self, names: Names, known: int) -> None:
        if known:
            self._close(int(names[known - 1]))
        self._expected.tell(names, known)

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
        runs.kind[path] = runs.kind[path] % HINT_KINDS + said * HINT_KINDS
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

    def victims(self, bytes_needed: int) -> list[int]:
        leaves = self._runs.leaves
        for most in (_SAMPLE, _LARGE_SAMPLE):
            now_s = self._clock()
            order, values = self._ordered(leaves.some(most, self._random), now_s)
            index_of = partial(self._index, now_s=now_s)
            chosen = search(self._view, self._runs, order, values, index_of, bytes_needed)
            if chosen or len(leaves) <= most:
                return chosen
        return []

    # ------------------------------------------------------------ for best.py

    def lives_at(self, blocks: Ids) -> tuple[Ids, npt.NDArray[np.int64]]:
        """Return those of the blocks that are in the tier, and the life that each is in."""
        ids = blocks[self._runs.known(blocks)]
        return ids, self._runs.life[self._runs.at[ids]]

    def worth(self, lives: Sequence[int]) -> Floats:
        """`Hazards.worth` now."""
        return self._hazards.worth(self._lives, lives, self._clock())

    def by_last_use(self) -> tuple[list[int], list[int]]:
        """`Runs.by_last_use`."""
        return self._runs.by_last_use()

    # ------------------------------------------------------------ private

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

    def _new_request(self) -> Request:
        self.last_request += 1
        return Request(self.last_request)

    def _use(self, request: Request, path: list[int], ends: list[int], ids: Ids, now_s: float) -> None:
        """These whole runs of a prefix were used again, as the next piece of the request, or its first."""
        runs = self._runs
        last = path[-1]
        if runs.request[last] != request.number:
            if not runs.is_shared[last]:
                request.gap_s = smooth(now_s - float(runs.used_s[last]), float(runs.gap_s[last]))
                request.turn = min(int(runs.turn[last]) + 1, MAX_TURN)
            else:
                request.gap_s, request.turn = None, 1
        gap_s = request.gap_s
        above = self._own(request, self._view.parent(int(ids[0])))
        kind = self._change(request, above)
        for run in path:
            self._finish(int(runs.life[run]), now_s)
            own = kind
            if runs.is_shared[run]:
                runs.gap_s[run] = shared_gap_s = smooth(now_s - float(runs.used_s[run]), float(runs.gap_s[run]))
                own = shared_kind(int(runs.fan[run]), shared_gap_s)
            else:
                runs.gap_s[run] = gap_s or 0.0
                if runs.is_tail[run] and not runs.kids[run]:
                    own = kind + TAIL * PLACE_KINDS
            runs.kind[run] = own
        runs.priority[path] = 0
        begun = self._begun(request, self._view.parent(int(ids[0])))
        if begun != NONE:
            path, ends = [begun, *path], [0, *ends]
        if len(path) > 1:
            path = runs.join(path, ends, ids)
        if begun != NONE:
            # Whole again: the last piece ended within it.
            if runs.is_shared[begun]:
                runs.kind[begun] = shared_kind(int(runs.fan[begun]), float(runs.gap_s[begun]))
                self._hazards.saw(int(runs.kind[begun]))
                self._lives.set_kind(int(runs.life[begun]), int(runs.kind[begun]))
            path = path[1:]
        for run in path:
            self._begin(run, int(runs.kind[run]), now_s, request)

    def _insert(self, ids: Ids) -> None:
        """New blocks, each the parent of the next."""
        now_s = self._clock()
        runs = self._runs
        parent = self._view.parent(int(ids[0]))
        request = self._open.take(self._view, int(ids[0]), now_s)
        if request is None:
            request = self._new_request()
            if runs.has(parent):
                # Whoever continues it has used it, but has not asked for it here.
                run = int(runs.at[parent])
                if int(runs.last[run]) != parent:
                    runs.cut(parent)
                self._use(request, [run], [0], np.array([parent], dtype=np.int32), now_s)
        is_first = not request.is_counted
        names = self._view.names_of(ids).tolist()
        told = self._expected.take(names[0])
        if told is not None:
            self._expect(request, told, now_s)
        request.to_come = max(0, request.to_come - len(ids))
        above = self._own(request, parent)
        if not is_first:
            self._forget_piece(request)
            above = self._end_tail(request, above)
        known = self._seen
        seen = [(at + 1, known[name]) for at, name in enumerate(names) if name in known]
        start = 0
        for stop, ghost in seen:
            self._finish(ghost.life, now_s)
            if ghost.fan > 1:
                # What more than one continued comes back as that, on its own.
                run = runs.add(ids[start:stop], is_tail=False)
                runs.fan[run], runs.is_shared[run] = ghost.fan, True
                runs.gap_s[run] = shared_gap_s = smooth(now_s - ghost.used_s, ghost.gap_s)
                shared = Request(request.number)
                self._begin(run, shared_kind(ghost.fan, shared_gap_s), now_s, shared)
                start = stop
        request.num_come += len(ids)
        request.num_new = max(request.num_new, request.num_come)
        if seen and not request.to_come:
            stop, ghost = seen[-1]
            request.num_new = request.num_come = len(ids) - stop
            request.follows(ghost, now_s)
        kind = self._change(request, above)
        # The last block that has come is the tail of the prompt unless more is known to come.
        end = len(ids) - (not request.to_come)
        if start < end:
            body = above[0] if above and not start else NONE
            if body != NONE and runs.life[body] == request.body and not runs.kids[body] and runs.kind[body] == kind:
                runs.extend(body, ids[:end])
            else:
                body = runs.add(ids[start:end], is_tail=False)
                self._begin(body, kind, now_s, request)
                runs.gap_s[body] = request.gap_s or 0.0
            request.body = int(runs.life[body])
            request.remembered = request.end if request.to_come and request.end >= 0 else names[end - 1]
            self._remember(request.remembered, body)
        elif above and not start:
            request.remembered = self._view.name(parent)
            self._remember(request.remembered, above[0])
        if start <= end < len(ids):
            tail = runs.add(ids[end:], is_tail=True)
            self._begin(tail, kind + TAIL * PLACE_KINDS, now_s, request)
            runs.gap_s[tail] = request.gap_s or 0.0
        self._open.put(names[-1], request, now_s)
        if is_first:
            request.is_counted = True
            self._num_requests += 1
            if self._num_requests % _LEARN_EVERY == 0 or self._num_requests in _LEARN_FIRST:
                self._hazards.learn(self._lives, now_s)

    def _begun(self, request: Request, end: int) -> int:
        """Return the run that the request's last piece ended in, or NONE."""
        runs = self._runs
        run = int(runs.at[end]) if runs.has(end) else NONE
        if run == NONE or runs.request[run] != request.number or runs.priority[run]:
            return NONE
        return run

    def _close(self, name: int) -> None:
        """A request begins that is known up to here; so no other that has inserted what comes to here goes on."""
        self._open.close(name, lambda request: request.is_counted)

    def _expect(self, request: Request, told: Told, now_s: float) -> None:
        """Take into account from the beginning what was told to come."""
        request.to_come, names = told.num_blocks, told.names
        request.end = int(names[-2]) if len(names) > 1 else -1
        request.num_new, request.num_come = request.to_come, 0
        for at, later in enumerate(reversed(names.tolist())):
            ghost = self._seen.get(later)
            if ghost is not None and ghost.request != request.number:
                request.num_new, request.num_come = at, at - request.to_come
                request.follows(ghost, now_s)
                break

    def _own(self, request: Request, end: int) -> list[int]:
        """Return the runs of the request that are not shared, from the block it has come to upwards."""
        runs = self._runs
        found: list[int] = []
        run = int(runs.at[end]) if runs.has(end) else NONE
        while run != NONE and runs.request[run] == request.number and not runs.is_shared[run]:
            found.append(run)
            run = runs.parent(run)
        return found

    def _change(self, request: Request, above: list[int]) -> int:
        """Put the request's runs into the class that it is of by now, and return that."""
        runs = self._runs
        kind = kind_of(request.num_new, request.gap_s, request.turn)
        for run in above:
            said = int(runs.kind[run]) // HINT_KINDS * HINT_KINDS
            runs.kind[run] = kind + said
            runs.is_tail[run] = False
            runs.gap_s[run] = request.gap_s or 0.0
            runs.turn[run] = request.turn
            self._lives.set_kind(int(runs.life[run]), kind + said)
            self._hazards.saw(kind + said)
        return kind

    def _end_tail(self, request: Request, above: list[int]) -> list[int]:
        """The request goes on: what was its tail is none, and joins what was inserted before it."""
        runs = self._runs
        if not above or not runs.is_tail[above[0]]:
            return above
        tail = above[0]
        runs.is_tail[tail] = False
        if len(above) == 1 or runs.life[above[1]] != request.body:
            if request.body < 0:
                request.body = int(runs.life[tail])
            return above
        into = above[1]
        life = int(runs.life[tail])
        if runs.priority[into] == runs.priority[tail]:
            blocks = np.array(runs.blocks(tail, int(runs.length[tail])), dtype=np.int32)
            if runs.join([into, tail], [0, len(blocks)], blocks) == [into]:
                self._lives.void(life)
                return above[1:]
        return above

    def _forget_piece(self, request: Request) -> None:
        """What a request has come to is remembered only while it has not gone on."""
        ghost = self._seen.get(request.remembered)
        if ghost is not None and ghost.fan <= 1 and ghost.request == request.number:
            del self._seen[request.remembered]

    def _begin(self, run: int, kind: int, now_s: float, request: Request) -> None:
        runs = self._runs
        runs.used_s[run] = now_s
        runs.kind[run] = kind
        runs.turn[run] = request.turn
        runs.request[run] = request.number
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
        self._seen[name] = Ghost(
            int(runs.life[run]),
            float(runs.used_s[run]),
            int(runs.turn[run]),
            float(runs.gap_s[run]),
            int(runs.fan[run]) if runs.is_shared[run] else 0,
            int(runs.request[run]),
        )
        if len(self._seen) > _MAX_SEEN:
            del self._seen[next(iter(self._seen))]
