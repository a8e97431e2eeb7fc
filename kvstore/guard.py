"""Decides which HTTP requests are looked at: by their token, their Host header, and the size of their body.

Covers: refusing early, with a JSON error. Does not cover: what the requests mean, see `kvstore/api.py`.
"""

import contextlib
import hmac
import json
from collections.abc import Collection
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstore.core.errors import ConfigError

MAX_BODY_BYTES: Final = 64 << 10
# Short ones can be tried out; 16 characters of base64 are 96 bits.
MIN_TOKEN_CHARS: Final = 16
_MAX_TOKEN_FILE_BYTES: Final = 4096


def read_token(path: Path) -> str:
    """Return the token that the file holds, without the white space around it. Raises ConfigError saying what to do."""
    try:
        with path.open("rb") as file:
            token = file.read(_MAX_TOKEN_FILE_BYTES).decode("ascii").strip()
    except OSError as error:
        raise ConfigError(f"http.token_file: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"http.token_file: {path} holds more than printable ASCII") from None
    if len(token) < MIN_TOKEN_CHARS or not token.isprintable() or " " in token:
        raise ConfigError(
            f"http.token_file: {path} must hold one token of at least {MIN_TOKEN_CHARS} characters; "
            f"example: openssl rand -hex 32 > {path}"
        )
    return token


class Guard:
    """ASGI middleware. `token` None lets everyone in; `open_paths` need no token; `hosts` None takes every Host header.

    The Host header matters where there is no token: a web page may point a name of its own at 127.0.0.1 and so
    have a browser on this machine ask us, and only that header tells (DNS rebinding). A page may also send us a
    request of its own without being let see the answer; then the Origin header tells.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        open_paths: Collection[str] = (),
        hosts: Collection[str] | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._app = app
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._open_paths = frozenset(open_paths)
        self._hosts = None if hosts is None else frozenset(hosts)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a WebSocket: nothing here speaks it, and an app that sends nothing has it closed
        headers: dict[bytes, bytes] = dict(scope["headers"])
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await _refuse(send, *refusal)
            return
        exchange = _Exchange(receive, send, self._max_body_bytes)
        with contextlib.suppress(_TooLong):
            await self._app(scope, exchange.receive, exchange.send)
        if exchange.is_too_long and not exchange.answered:
            await _refuse(send, *self._too_long())

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> tuple[int, str, str] | None:
        if self._hosts is not None and _host_name(headers.get(b"host", b"")) not in self._hosts:
            return 403, "forbidden_host", "this API answers only requests to the host it listens on"
        if self._hosts is not None and not _is_own_origin(headers):
            return 403, "forbidden_origin", "this API takes no requests from other sites' pages"
        if (
            self._authorization is not None
            and path not in self._open_paths
            and not hmac.compare_digest(headers.get(b"authorization", b""), self._authorization)
        ):
            return 401, "unauthorized", "send the header 'Authorization: Bearer TOKEN' with the configured token"
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            return 400, "bad_request", "Content-Length is no number"
        if int(length) > self._max_body_bytes:
            return self._too_long()
        return None

    def _too_long(self) -> tuple[int, str, str]:
        return 413, "too_long", f"the body may have {self._max_body_bytes} bytes"


class _TooLong(Exception):
    """Ends the app's reading of a body."""


class _Exchange:
    """One request and its answer. Counts what is received, since a chunked body states no length in front.

    What the app answers to a body that was cut off is held back: it can only guess what went wrong.
    """

    def __init__(self, receive: Receive, send: Send, max_bytes: int) -> None:
        self._receive = receive
        self._send = send
        self._left = max_bytes
        self.is_too_long = False
        self.answered = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                self.is_too_long = True
                raise _TooLong
        return message

    async def send(self, message: Message) -> None:
        if self.answered or not self.is_too_long:
            self.answered = True
            await self._send(message)


def _host_name(header: bytes) -> str:
    try:
        return urlsplit(f"//{header.decode('ascii')}").hostname or ""
    except (UnicodeDecodeError, ValueError):
        return ""


def _is_own_origin(headers: dict[bytes, bytes]) -> bool:
    """Whether the request comes from a page of this server's own, or from no page: only browsers send an Origin."""
    origin = headers.get(b"origin")
    return origin is None or origin.partition(b"://")[2] == headers.get(b"host", b"")


async def _refuse(send: Send, status: int, code: str, message: str) -> None:
    body = json.dumps({"error": {"code": code, "message": message}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
