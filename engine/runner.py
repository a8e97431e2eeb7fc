"""The step loop: the one thread that owns scheduler, pool and cost model, and runs the model.

Everybody else hands it functions to run between two steps. It never waits for anything but its inbox, and touches
no socket and no file.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engine.attention import SequenceSlice
from engine.counters import Counters
from engine.sampling import choose_tokens
from engine.scheduler import Piece, Scheduler, step_work
from policies.cost import CostModel, PrefillCost, StepWork

_log = logging.getLogger(__name__)

# Fitting the cost takes up to half a millisecond.
_PUBLISH_EVERY_S = 1.0


class ForwardModel(Protocol):
    """See `engine/model.py`: logits `[len(slices), vocab]` of each slice's last token; K and V go to the pool."""

    def forward(self, slices: Sequence[SequenceSlice], pool: torch.Tensor) -> torch.Tensor: ...


class Runner:
    """`pool` is the HBM pool's tensor. After a fault of the model `fault` says what happened, and every request,
    present and future, ends with that error. `prefill_cost` is what prefilling costs, about a second old at most; None
    while that is not known."""

    def __init__(
        self,
        model: ForwardModel,
        pool: torch.Tensor,
        scheduler: Scheduler,
        costs: CostModel,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._pool = pool
        self._scheduler = scheduler
        self._costs = costs
        self._counters = counters
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self._publish_at_s = 0.0
        self.fault = ""
        self.prefill_cost: PrefillCost | None = None

    def start(self) -> None:
        self._thread.start()

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` on the step loop's thread, between two steps; returns at once. Any thread may call."""
        self._inbox.put(action)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End after the present step; requests that are left end with an error. Return whether it has ended in time.
        Idempotent."""
        self._inbox.put(self._stop)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def warm_up(self, chunk_tokens: int, block_table: Sequence[int]) -> None:
        """Run some steps over the given free pool blocks, which cover 5/4 chunks and a token more. To be called before
        `start`, so that the first request does not pay for what a model sets up, and prefill has a measured cost.
        """
        part = max(1, chunk_tokens // 4)
        for count, start, counts in [
            (part, 0, False),
            (part, 0, True),
            (chunk_tokens, 0, True),
            (part, chunk_tokens, True),
            (1, chunk_tokens + part, True),
        ]:
            began = self._clock()
            self._model.forward([SequenceSlice([0] * count, start, block_table)], self._pool).argmax(dim=-1).tolist()
            if counts:
                work = StepWork.of([(count, start)], 0) if count > 1 else StepWork.of([], 1)
                self._costs.observe_step(work, self._clock() - began)
        self._publish(self._clock())

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception as error:
                # The root of this thread: from here on every request is told of the fault, instead of waiting for ever.
                _log.exception("the step loop met a fault; the engine answers no more requests")
                self.fault = self.fault or f"{type(error).__name__}: {error}"

    def _turn(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()
        if self._stopping:
            return
        if self.fault:
            # Not a step more: what failed may fail again at once, and for ever.
            self._scheduler.end_all(f"the engine met a fault: {self.fault}")
            self._inbox.get()()
            return
        pieces = self._scheduler.next_step()
        if pieces:
            self._compute(pieces)
        else:
            self._wait()

    def _wait(self) -> None:
        deadline_s = self._scheduler.next_deadline_s()
        timeout_s = None if deadline_s is None else max(0.0, deadline_s - self._clock())
        try:
            self._inbox.get(timeout=timeout_s)()
        except queue.Empty:
            return

    def _compute(self, pieces: Sequence[Piece]) -> None:
        began = self._clock()
        slices = [_slice(piece) for piece in pieces]
        gates = [piece.layers for piece in pieces if piece.layers is not None]
        try:
            logits = self._model.forward(slices, self._pool)
        except (ValueError, torch.OutOfMemoryError) as error:
            # About these requests, not about the engine.
            self._counters.add("failed_steps")
            _log.warning("a step failed: %s", error)
            self._scheduler.fail(pieces, f"the model could not compute the step: {error}")
            return
        if not all(gate.came_whole() for gate in gates):
            _finish_on_gpu(logits)
            self._counters.add("dropped_steps")
            self._scheduler.drop(pieces)
            return
        sampled = self._sample(pieces, logits)
        now = self._clock()
        began += sum(gate.waited_s for gate in gates)
        if not gates:
            # Beside copies, and with pauses, a step tells little of what computing costs.
            self._costs.observe_step(step_work(pieces), now - began)
        self._publish(now)
        self._counters.add("steps")
        self._counters.add("overlapped_steps", len(gates))
        self._counters.add("prefill_tokens", sum(piece.num_tokens for piece in pieces if piece.num_tokens > 1))
        self._counters.add("decode_tokens", sum(piece.num_tokens == 1 for piece in pieces))
        self._scheduler.complete(pieces, sampled, now - began)

    def _publish(self, now: float) -> None:
        if now >= self._publish_at_s and self._costs.prefill_known:
            self.prefill_cost = self._costs.prefill_cost()
            self._publish_at_s = now + _PUBLISH_EVERY_S

    def _sample(self, pieces: Sequence[Piece], logits: torch.Tensor) -> list[int | None]:
        rows = [row for row, piece in enumerate(pieces) if piece.samples]
        sampled: list[int | None] = [None] * len(pieces)
        if rows:
            requests = [pieces[row].request for row in rows]
            tokens = choose_tokens(logits[rows], [r.sampling for r in requests], [len(r.output) for r in requests])
            for row, token in zip(rows, tokens, strict=True):
                sampled[row] = token
        else:
            _finish_on_gpu(logits)
        return sampled

    def _stop(self) -> None:
        self._stopping = True
        self._scheduler.end_all("the engine is shutting down")


def _slice(piece: Piece) -> SequenceSlice:
    wait = None if piece.layers is None else piece.layers.wait_for
    return SequenceSlice(piece.token_ids(), piece.start, piece.request.block_table, piece.samples, wait)


def _finish_on_gpu(logits: torch.Tensor) -> None:
    """Wait for a step's K and V: copies run on streams of their own, beside whatever is queued."""
    if logits.is_cuda:
        torch.cuda.current_stream(logits.device).synchronize()
