"""The whole engine put together: model, pool, scheduler, threads, and kvstore's clients. The server drives it.

consult thread ──► step loop ◄──► fetch and store threads
(open, close)      (owns scheduler, pool, cost model)
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import torch

from engine.attention import SequenceSlice
from engine.caching import BlockCaching
from engine.chat import Chat, Tokenizer
from engine.consult import Consult, Limits
from engine.cost_keeper import CostKeeper, blank_profile, device_name
from engine.counters import Counters
from engine.layers import LayerOverlap, layer_ends
from engine.link import KVClient, Roots
from engine.model import ModelSpec
from engine.mover import MoverThreads
from engine.pool import BlockPool
from engine.request import Progress, Request
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.shape import Shape
from engine.turn import Ask, Saved, Turn
from kernels.quantized import QuantizedDtype, payload_bytes_of
from kvstore.client import Client
from kvstore.core.errors import ConfigError, KVStoreError
from kvstore.core.key import Namespace
from kvstore.region_pin import Hbm
from policies.cost import CostModel
from policies.price import GpuPrice

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
Objective = Literal["latency", "throughput"]

KV_LAYOUT = "LKTHD-1"
# Of `kernels.quantized`: codes in that order, then scales.
QUANTIZED_KV_LAYOUT = "LKTHD-codes-scales-1"
_END_POLL_S = 0.02


class LanguageModel(Protocol):
    """`engine.model.Model`, as far as it is used here."""

    spec: ModelSpec

    @property
    def tokenizer(self) -> Tokenizer: ...

    def forward(self, slices: Sequence[SequenceSlice], pool: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`run_dir` None: no kvstore. `tenant` is whose sessions and blocks these are where nobody says otherwise.
    `kv_store_dtype` None: blocks are stored as they are; what the engine is given as its HBM must agree.
    `objective` throughput: a request's plan also counts what its GPU seconds cost the others.
    `profile_dir` None: what it measures is not kept for the next run.
    `layer_overlap`: whether the last chunk of a prompt may be computed while later layers of its cached blocks are
    copied; auto: on a GPU."""

    run_dir: Path | None = None
    block_tokens: int = 16
    pool_block_tokens: int = 16
    chunk_tokens: int = 256
    max_batch: int = 16
    max_requests: int = 64
    default_reply_tokens: int = 256
    tenant: str = ""
    warm_up: bool = True
    kv_store_dtype: QuantizedDtype | None = None
    objective: Objective = "latency"
    profile_dir: Path | None = None
    layer_overlap: LayerOverlap = "auto"


