"""Opens connections to a bucket's servers: plain or TLS, direct or through the proxy that the environment names.

The variables are those that every client knows: HTTP_PROXY, HTTPS_PROXY, NO_PROXY. A proxy's user and password go to
the proxy alone, and no message repeats them.
"""

import base64
import http.client
import socket
import ssl
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self
from urllib.parse import SplitResult, unquote, urlsplit

_PORTS = {"http": 80, "https": 443}
_CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Origin:
    """Which server, and how: what two requests must have in common to use one connection."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: SplitResult) -> Self:
        return cls(url.scheme, url.hostname or "", url.port or _PORTS.get(url.scheme, 0))


@dataclass(frozen=True, slots=True)
class Connection:
    """An open connection. `for_proxy` is None on one to the server itself; else the other end is a proxy that wants to
    be told the whole address, with these header lines."""

    sock: socket.socket
    origin: Origin
    for_proxy: list[str] | None


class Connector:
    """Thread-safe."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        """`tls` None refuses https."""
        self._tls = tls
        self._proxies = urllib.request.getproxies_environment()

    def open(self, origin: Origin, left_s: Callable[[], float]) -> Connection:
        """Connect; `left_s` says before each step how long it may take. Raises OSError, and what `left_s` does."""
        proxy = self._proxy(origin)
        if proxy is None:
            sock = _dial(origin.host, origin.port, left_s)
        else:
            sock = _dial(proxy.hostname or "", proxy.port or _PORTS["http"], left_s)
        try:
            if origin.scheme != "https":
                return Connection(sock, origin, None if proxy is None else _credentials(proxy))
            if proxy is not None:
                sock.settimeout(left_s())
                _open_tunnel(sock, origin, proxy)
            if self._tls is None:
                raise ConnectionError("an http endpoint led to https")
            sock.settimeout(left_s())
            return Connection(self._tls.wrap_socket(sock, server_hostname=origin.host), origin, None)
        except BaseException:
            sock.close()
            raise

    def _proxy(self, origin: Origin) -> SplitResult | None:
        address = self._proxies.get(origin.scheme)
        if not address or urllib.request.proxy_bypass(f"{origin.host}:{origin.port}"):
            return None
        return urlsplit(address if "://" in address else f"http://{address}")


def _dial(host: str, port: int, left_s: Callable[[], float]) -> socket.socket:
    """Connect to the first address that answers. A name of S3 has many, and each may take its time to fail."""
    failed: OSError = ConnectionError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(min(left_s(), _CONNECT_TIMEOUT_S))
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return sock
        except OSError as error:
            sock.close()
            failed = error
    raise failed


def _credentials(proxy: SplitResult) -> list[str]:
    if proxy.username is None:
        return []
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return [f"Proxy-Authorization: Basic {base64.b64encode(pair.encode()).decode()}"]


def _open_tunnel(sock: socket.socket, origin: Origin, proxy: SplitResult) -> None:
    address = f"{origin.host}:{origin.port}"
    lines = [f"CONNECT {address} HTTP/1.1", f"Host: {address}", *_credentials(proxy), "", ""]
    sock.sendall("\r\n".join(lines).encode("latin-1"))
    answer = http.client.HTTPResponse(sock, method="CONNECT")
    try:
        answer.begin()
        if answer.status != 200:
            raise ConnectionError(f"the proxy answers {answer.status}")
    finally:
        # Lets go of the file around the socket, not of the socket.
        answer.close()
