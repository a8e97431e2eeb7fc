"""The engine's HTTP routes, OpenAI-style."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.body import Call, Caller, parse_chat, parse_completion
from engine.generation import GenerationResponse, Slots
from engine.guard import Guard, read_body
from engine.metrics import Metrics
from engine.reply import error_body
from engine.service import Engine
from engine.turn import Refused

_Handler = Callable[[Request, Caller], Awaitable[Any]]
_Parser = Callable[[bytes, Caller, str, float], Call]


def make_app(engine: Engine, guard: Guard, max_tokens: int) -> Starlette:
    """`engine` is started and stopped by the caller. `max_tokens` is the longest reply that may be asked for."""
    routes = _Routes(engine, guard, max_tokens)
    return Starlette(
        routes=[
            Route("/health", routes.health),
            Route("/metrics", routes.guarded(routes.metrics)),
            Route("/v1/models", routes.guarded(routes.models)),
            Route("/v1/chat/completions", routes.generating(parse_chat), methods=["POST"]),
            Route("/v1/completions", routes.generating(parse_completion), methods=["POST"]),
            Route("/v1/hbm", routes.guarded(routes.hbm)),
            Route("/v1/hbm/drop", routes.guarded(routes.drop_hbm), methods=["POST"]),
        ],
        exception_handlers={Refused: _refused, HTTPException: _http_error, Exception: _fault},
    )


class _Routes:
    def __init__(self, engine: Engine, guard: Guard, max_tokens: int) -> None:
        self._engine = engine
        self._guard = guard
        self._max_tokens = max_tokens
        self._slots = Slots(engine.options.max_requests)
        self._metrics = Metrics(engine)
        self._started_s = int(time.time())

    def guarded(self, handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            answer = await handler(request, self._guard.admit(request))
            return answer if isinstance(answer, Response) else _json(answer)

        return route

    def generating(self, parse: _Parser) -> Callable[[Request], Awaitable[Any]]:
        async def route(request: Request) -> GenerationResponse:
            arrival_s = time.monotonic()
            caller = self._guard.admit(request)
            call = parse(await read_body(request), caller, self._engine.model_name, arrival_s)
            if call.ask.max_tokens is not None and call.ask.max_tokens > self._max_tokens:
                raise Refused(400, "invalid_request", f"max_tokens is at most {self._max_tokens} here")
            if self._engine.roots is not None and not self._engine.roots.knows(call.ask.tenant):
                raise Refused(400, "too_many_tenants", "this engine serves no more tenants than it has by now")
            if self._engine.fault:
                raise Refused(503, "engine_fault", f"the engine met a fault: {self._engine.fault}")
            return GenerationResponse(self._engine, call, self._slots, self._metrics)

        return route

    async def health(self, request: Request) -> Response:
        if self._engine.fault:
            return _json({"status": "fault", "fault": self._engine.fault}, 503)
        return _json({"status": "ready", "model": self._engine.model_name, "running": self._slots.taken})

    async def metrics(self, request: Request, caller: Caller) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request, caller: Caller) -> Any:
        model = {"id": self._engine.model_name, "object": "model", "created": self._started_s, "owned_by": "local"}
        return {"object": "list", "data": [model]}

    async def hbm(self, request: Request, caller: Caller) -> Any:
        return self._engine.hbm_state()

    async def drop_hbm(self, request: Request, caller: Caller) -> Any:
        """Forget every cached block that no request uses."""
        return {"dropped_pool_blocks": await self._engine.drop_hbm()}


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    response = _json(error_body(error), error.status)
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    if error.status in (429, 503):
        response.headers["retry-after"] = "1"
    return response


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json(error_body(Refused(error.status_code, "http_error", error.detail)), error.status_code)


async def _fault(request: Request, error: Exception) -> Response:
    return _json(error_body(Refused(500, "internal_error", "the server met a fault; its log tells more")), 500)


def _json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
