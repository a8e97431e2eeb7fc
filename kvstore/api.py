"""The HTTP API: health, statistics, metrics, sessions, eviction; a process of its own that asks the daemon like anyone.

Started by the daemon as `python -m kvstore.api` with ApiSettings as JSON on standard input (or `python -m kvstore.api
FILE`). Covers: routes and the process. Does not cover: who may ask (`kvstore/guard.py`), the metrics' names
(`kvstore/metrics.py`). Errors are JSON: {"error": {"code": "not_found", "message": "…"}}.
"""

import contextlib
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as StarletteHTTPException

from kvstore import metrics
from kvstore.client import Client
from kvstore.config import HttpConfig
from kvstore.core.errors import ConfigError, KVStoreError, ProtocolError, TierUnavailable
from kvstore.core.hosts import is_loopback
from kvstore.decision_json import as_json
from kvstore.guard import Guard, read_token
from kvstore.line import Line, LineBusy
from kvstore.process import HTTP_NICE, end_with_parent, stand_back
from kvstore.version import VERSION
from kvstore.wire import ErrorCode, SessionView

_log = logging.getLogger(__name__)
_STATUS: Final = {
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.CONFLICT: 409,
    ErrorCode.BUSY: 503,
    ErrorCode.BAD_REQUEST: 400,
    ErrorCode.TOO_LONG: 400,
}
_STATUS_CODES: Final = {404: "not_found", 405: "method_not_allowed", 400: "bad_request"}
_MAX_CONNECTIONS: Final = 128
_GRACE_S: Final = 3
# Probes of an orchestrator have no token, and the answer tells nothing about anybody.
_OPEN_PATHS: Final = ("/health",)


class ApiSettings(msgspec.Struct, frozen=True):
    """`parent` is the process that the API must not outlive; 0: none."""

    run_dir: str
    http: HttpConfig
    log_level: str = "info"
    parent: int = 0


class PinRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    pinned: bool


class HintRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    expect_followup: bool = False
    end: bool = False
    priority: Annotated[int, Field(ge=-2, le=2)] = 0
    ttl_s: Annotated[float, Field(ge=0)] = 0.0


class EvictRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    tiers: list[Literal["ram", "ssd", "s3"]]
    drop: bool = False


Tenant = Annotated[str, Query(max_length=256)]


def create_app(connect: Callable[[], Client], http: HttpConfig) -> FastAPI:
    """Return the app. `connect` is called at most once per line, on the thread that uses that client alone.

    Reads the token file.

    Raises ConfigError where the token file is no use.
    """
    line = Line(connect)
    # Emptying a tier takes up to a minute; meanwhile everything else, health above all, is answered.
    slow_line = Line(connect)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        line.close()
        slow_line.close()

    app = FastAPI(title="kvstore", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None)
    token = read_token(Path(http.token_file)) if http.token_file else None
    # With a token, or a name we cannot know, the Host header proves nothing.
    hosts = {"localhost", "127.0.0.1", "::1", http.host} if token is None and is_loopback(http.host) else None
    app.add_middleware(Guard, token=token, open_paths=_OPEN_PATHS, hosts=hosts)
    _add_error_handlers(app)
    _add_operation(app, line)
    _add_decisions(app, line)
    _add_sessions(app, line)
    _add_eviction(app, slow_line)
    return app


def _add_operation(app: FastAPI, line: Line) -> None:
    @app.get("/health")
    async def health() -> dict[str, Any]:
        round_trip_s = await line.ask(lambda client: client.ping())
        return {"status": "ok", "round_trip_s": round_trip_s}

    @app.get("/v1/stats")
    async def stats() -> JSONResponse:
        return JSONResponse(await line.ask(lambda client: client.stats()))

    @app.get("/metrics")
    async def prometheus(request: Request) -> Response:
        try:
            snapshot = await line.ask(lambda client: client.stats())
        except TierUnavailable:
            # Scraping goes on while the daemon is away: that is when `kvstore_up` is worth something.
            snapshot = None
        body, content_type = metrics.render(snapshot, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})


