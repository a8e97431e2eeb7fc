"""Engines that store their KV quantised, over a tiny real model and a real daemon."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.model import Model, load_model, make_pool
from engine.request import PlanMode, Request
from engine.service import Engine, EngineOptions
from engine.turn import Ask
from kernels.quantized import QUANTIZED_DTYPES, QuantizedDtype
from kvstore.core.key import chain_keys
from kvstore.core.outcome import TierKind
from tests.engine.rig import Answer
from tests.engine.tiny import llama, write_folder
from tests.support.daemons import DaemonProcess
from tests.support.waiting import PATIENCE_S, until
from tiers.hbm import HbmTier

MakeDaemon = Callable[..., DaemonProcess]
BLOCK_TOKENS = 16
PROMPT = [(7 * i * i + 3 * i) % 250 for i in range(20 * BLOCK_TOKENS + 5)]
_ids = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_folder(tmp_path_factory.mktemp("model") / "tiny", llama()), "cpu", "float32")


class Running:
    """An engine, its pool, and what was asked of it."""

    def __init__(self, engine: Engine, pool: torch.Tensor) -> None:
        self.engine = engine
        self._pool = pool

    def complete(self, plan: PlanMode = "fetch") -> tuple[list[int], Request]:
        answer = Answer()
        ask = Ask(f"r{next(_ids)}", "", time.monotonic(), prompt=PROMPT, plan=plan, max_tokens=8, ignore_eos=True)
        turn, opened = self.engine.open(ask, answer)
        opened.result(PATIENCE_S)
        assert answer.done.wait(PATIENCE_S)
        assert answer.error == ""
        assert turn.request is not None
        return answer.tokens, turn.request

    def prefix(self) -> torch.Tensor:
        """Return the prompt's KV as HBM has it, `[blocks, layers, 2, tokens, heads, head_dim]`."""

        def look() -> torch.Tensor:
            blocks = self.engine.pool.acquire_prefix(chain_keys(self.engine.namespace, PROMPT))
            self.engine.pool.release(blocks)
            return self._pool[blocks].clone()

        return self.engine.between_steps(look).result(PATIENCE_S)

    def drop(self) -> None:
        """Forget what is in HBM, once it is stored."""
        until(lambda: not self.engine.hbm_state()["held"] and not self.engine.hbm_state()["in_use"])
        assert self.engine.between_steps(self.engine.pool.drop).result(PATIENCE_S) >= 20


@contextlib.contextmanager
def running(model: Model, run_dir: Path, store_dtype: QuantizedDtype | None) -> Iterator[Running]:
    pool = make_pool(model.spec, 64, BLOCK_TOKENS, "cpu")
    options = EngineOptions(run_dir=run_dir, block_tokens=BLOCK_TOKENS, warm_up=False, kv_store_dtype=store_dtype)
    engine = Engine(model, pool, HbmTier(pool, BLOCK_TOKENS, store_dtype), options)
    engine.start()
    try:
        yield Running(engine, pool)
    finally:
        engine.stop(5)


@pytest.mark.parametrize("store_dtype", QUANTIZED_DTYPES)
def test_a_quantised_prefix_comes_back_smaller_and_nearly_as_it_was(
    make_daemon: MakeDaemon, model: Model, store_dtype: QuantizedDtype
) -> None:
    daemon = make_daemon()
    with running(model, daemon.run_dir, store_dtype) as engine:
        computed, _ = engine.complete()
        exact = engine.prefix()
        assert len(exact) == 20
        engine.drop()
        fetched, request = engine.complete()
        assert request.served[TierKind.RAM] == 20 * BLOCK_TOKENS
        near = engine.prefix()
        assert not torch.equal(near, exact)
        assert float((near - exact).norm() / exact.norm()) < {"int8": 0.01, "fp8": 0.04}[store_dtype]
        daemon.wait_written()
        with contextlib.closing(daemon.console()) as console:
            console.evict(["ram"])
        engine.drop()
        _, request = engine.complete()
        assert request.served[TierKind.SSD] == 20 * BLOCK_TOKENS
        assert torch.equal(engine.prefix(), near)
        # Greedy tokens of this model and prompt; on others they may differ, see docs/engine.md.
        assert fetched == computed
        # head_dim 12: 12 codes and 2 bytes of scale where there were 48 bytes.
        assert engine.engine.namespace.block_bytes == exact[0].nbytes * 14 // 48


def test_engines_that_store_in_different_ways_share_a_daemon_and_no_block(
    make_daemon: MakeDaemon, model: Model
) -> None:
    daemon = make_daemon()
    with (
        running(model, daemon.run_dir, None) as exact,
        running(model, daemon.run_dir, "int8") as int8,
        running(model, daemon.run_dir, "fp8") as fp8,
    ):
        assert len({engine.engine.namespace.digest() for engine in (exact, int8, fp8)}) == 3
        for engine in (int8, fp8, exact):
            _, request = engine.complete()
            assert not any(request.served.values()), "another engine's blocks"
            computed = engine.prefix()
            engine.drop()
        _, request = exact.complete()
        assert request.served[TierKind.RAM] == 20 * BLOCK_TOKENS
        assert torch.equal(exact.prefix(), computed)
