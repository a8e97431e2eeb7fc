"""Who may ask the engine, and how much: API keys, Host header, content type, size of the body.

Covers: what can be said before a body is read. Does not cover: what requests mean.
"""

import asyncio
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request

from engine.body import Caller
from engine.turn import Refused
from kvstore.core.errors import ConfigError
from kvstore.core.hosts import is_loopback

MAX_BODY_BYTES = 4 << 20
# Short ones can be tried out.
_MIN_KEY_CHARS = 16
_MAX_KEY_FILE_BYTES = 64 << 10
_BODY_DEADLINE_S = 30.0
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


def read_api_keys(path: Path, default_tenant: str) -> dict[str, str]:
    """Return the tenant of each key. A line of the file is a key, or a key and its tenant; `#` begins a comment.

    Raises ConfigError naming the line.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_KEY_FILE_BYTES + 1).decode("ascii")
    except OSError as error:
        raise ConfigError(f"--api-key-file: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file: {path} holds more than ASCII") from None
    if len(text) > _MAX_KEY_FILE_BYTES:
        raise ConfigError(f"--api-key-file: {path} is longer than {_MAX_KEY_FILE_BYTES} bytes")
    tenants: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        if len(fields) > 2 or len(fields[0]) < _MIN_KEY_CHARS or not fields[0].isprintable():
            raise ConfigError(
                f"--api-key-file: line {number} of {path} must be a key of at least {_MIN_KEY_CHARS} characters, "
                "and its tenant if it has one"
            )
        if fields[0] in tenants:
            raise ConfigError(f"--api-key-file: line {number} of {path} holds a key that is there already")
        tenants[fields[0]] = fields[1] if len(fields) == 2 else default_tenant
    if not tenants:
        raise ConfigError(f"--api-key-file: {path} holds no key; example: openssl rand -hex 32 > {path}")
    return tenants


@dataclass(frozen=True, slots=True)
class Guard:
    """`tenants` is by API key, None: no key is needed. `tenant` is whose requests those without a key are."""

    tenants: Mapping[str, str] | None
    tenant: str

    def admit(self, request: Request) -> Caller:
        """Return who asks. Raises Refused (401, 403, 415)."""
        if self.tenants is None:
            # A web page may point a name of its own at 127.0.0.1; only the Host header tells (DNS rebinding).
            host = _host_name(request.headers.get("host", ""))
            if host not in _LOCAL_HOSTS and not is_loopback(host):
                raise Refused(403, "forbidden_host", "this server answers only to the names of the local machine")
            caller = Caller(self.tenant, may_choose_tenant=True)
        else:
            caller = Caller(self._tenant_of(request, self.tenants), may_choose_tenant=False)
        if request.method == "POST":
            # A web page cannot send this type to another origin without being asked first.
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise Refused(415, "unsupported_media_type", "send the header Content-Type: application/json")
        return caller

    def _tenant_of(self, request: Request, tenants: Mapping[str, str]) -> str:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        found: str | None = None
        # Every key is compared, in constant time, so that the time tells nothing.
        for key, tenant in tenants.items():
            if hmac.compare_digest(given.strip().encode(), key.encode()):
                found = tenant
        if scheme.lower() != "bearer" or found is None:
            raise Refused(401, "unauthorized", "send the header Authorization: Bearer API-KEY")
        return found


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES, deadline_s: float = _BODY_DEADLINE_S) -> bytes:
    """Return the body. Raises Refused (413) as soon as it is too long, and where it does not come (408, 400)."""
    body = bytearray()
    try:
        async with asyncio.timeout(deadline_s):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise Refused(413, "too_large", f"the body is longer than {max_bytes} bytes")
    except TimeoutError:
        raise Refused(408, "timeout", f"the body did not come within {deadline_s:g} s") from None
    except ClientDisconnect:
        raise Refused(400, "disconnected", "the client went away before its body had come") from None
    return bytes(body)


def _host_name(header: str) -> str:
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
