"""A whole engine over a fake model and a fake kvstore, behind a real socket."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import torch
import uvicorn

from engine.app import make_app
from engine.guard import Guard
from engine.model import ModelSpec
from engine.service import Engine, EngineOptions
from tests.engine.fakes import FakeClient, FakeHbm, FakeModel, FakeStore, fake_pool
from tests.engine.tiny_tokenizer import END, VOCAB, tiny_tokenizer
from tests.support.waiting import PATIENCE_S, until

SPEC = ModelSpec("fake", "0", "float32", 1, 1, 1, VOCAB, 600, (END,))
OPTIONS = EngineOptions(block_tokens=4, pool_block_tokens=4, chunk_tokens=32, max_batch=4, max_requests=6)


class Model(FakeModel):
    """`gate` closed: steps wait."""

    def __init__(self, pool_block_tokens: int = 4) -> None:
        super().__init__(pool_block_tokens, VOCAB)
        self.spec = SPEC
        self.tokenizer = tiny_tokenizer()
        self.gate = threading.Event()
        self.gate.set()

    def forward(self, *args: Any) -> torch.Tensor:
        assert self.gate.wait(20)
        return super().forward(*args)


class Served:
    """A running engine and its HTTP client."""

    def __init__(self, engine: Engine, model: Model, http: httpx.Client) -> None:
        self.engine = engine
        self.model = model
        self.http = http

    def chat(self, text: str, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 5, "ignore_eos": True, **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5, "ignore_eos": True, **fields})

    def rest(self) -> None:
        """Wait until nothing runs and no block is used or held, and check the pool."""

        def is_at_rest() -> bool:
            state = self.http.get("/v1/hbm").json()
            return not state["in_use"] and not state["held"]

        until(is_at_rest)
        self.engine.between_steps(self.engine.pool.check_integrity).result(PATIENCE_S)


@contextmanager
def serving(
    store: FakeStore | None, options: EngineOptions = OPTIONS, keys: dict[str, str] | None = None
) -> Iterator[Served]:
    model, pool = Model(), fake_pool(200, 4)
    make = None if store is None else (lambda namespace: FakeClient(store, namespace.tenant))
    engine = Engine(model, pool, FakeHbm(pool), options, make)
    engine.start()
    app = make_app(engine, Guard(keys, options.tenant), max_tokens=100)
    config = uvicorn.Config(app, port=0, log_level="warning", access_log=False, lifespan="off", loop="asyncio")
    http_server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(http_server.serve()))
    thread.start()
    try:
        until(lambda: http_server.started)
        port = http_server.servers[0].sockets[0].getsockname()[1]
        # No connection outlives its request, so that a test can be seen to leave none open.
        headers = {"connection": "close"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, headers=headers) as http:
            yield Served(engine, model, http)
    finally:
        model.gate.set()
        http_server.should_exit = True
        thread.join(10)
        engine.stop(2)
