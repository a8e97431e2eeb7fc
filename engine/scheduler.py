"""Who runs in the next step: a continuous batch with chunked prefill.

Every step carries one token of each decoding request and, up to `chunk_tokens`, pieces of the prompts that are being
prefilled, oldest request first; new requests join and finished ones leave between any two steps. Where the pool runs
out, the youngest running request makes room and is computed again later; its full blocks stay cached meanwhile.
The oldest request is never preempted, so one always gets on. Blocks that only a store still holds come back by
themselves: for them a request waits, and the step goes on without it.

Not thread-safe: the step loop owns it. Nothing here waits or touches bytes.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.caching import BlockCaching
from engine.jobs import FetchJob, StoreJob
from engine.layers import LayerGate
from engine.planner import Ahead
from engine.pool import BlockPool
from engine.request import FinishReason, Progress, Request, RequestState
from engine.shape import Shape
from policies.cost import StepWork


@dataclass(frozen=True, slots=True)
class Piece:
    """`num_tokens` of `request`, from `start` on, in one step; `samples` where its last token's logits are wanted.
    `layers`: what is cached in front of it is still being copied, see `engine/layers.py`."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    layers: LayerGate | None = None

    def token_ids(self) -> list[int]:
        return self.request.tokens(self.start, self.start + self.num_tokens)