class Engine:
    """`pool` is the tensor that the model computes into and `hbm` copies from. Start it once, stop it once."""

    def __init__(
        self,
        model: LanguageModel,
        pool: torch.Tensor,
        hbm: Hbm,
        options: EngineOptions,
        make_client: Callable[[Namespace], KVClient] | None = None,
    ) -> None:
        spec = model.spec
        self.options = options
        self.model_name = spec.name
        self.namespace = _namespace(spec, options, pool)
        self._shape = shape = Shape(self.namespace, options.pool_block_tokens)
        self._max_context_tokens = spec.max_context_tokens
        self.counters, self.faults = Counters(), Counters()
        self.pool = BlockPool(pool.shape[0], shape.pool_blocks_per_block)
        self._keeper = self._make_keeper(pool.device)
        saved = None if self._keeper is None else self._keeper.saved
        self.costs = CostModel(options.chunk_tokens, time.monotonic, saved)
        self.roots = self._make_roots(make_client)
        self._movers = None
        if self.roots is not None:
            self._movers = MoverThreads(
                self.roots,
                hbm,
                # Only to wake it up: what has landed it sees in the job.
                lambda: self._runner.post(_nothing),
                lambda job: self._runner.post(lambda: self.scheduler.fetched(job)),
                lambda job: self._runner.post(lambda: self.scheduler.stored(job)),
                self.counters,
                self.faults,
                layer_ends=_layer_ends(options, pool, self.namespace),
            )
        price = GpuPrice(1, time.monotonic()) if options.objective == "throughput" else None
        caching = BlockCaching(self.pool, shape, self.costs, self._movers, self.counters, time.monotonic, price=price)
        self.scheduler = Scheduler(self.pool, shape, caching, options.chunk_tokens, options.max_batch)
        self._runner = Runner(model, pool, self.scheduler, self.costs, self.counters)
        self._consult = Consult(
            self.roots,
            self.namespace,
            Chat(model.tokenizer, spec.eos_token_ids, spec.max_context_tokens),
            model.tokenizer,
            Limits(
                vocab_size=spec.vocab_size,
                max_context_tokens=spec.max_context_tokens,
                max_kv_tokens=self.scheduler.max_tokens(),
                default_reply_tokens=options.default_reply_tokens,
                eos_token_ids=frozenset(spec.eos_token_ids),
            ),
            self._submit,
            self._predict_prefill,
            self.counters,
            self.faults,
            max_jobs=2 * options.max_requests + 16,
        )
        self.tokenizer = model.tokenizer

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Warm up, attach to kvstore if it is there, and start the threads."""
        if self.options.warm_up:
            self._warm_up()
        if self.roots is not None and self._movers is not None:
            self._attach(self.roots, self._movers)
            self._movers.start()
        self._consult.start()
        self._runner.start()
        if self._keeper is not None:
            self._keeper.start()

    def stop(self, deadline_s: float = 10.0) -> None:
        """Give running requests, then stores and unsaved sessions, until the deadline; then end everything."""
        end_s = time.monotonic() + deadline_s

        def left_s(least: float = 0.5) -> float:
            return max(least, end_s - time.monotonic())

        while self.scheduler.num_active + self.scheduler.num_waiting and time.monotonic() < end_s - deadline_s / 2:
            time.sleep(_END_POLL_S)
        self._runner.post(lambda: self.scheduler.end_all("the engine is shutting down"))
        self._consult.stop(left_s())
        if self._movers is not None:
            self._movers.close(left_s())
        has_ended = self._runner.stop(left_s())
        if self._keeper is not None:
            self._keeper.close(self.costs.worth_saving() if has_ended else None)
        if self.roots is not None:
            self.roots.close()

    @property
    def fault(self) -> str:
        """What keeps the engine from answering; "" if nothing does."""
        return self._runner.fault

    # ------------------------------------------------------------ requests; from any thread

    def open(self, ask: Ask, listener: Callable[[Progress], None]) -> "tuple[Turn, Future[None]]":
        """See `Consult.open`. `listener` is called on the step loop's thread and must not block."""
        return self._consult.open(ask, listener)

    def cancel(self, turn: Turn) -> None:
        """End the turn's request early, wherever it is; no event need follow."""
        turn.cancelled = True
        self._runner.post(lambda: self.scheduler.cancel(turn.ask.id))

    def close(self, turn: Turn, reply: list[int], text: str) -> "Future[Saved | None]":
        """See `Consult.close`."""
        return self._consult.close(turn, reply, text)

    async def drop_hbm(self) -> int:
        """Forget every cached block that no request uses; return how many pool blocks that freed."""
        return await asyncio.wrap_future(self.between_steps(self.pool.drop))

    def between_steps(self, action: Callable[[], _Result]) -> "Future[_Result]":
        """Run `action` on the step loop's thread, which owns pool and scheduler."""
        future: Future[_Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(action())
            except Exception as error:
                # The root of what is done between steps: the asker is told, and the step loop goes on.
                _log.exception("what was asked for between two steps failed")
                future.set_exception(error)

        self._runner.post(run)
        return future

    def hbm_state(self) -> dict[str, int]:
        """Return the pool's state in pool blocks; exact between steps, else of the moment."""
        pool = self.pool
        return {
            "pool_blocks": pool.num_pool_blocks,
            "free": pool.num_free,
            "cached": pool.num_cached,
            "held": pool.num_held_only,
            "in_use": pool.num_pool_blocks - pool.num_available - pool.num_held_only,
            "indexed_blocks": pool.num_indexed_blocks,
            "pool_block_tokens": self.options.pool_block_tokens,
            "block_tokens": self.options.block_tokens,
        }

    # ------------------------------------------------------------ private

    def _submit(self, turn: Turn, request: Request) -> None:
        def add() -> None:
            # Looked at here, so that a cancel that came before the request is not lost.
            if turn.cancelled:
                request.listener(Progress(finish="cancelled"))
            else:
                self.scheduler.add(request)

        self._runner.post(add)

    def _predict_prefill(self, num_tokens: int) -> float | None:
        cost = self._runner.prefill_cost
        return None if cost is None else cost.predict(num_tokens, 0)

    def _warm_up(self) -> None:
        room_tokens = min(self.scheduler.max_tokens(), self._max_context_tokens)
        chunk_tokens = min(self.options.chunk_tokens, (room_tokens - 1) // 2)
        if chunk_tokens < 1:
            return
        blocks = self.pool.allocate(self._shape.pool_blocks_for(chunk_tokens + max(1, chunk_tokens // 4) + 1))
        assert blocks is not None, "the pool is empty before the first request"
        self._runner.warm_up(chunk_tokens, blocks)
        self.pool.release(blocks)

    def _attach(self, roots: Roots, movers: MoverThreads) -> None:
        """Map and pin the region now and not in the first request; that there is no daemon yet stops nobody."""
        client = roots.clone(self.options.tenant)
        try:
            client.ping()
            movers.pins.ensure(client.region)
        except KVStoreError as error:
            _log.warning("kvstore does not answer, so everything is recomputed until it does: %s", error)
        finally:
            client.close()

    def _make_keeper(self, device: torch.device) -> CostKeeper | None:
        options, namespace = self.options, self.namespace
        if options.profile_dir is None:
            return None
        profile = blank_profile(
            self.model_name,
            device_name(device, namespace.dtype),
            options.chunk_tokens,
            namespace.block_tokens,
            namespace.block_bytes,
        )
        return CostKeeper(options.profile_dir, profile, lambda: self.between_steps(self.costs.worth_saving))

    def _make_roots(self, make_client: Callable[[Namespace], KVClient] | None) -> Roots | None:
        run_dir = self.options.run_dir
        if make_client is None and run_dir is not None:

            def connect(namespace: Namespace) -> KVClient:
                return Client(run_dir, namespace=namespace, model_label=self.model_name, name="engine")

            make_client = connect
        if make_client is None:
            return None
        make = make_client
        return Roots(lambda tenant: make(replace(self.namespace, tenant=tenant)))


def _nothing() -> None:
    return


def _layer_ends(options: EngineOptions, pool: torch.Tensor, namespace: Namespace) -> Sequence[int]:
    mode = options.layer_overlap
    if options.kv_store_dtype is not None:
        if mode == "on":
            raise ConfigError(f"layer_overlap is on, but blocks stored as {options.kv_store_dtype} are copied whole")
        mode = "off"
    return layer_ends(mode, is_cuda=pool.is_cuda, num_layers=namespace.num_layers, payload_bytes=namespace.block_bytes)


def _namespace(spec: ModelSpec, options: EngineOptions, pool: torch.Tensor) -> Namespace:
    """Quantised blocks have a namespace of their own: an engine that stores exact ones never meets them."""
    if options.pool_block_tokens < 1 or options.block_tokens % options.pool_block_tokens or options.block_tokens < 1:
        raise ConfigError(
            f"block_tokens {options.block_tokens} must be a whole number of pool blocks of {options.pool_block_tokens}"
        )
    stored = options.kv_store_dtype
    try:
        block_bytes = payload_bytes_of(pool, options.block_tokens // options.pool_block_tokens, stored)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Namespace(
        model=spec.name,
        weights_digest=spec.weights_digest,
        # What the model computed in counts as well: it is another KV that was quantised.
        dtype=spec.dtype if stored is None else f"{spec.dtype}-as-{stored}",
        kv_layout=KV_LAYOUT if stored is None else QUANTIZED_KV_LAYOUT,
        block_tokens=options.block_tokens,
        block_bytes=block_bytes,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        tenant=options.tenant,
    )