def _add_decisions(app: FastAPI, line: Line) -> None:
    @app.get("/v1/decisions")
    async def list_decisions(
        tenant: Annotated[str | None, Query(max_length=256)] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> dict[str, Any]:
        views, total = await line.ask(lambda client: client.decision_list(tenant, limit))
        return {"decisions": [as_json(view) for view in views], "total": total}

    @app.get("/v1/decisions/{request_id}")
    async def show_decision(
        request_id: str, tenant: Annotated[str | None, Query(max_length=256)] = None
    ) -> dict[str, Any]:
        return as_json(await line.ask(lambda client: client.decision_get(request_id, tenant)))


def _add_sessions(app: FastAPI, line: Line) -> None:
    @app.get("/v1/sessions")
    async def list_sessions(
        tenant: Annotated[str | None, Query(max_length=256)] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    ) -> dict[str, Any]:
        found = await line.ask(lambda client: client.session_list(tenant, limit))
        return {"sessions": [_summary(view) for view in found.sessions], "total": found.total}

    @app.get("/v1/sessions/{session_id}")
    async def show_session(session_id: str, tenant: Tenant = "") -> dict[str, Any]:
        view = await line.ask(lambda client: client.session_get(session_id, tenant))
        if view is None:
            raise ProtocolError(ErrorCode.NOT_FOUND, f"there is no session {session_id!r}")
        return _summary(view) | {
            "messages": [
                {"role": message.role, "content": message.content, "num_tokens": len(message.token_ids)}
                for message in view.messages
            ]
        }

    @app.post("/v1/sessions/{session_id}/pin")
    async def pin_session(session_id: str, order: PinRequest, tenant: Tenant = "") -> dict[str, Any]:
        await line.ask(lambda client: client.session_pin(session_id, order.pinned, tenant))
        return {"id": session_id, "pinned": order.pinned}

    @app.post("/v1/sessions/{session_id}/hint")
    async def hint_session(session_id: str, order: HintRequest, tenant: Tenant = "") -> dict[str, Any]:
        await line.ask(lambda client: client.session_hint(session_id, tenant=tenant, **order.model_dump()))
        return {"id": session_id}

    @app.post("/v1/sessions/{session_id}/prefetch")
    async def prefetch_session(session_id: str, tenant: Tenant = "") -> dict[str, Any]:
        begun = await line.ask(lambda client: client.session_prefetch(session_id, tenant))
        return {"id": session_id, "blocks_to_load": begun.blocks_to_load, "blocks": begun.blocks}

    @app.delete("/v1/sessions/{session_id}")
    async def delete_session(session_id: str, tenant: Tenant = "") -> dict[str, Any]:
        done = await line.ask(lambda client: client.session_delete(session_id, tenant))
        return {"id": session_id, "blocks_deleted": done.blocks_deleted, "blocks_shared": done.blocks_shared}


def _add_eviction(app: FastAPI, line: Line) -> None:
    @app.post("/v1/evict")
    async def evict(order: EvictRequest) -> dict[str, Any]:
        if not order.tiers:
            raise HTTPException(400, "tiers must name at least one of ram, ssd, s3")
        done = await line.ask(lambda client: client.evict(list(order.tiers), order.drop))
        return {"freed": done.freed, "kept": done.kept}


def _summary(view: SessionView) -> dict[str, Any]:
    """What may be listed: everything but what was said."""
    fields = msgspec.structs.asdict(view)
    del fields["messages"]
    return fields


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(KVStoreError)
    async def fault(_: Request, error: KVStoreError) -> JSONResponse:
        if isinstance(error, TierUnavailable):
            return _error(503, "daemon_unreachable", str(error))
        if isinstance(error, ProtocolError):
            return _error(_STATUS.get(error.code, 502), error.code, str(error))
        return _error(500, "internal", str(error))

    @app.exception_handler(LineBusy)
    async def busy(_: Request, error: LineBusy) -> JSONResponse:
        return _error(503, "busy", str(error))

    @app.exception_handler(StarletteHTTPException)
    async def refused(_: Request, error: StarletteHTTPException) -> JSONResponse:
        return _error(error.status_code, _STATUS_CODES.get(error.status_code, "refused"), str(error.detail))

    @app.exception_handler(Exception)
    async def broken(_: Request, __: Exception) -> JSONResponse:
        # The server logs the traceback; the caller need not see it.
        return _error(500, "internal", "the API failed; its log says why")

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            return _error(400, "bad_request", "send the header 'Content-Type: application/json' with the body")
        # Of each fault the place and the text, not the input: it may be anything.
        faults = (f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in error.errors())
        return _error(400, "bad_request", "; ".join(faults))


def _error(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message}}, status)


def main() -> int:
    settings = _read_settings()
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s http: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its five lines about starting and stopping
    if settings.parent:
        end_with_parent(settings.parent, signal.SIGTERM)
        stand_back(HTTP_NICE)
        # The daemon decides when to stop; a Ctrl-C in its terminal reaches this process too.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        app = create_app(lambda: Client(Path(settings.run_dir), name="http"), settings.http)
        server = _server(app)
        # From here on, and not only once uvicorn runs: a SIGTERM in between would be lost.
        signal.signal(signal.SIGTERM, server.handle_exit)
        listener = _listen(settings.http)
    except ConfigError as error:
        _log.error("%s", error)
        return 2
    with listener:
        server.run(sockets=[listener])
    return 0


class _Server(uvicorn.Server):
    """A server that leaves the process's signal handlers alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(app: FastAPI) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )


def _read_settings() -> ApiSettings:
    source = Path(sys.argv[1]).read_bytes() if len(sys.argv) > 1 else sys.stdin.buffer.read()
    return msgspec.json.decode(source, type=ApiSettings)


def _listen(http: HttpConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    try:
        listener = socket.create_server((http.host, http.port), family=family, backlog=_MAX_CONNECTIONS)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {http.host} port {http.port}: {error.strerror}; choose another http.port"
        ) from None
    host = f"[{http.host}]" if ":" in http.host else http.host
    _log.info("HTTP API on http://%s:%d", host, listener.getsockname()[1])
    return listener


if __name__ == "__main__":
    sys.exit(main())