class Scheduler:
    """Holds all requests that are not finished. `chunk_tokens` bounds the prefill of a step, `max_batch` who runs."""

    def __init__(self, pool: BlockPool, shape: Shape, caching: BlockCaching, chunk_tokens: int, max_batch: int) -> None:
        if chunk_tokens < 1 or max_batch < 1:
            raise ValueError("chunk_tokens and max_batch must be at least 1")
        self._pool = pool
        self._shape = shape
        self._caching = caching
        self._chunk_tokens = chunk_tokens
        self._max_batch = max_batch
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        # In order of arrival.
        self._active: list[Request] = []
        self._num_added = 0
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        return len(self._active)

    def max_tokens(self) -> int:
        """Return how many tokens of one request can have their KV in the pool at all."""
        return self._pool.num_pool_blocks * self._shape.pool_block_tokens

    # ------------------------------------------------------------ what comes in

    def add(self, request: Request) -> None:
        """Take a request in. One that could never fit ends at once with an error."""
        self._num_added += 1
        request.order = self._num_added
        self._requests[request.id] = request
        self._caching.planner.arrived()
        # The last token that is sampled needs no KV.
        needed = len(request.prompt) + request.max_new_tokens - 1
        if needed > self.max_tokens():
            text = f"prompt and reply take {needed} tokens of KV, the HBM pool holds {self.max_tokens()}"
            self._finish(request, "error", text)
            return
        self._waiting.append(request)

    def cancel(self, request_id: str) -> None:
        """End a request early; its blocks come back at once, one that is being filled a moment later. Unknown ids are
        ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, "cancelled")

    def fetched(self, job: FetchJob) -> None:
        """A mover is done with this job, whose request may have ended before."""
        self._caching.planner.fetched(job)

    def stored(self, job: StoreJob) -> None:
        self._caching.stored(self._requests.get(job.request_id), job)

    # ------------------------------------------------------------ steps

    def next_step(self) -> list[Piece]:
        """Return what to compute next, in order of arrival; [] where nobody can get on before something comes in."""
        self._admit()
        if (last := self._under_copy()) is not None:
            return [last]
        budget, ahead_s = self._chunk_tokens, 0.0
        prefill = self._caching.planner.prefill_cost(self._num_decodes()) if self._caching.planner.has_loads else None
        pieces: list[Piece] = []
        for request in list(self._active):
            if request.state is RequestState.WAITING:
                continue  # it was preempted for one before it
            wanted = self._caching.allowance(request, budget, ahead_s, prefill)
            if prefill is not None:
                ahead_s += self._caching.planner.work_s(request, prefill)
            if wanted == 0:
                continue
            count = self._caching.planner.claim(request, self._make_room(request, wanted))
            if count == 0:
                continue
            left = request.num_tokens - request.num_computed
            if left > 1:
                budget -= count
            pieces.append(Piece(request, request.num_computed, count, samples=count == left))
        return pieces

    def complete(self, pieces: Sequence[Piece], sampled: Sequence[int | None], seconds: float) -> None:
        """Take over a step that took so long: `sampled[i]` is the next token of the i-th piece, where it samples."""
        self._caching.planner.computed(seconds)
        for piece, token in zip(pieces, sampled, strict=True):
            request = piece.request
            request.num_computed += piece.num_tokens
            if request.course is not None:
                request.course.compute_s += seconds
            self._caching.publish(request)
            if token is not None:
                self._append(request, token)

    def drop(self, pieces: Sequence[Piece]) -> None:
        """Forget a step that read cached blocks of which not all came; its tokens are computed again."""
        for piece in pieces:
            self._caching.planner.copy_failed(piece.request)

    def fail(self, pieces: Sequence[Piece], error: str) -> None:
        """End the requests of a step that could not be computed; nothing of it is indexed."""
        for piece in pieces:
            self._finish(piece.request, "error", error)

    def end_all(self, error: str) -> None:
        """End every request with an error."""
        for request in list(self._requests.values()):
            self._finish(request, "error", error)

    def next_deadline_s(self) -> float | None:
        return self._caching.planner.next_deadline_s()

    def _append(self, request: Request, token: int) -> None:
        if not request.output:
            request.result = self._caching.served(request)
        request.output.append(token)
        if token in request.stop_token_ids:
            self._finish(request, "stop", token=token)
        elif len(request.output) >= request.max_new_tokens:
            self._finish(request, "length", token=token)
        else:
            request.listener(Progress(token_id=token))

    def _under_copy(self) -> Piece | None:
        """Return the last chunk of a request whose cached blocks are being copied layer by layer this moment.

        Only of one that is alone: a step waits for the copies, and nobody else's tokens should.
        """
        if len(self._active) != 1:
            return None
        request = self._active[0]
        found = self._caching.planner.under_copy(request)
        if found is None:
            return None
        gate, start = found
        left = request.num_tokens - start
        known = request.num_computed
        request.num_computed = start
        if left > self._chunk_tokens or self._extend(request, left) < left:
            request.num_computed = known
            return None
        request.state = RequestState.RUNNING
        return Piece(request, start, left, samples=True, layers=gate)

    # ------------------------------------------------------------ room

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self._max_batch:
            request = self._waiting[0]
            # Beside others, some room to grow: else it would be the first to be preempted again.
            spare = 1 if self._active else 0
            if not self._caching.admit(request, spare, lambda order=request.order: self._ahead_of(order)):  # type: ignore[misc]
                return
            self._waiting.popleft()
            self._active.append(request)
            self._active.sort(key=_order)

    def _ahead_of(self, order: int) -> Ahead:
        """Return what is in front of a request that is being admitted: who came later only has what it leaves."""
        num_decodes = self._num_decodes()
        prefill = self._caching.planner.prefill_cost(num_decodes)
        work_s = sum(
            self._caching.planner.work_s(request, prefill) for request in self._active if request.order < order
        )
        return Ahead(work_s, num_decodes)

    def _num_decodes(self) -> int:
        return sum(request.num_tokens - request.num_computed == 1 for request in self._active)

    def _make_room(self, request: Request, wanted: int) -> int:
        """Extend the block table for up to `wanted` more tokens and return for how many there is room now."""
        while True:
            count = self._extend(request, wanted)
            if count or not self._preempt_for(request):
                return count

    def _extend(self, request: Request, wanted: int) -> int:
        shape = self._shape
        missing = shape.pool_blocks_for(request.num_computed + wanted) - len(request.block_table)
        fresh = self._pool.allocate(max(0, min(missing, self._pool.num_available)))
        assert fresh is not None
        request.block_table += fresh
        return max(0, min(wanted, len(request.block_table) * shape.pool_block_tokens - request.num_computed))

    def _preempt_for(self, request: Request) -> bool:
        """Free pool blocks for `request` at the cost of the youngest. False: it waits, or was itself the youngest."""
        if self._pool.num_held_only:
            return False
        youngest = self._active[-1]
        self._preempt(youngest)
        return youngest is not request

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self._caching.release(request)
        request.state = RequestState.WAITING
        self._active.remove(request)
        self._waiting = deque(sorted([request, *self._waiting], key=_order))

    def _finish(self, request: Request, reason: FinishReason, error: str = "", token: int | None = None) -> None:
        if request.state is RequestState.WAITING and request in self._waiting:
            self._waiting.remove(request)
        if request in self._active:
            self._active.remove(request)
        del self._requests[request.id]
        try:
            self._caching.count_skipped(request)
            self._caching.release(request)
        finally:
            # Whatever is wrong with its blocks, somebody waits for the end.
            request.state = RequestState.FINISHED
            request.listener(Progress(token, reason, error))


def step_work(pieces: Sequence[Piece]) -> StepWork:
    """Return a step's work as the cost model counts it."""
    prefills = [(piece.num_tokens, piece.start) for piece in pieces if piece.num_tokens > 1]
    return StepWork.of(prefills, len(pieces) - len(prefills))


def _order(request: Request) -> int:
    return request.order
