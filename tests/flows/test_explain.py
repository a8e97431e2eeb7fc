"""A request is asked of the engine, and `kvstore explain` says of it what the answer said."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.app import make_app
from engine.guard import Guard
from engine.model import Model, load_model, make_pool
from engine.service import Engine, EngineOptions
from tests.engine.tiny import llama, write_folder
from tests.support.daemons import DaemonProcess
from tests.support.waiting import PATIENCE_S, until
from tiers.hbm import HbmTier

MakeDaemon = Callable[..., DaemonProcess]
BLOCK_TOKENS = 16
NUM_BLOCKS = 12
PROMPT = [(7 * i * i + 3 * i) % 250 for i in range(NUM_BLOCKS * BLOCK_TOKENS + 5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(write_folder(tmp_path_factory.mktemp("model") / "tiny", llama()), "cpu", "float32")


class Served:
    """An engine behind its HTTP routes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._app = make_app(engine, Guard(None, ""), max_tokens=100)

    def complete(self, **fields: Any) -> dict[str, Any]:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                return await http.post(
                    "/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, **fields}
                )

        answer: dict[str, Any] = asyncio.run(ask()).json()
        return answer

    def drop(self) -> None:
        """Forget what is in HBM, once it is stored."""
        until(lambda: not self.engine.hbm_state()["held"] and not self.engine.hbm_state()["in_use"])
        self.engine.between_steps(self.engine.pool.drop).result(PATIENCE_S)


@contextlib.contextmanager
def serving(model: Model, run_dir: Path) -> Iterator[Served]:
    pool = make_pool(model.spec, 64, BLOCK_TOKENS, "cpu")
    options = EngineOptions(run_dir=run_dir, block_tokens=BLOCK_TOKENS)
    engine = Engine(model, pool, HbmTier(pool, BLOCK_TOKENS), options)
    engine.start()
    try:
        yield Served(engine)
    finally:
        engine.stop(5)


def explain(daemon: DaemonProcess, *arguments: str) -> str:
    command = [sys.executable, "-m", "kvstore", "explain", *arguments, "--run-dir", str(daemon.run_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_explain_says_of_a_request_what_its_answer_said(make_daemon: MakeDaemon, model: Model) -> None:
    daemon = make_daemon()
    with serving(model, daemon.run_dir) as served:
        answers = [served.complete()]
        for _ in range(3):
            served.drop()
            answers.append(served.complete())
        answers.append(served.complete())
        answers.append(served.complete(plan="recompute"))
        until(lambda: daemon.stats()["requests"]["count"] >= 5)
        known = json.loads(explain(daemon, "--json"))
        # The pinned one is not reported.
        assert [view["id"] for view in known["decisions"]] == [answer["id"] for answer in answers[4::-1]]
        for answer in answers[:5]:
            view, told = json.loads(explain(daemon, answer["id"], "--json")), answer["kvstore"]
            for field in ("prompt_tokens", "served_tokens", "recomputed_tokens", "miss", "plan", "ttft_s"):
                assert view[field] == told[field], field
            decision, happened = view["decision"], view["decision"]["happened"]
            blocks = {tier: tokens // BLOCK_TOKENS for tier, tokens in told["served_tokens"].items()}
            assert decision["situation"]["resident_blocks"] == blocks.pop("hbm")
            assert happened["loaded"] == {tier: count for tier, count in blocks.items() if count}
            assert happened["ttft_s"] == told["ttft_s"] and happened["waited_s"] < told["ttft_s"]
        whys = [view["decision"]["why"] for view in known["decisions"]]
        assert whys[0] == "all_in_hbm" and whys[-1] == "nothing_cached"
        assert all(view["decision"]["regret_s"] is not None for view in known["decisions"][1:4])
        text = explain(daemon, answers[1]["id"])
        assert f"R ram {NUM_BLOCKS}" in text and "Chosen: " in text and "regret: " in text
        figures = daemon.stats()["requests"]["decisions"]
        assert sum(figures["chosen"].values()) == 5 and figures["judged"] == 3 and figures["lost_s"] >= 0


def test_decisions_go_with_the_daemon_and_later_requests_are_explained_again(
    make_daemon: MakeDaemon, model: Model
) -> None:
    daemon = make_daemon()
    with serving(model, daemon.run_dir) as served:
        before = served.complete()["id"]
        until(lambda: daemon.stats()["requests"]["count"] == 1)
        daemon.restart()
        assert json.loads(explain(daemon, "--json")) == {"decisions": [], "total": 0}

        def ids() -> list[str]:
            served.complete()
            return [view["id"] for view in json.loads(explain(daemon, "--json"))["decisions"]]

        assert before not in until(ids)
