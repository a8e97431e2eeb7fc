"""The session-aware policy: evict the leaf whose room is least likely to be worth its while.

Blocks fall into classes by the request that used them last:

    hint    what the client said of the session
    place   a session's own; the last block of the request, which is another when the prompt goes on; or shared, which
            means continued in more than one way: then only how often, and its own gap, count
    new     how many blocks the request had that were never seen before, or were a last one that had left; a long one
            often comes once
    gap     how long ago its prefix was used before
    turn    how often its prefix had been continued

For each class it is learned (hazards.py) when such blocks are used again. Blocks go in runs (runs.py). Of a sample of
leaves those with the lowest index go; then their parents, while they are lower than the next. What left is remembered
by name for a while, so that a session that returns after it was evicted counts as what it is and not as a new one
(without that, 1 to 2 points of token hit ratio were lost on the Mooncake traces), and a prefix that requests share as
shared (past.py); a last block that comes back was used again, though it had left (tails.py). What came with one request
and was not used since is worth less the further behind it is (reach.py).
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from policies.base import EvictableView, Hint, Ids, Names
from policies.eviction.expected import Expected, Told
from policies.eviction.kinds import HINT_KINDS, PLACE_KINDS, SHORTEST_S, TAIL, kind_of, shared_kind, smooth
from policies.eviction.leafwise import own_tail
from policies.eviction.lives import Floats
from policies.eviction.open import Open
from policies.eviction.past import FORGOTTEN, Past
from policies.eviction.request import MAX_TURN, Ends, Request
from policies.eviction.runs import AT_ROOT, BEHIND_OWN, BEHIND_SHARED, NONE, USED, Runs
from policies.eviction.search import search
from policies.eviction.tails import Tails
from policies.eviction.worth import Numbers, Worth

_SAMPLE = 128
# Where the sample does not do: so many leaves, or all.
_LARGE_SAMPLE = 16_384
_LEARN_FIRST = 16, 32, 64, 96
_LEARN_EVERY = 128
# Later it takes more of them to tell anything new.
_LEARN_LATER, _LATER = 512, 4_096


class Gittins:
    """The same for the same calls and seed."""

    def __init__(self, view: EvictableView, clock: Callable[[], float], seed: int = 0) -> None:
        self._view = view
        self._clock = clock
        self._random = np.random.default_rng(seed)
        self._runs = Runs(view)
        self._worth = Worth(self._runs)
        self._past = Past()
        self._tails = Tails()
        self._num_requests = 0
        self.last_request = 0
        self._ends = Ends()
        self._open: Open[Request] = Open()
        self._expected = Expected()

    def __len__(self) -> int:
        return self._runs.num_blocks

    def on_access(self, blocks: Sequence[int] | Ids) -> None:
        ids = np.asarray(blocks, dtype=np.int32)
        ids = ids[self._runs.known(ids)]
        for part in self._prefixes(ids):
            self._access(part)

    def on_insert(self, blocks: Sequence[int] | Ids) -> None:
        ids = np.asarray(blocks, dtype=np.int32)
        if not len(ids):
            return
        is_known = self._runs.known_here(ids)
        if np.count_nonzero(is_known):
            self.on_access(ids[is_known])
            ids = ids[~is_known]
        for part in self._prefixes(ids):
            self._insert(part)

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
        self._worth.prefer(path, hint.priority)
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
        for run in path:
            self._worth.change(run, int(runs.kind[run]) % HINT_KINDS + said * HINT_KINDS)

    def on_remove(self, block: int) -> None:
        self.on_remove_many((block,))

    def on_remove_many(self, blocks: Sequence[int]) -> None:
        ids = np.asarray(blocks, dtype=np.int32)
        ids = ids[self._runs.known(ids)]
        if not len(ids):
            return
        runs = self._runs
        at, starts = runs.at[ids], runs.starts(ids)
        for block, run in zip(ids[starts].tolist(), at[starts].tolist(), strict=True):
            # Others are remembered by where their requests end, but for what is behind that.
            if runs.is_shared[run]:
                self._ends.put(self._view.name(block), runs, run)
            elif runs.is_tail[run]:
                self._tails.put(self._view.name(block), int(runs.life[run]))
        # From the end of a run on they leave, but for those that are lost. The last block of a prompt comes again
        # within another one only where that is the prompt's next turn.
        first = at[starts]
        counts = np.diff([*starts, len(ids)])
        depths = (runs.before[first] + runs.length[first] + starts).repeat(counts) - np.arange(len(ids))
        is_told = ((runs.last[first] == ids[starts]) & ~runs.is_tail[first]).repeat(counts)
        self._past.put(self._view.names_of(ids), np.where(is_told, self._worth.number(at, depths), FORGOTTEN))
        runs.remove_many(ids, starts)

    def victims(self, bytes_needed: int) -> list[int]:
        leaves = self._runs.leaves
        for most in (_SAMPLE, _LARGE_SAMPLE):
            now_s = self._clock()
            order, values = self._worth.order(leaves.some(most, self._random), now_s)
            index_of = partial(self._worth.index, now_s=now_s)
            part_of = partial(self._worth.part, now_s=now_s)
            chosen = search(self._view, self._runs, order, values, index_of, part_of, bytes_needed)
            if chosen or len(leaves) <= most:
                return chosen
        return []

    # ------------------------------------------------------------ for best.py

    def known(self, blocks: Ids) -> Ids:
        """Return those of the blocks that are in the tier."""
        return blocks[self._runs.known(blocks)]

    def numbers(self, blocks: Ids, places: Numbers, *, were_used: bool) -> Numbers:
        """`Worth.numbers`."""
        return self._worth.numbers(blocks, places, were_used=were_used)

    def worth(self, numbers: Sequence[int]) -> Floats:
        """`Worth.of` now."""
        return self._worth.of(numbers, self._clock())

    def by_last_use(self) -> tuple[list[int], list[int]]:
        """`Runs.by_last_use`."""
        return self._runs.by_last_use()

    # ------------------------------------------------------------ private

    def _access(self, ids: Ids) -> None:
        """Known blocks, each the parent of the next."""
        now_s = self._clock()
        is_cut = int(self._runs.last[self._runs.at[ids[-1]]]) != int(ids[-1])
        path, ends = self._runs.path(ids)
        request = self._open.take(self._view, int(ids[0]), now_s)
        if request is None:
            request = self._new_request()
        self._use(request, path, ends, ids, now_s, is_cut=is_cut)
        name = self._view.name(int(ids[-1]))
        self._close(name)
        told = self._expected.after(name)
        if told is not None:
            self._expect(request, told, now_s)
            self._change(request, self._own(request, int(ids[-1])))
        self._open.put(name, request, now_s)

    def _prefixes(self, ids: Ids) -> list[Ids]:
        """Return these blocks as parts of which each block is the parent of the next, each block once."""
        if len(ids) < 2:
            return [ids] if len(ids) else []
        breaks = (self._view.parents_of(ids)[1:] != ids[:-1]).nonzero()[0] + 1
        if not len(breaks):
            return [ids]
        if len(np.unique(ids)) != len(ids):
            ids = ids[np.sort(np.unique(ids, return_index=True)[1])]
            breaks = (self._view.parents_of(ids)[1:] != ids[:-1]).nonzero()[0] + 1
        return np.split(ids, breaks)

    def _new_request(self) -> Request:
        self.last_request += 1
        return Request(self.last_request)

    def _use(self, request: Request, path: list[int], ends: list[int], ids: Ids, now_s: float, *, is_cut: bool) -> None:
        """These whole runs of a prefix were used again, as the next piece of the request, or its first. `is_cut`: the
        last was part of a longer one until now."""
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
        begun = self._begun(request, self._view.parent(int(ids[0])))
        ended, request.ended = request.ended, None
        for run in path:
            self._worth.finish(int(runs.life[run]), now_s)
            if runs.branch[run] != USED:
                if run == path[0] and begun != NONE and ended is not None:
                    self._worth.go_on(ended)
                request.ended = self._worth.go_through(run, ends=run == last and is_cut)
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
        if begun != NONE:
            path, ends = [begun, *path], [0, *ends]
        if len(path) > 1:
            path = runs.join(path, ends, ids)
        if begun != NONE:
            # Whole again: the last piece ended within it.
            if runs.is_shared[begun]:
                self._worth.change(begun, shared_kind(int(runs.fan[begun]), float(runs.gap_s[begun])))
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
                is_cut = int(runs.last[run]) != parent
                if is_cut:
                    runs.cut(parent)
                self._use(request, [run], [0], np.array([parent], dtype=np.int32), now_s, is_cut=is_cut)
        is_first = not request.is_counted
        all_names = self._view.names_of(ids)
        names = all_names.tolist()
        for life in self._tails.take(names):
            self._worth.finish(life, now_s)
        told = self._expected.take(names[0])
        if told is not None:
            self._expect(request, told, now_s)
        request.to_come = max(0, request.to_come - len(ids))
        above = self._own(request, parent)
        if not is_first:
            self._ends.forget_piece(request)
            above = self._end_tail(request, above)
        seen = self._ends.among(names)
        start = 0
        for stop, ghost in seen:
            self._worth.finish(ghost.life, now_s)
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
        stop = seen[-1][0] if seen else 0
        here, gap_s = self._was_here(all_names, stop, now_s)
        if here > stop and gap_s and here < len(ids) - (not request.to_come):
            # Another had this prefix and went on in its own way.
            self._share(ids[start:here], above, gap_s, request, now_s)
            above, start = [], here
        if not request.to_come and max(stop, here):
            request.num_new = request.num_come = len(ids) - max(stop, here)
            if here <= stop:
                request.follows(seen[-1][1], now_s)
            elif gap_s:
                request.gap_s, request.turn = (None, 1) if start == here else (smooth(gap_s, 0.0), 2)
        kind = self._change(request, above)
        # The last block that has come is the tail of the prompt unless more is known to come.
        end = len(ids) - (not request.to_come)
        if start < end:
            body = above[0] if above and not start else NONE
            if body != NONE and runs.life[body] == request.body and not runs.kids[body] and runs.kind[body] == kind:
                runs.extend(body, ids[:end])
            else:
                body = runs.add(ids[start:end], is_tail=False)
                if start >= max(stop, here):
                    self._place(body, request)
                self._begin(body, kind, now_s, request)
                runs.gap_s[body] = request.gap_s or 0.0
            request.body = int(runs.life[body])
            request.remembered = request.end if request.to_come and request.end >= 0 else names[end - 1]
            self._ends.put(request.remembered, runs, body)
        elif above and not start:
            request.remembered = self._view.name(parent)
            self._ends.put(request.remembered, runs, above[0])
        if start <= end < len(ids):
            tail = runs.add(ids[end:], is_tail=True)
            request.is_tail_new = end >= max(stop, here)
            self._begin(tail, kind + TAIL * PLACE_KINDS, now_s, request)
            runs.gap_s[tail] = request.gap_s or 0.0
        self._open.put(names[-1], request, now_s)
        if is_first:
            request.is_counted = True
            self._num_requests += 1
            every = _LEARN_EVERY if self._num_requests < _LATER else _LEARN_LATER
            if self._num_requests % every == 0 or self._num_requests in _LEARN_FIRST:
                self._worth.learn(now_s)

    def _place(self, run: int, request: Request) -> None:
        """Say of a run that came new where what came with its request begins, and how far behind that it is."""
        runs = self._runs
        over = runs.parent(run)
        if over != NONE and runs.request[over] == request.number and runs.branch[over] != USED:
            runs.branch[run], runs.before[run] = runs.branch[over], runs.before[over] + runs.length[over]
        else:
            runs.branch[run] = AT_ROOT if over == NONE else BEHIND_SHARED if runs.is_shared[over] else BEHIND_OWN

    def _was_here(self, names: Names, stop: int, now_s: float) -> tuple[int, float]:
        """Return how many of these were here before, at least up to `stop` as a whole, and how long ago the last of
        them was used; 0.0 where that is forgotten. They have been used again by that."""
        count, gap_s = 0, 0.0
        parts = self._past.parts(names, self._ends.oldest_life)
        for number, end in parts:
            ends = stop < end < len(names) and end == parts[-1][1]
            ago_s = self._worth.come_back(number, end - count, ends=ends, now_s=now_s)
            gap_s = 0.0 if ago_s is None else max(ago_s, SHORTEST_S)
            count = end
        return count, gap_s

    def _share(self, ids: Ids, above: list[int], gap_s: float, request: Request, now_s: float) -> None:
        """These come back, as the second way of going on from what is before them, and of being gone on from."""
        runs = self._runs
        run = runs.add(ids, is_tail=False)
        runs.fan[run] = 1
        runs.share(run)
        runs.gap_s[run] = gap_s
        self._begin(run, shared_kind(2, gap_s), now_s, Request(request.number))
        for over in above:
            runs.gap_s[over] = float(runs.gap_s[over]) or gap_s
            self._worth.change(over, shared_kind(max(2, int(runs.fan[over])), float(runs.gap_s[over])))

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
        parts = self._past.parts(names, self._ends.oldest_life) if len(names) == request.to_come else []
        request.num_new = request.to_come - (parts[-1][1] if parts else 0)
        for at, later in enumerate(reversed(names.tolist())):
            ghost = self._ends.get(later)
            if ghost is not None and ghost.request != request.number:
                request.num_new = min(request.num_new, at)
                request.follows(ghost, now_s)
                break
        request.num_come = request.num_new - request.to_come

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
            self._worth.change(run, kind + said)
            runs.is_tail[run] = False
            runs.gap_s[run] = request.gap_s or 0.0
            runs.turn[run] = request.turn
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
                if request.is_tail_new:
                    self._place(tail, request)
            return above
        into = above[1]
        life = int(runs.life[tail])
        if runs.priority[into] == runs.priority[tail]:
            blocks = np.array(runs.blocks(tail, int(runs.length[tail])), dtype=np.int32)
            if runs.join([into, tail], [0, len(blocks)], blocks) == [into]:
                self._worth.void(life)
                return above[1:]
        return above

    def _begin(self, run: int, kind: int, now_s: float, request: Request) -> None:
        runs = self._runs
        runs.turn[run] = request.turn
        runs.request[run] = request.number
        self._worth.begin(run, kind, now_s)
