"""Who may connect to the publisher over CURVE, ZMQ's encryption and authentication: ZAP (RFC 27), our own end of it.

A server with CURVE and without this lets in everybody who knows its public key.
"""

import os
import stat
from pathlib import Path
from typing import Final

import zmq
import zmq.utils.z85

from kvstore.core.errors import ConfigError

_ENDPOINT: Final = "inproc://zeromq.zap.01"
_Z85_CHARS: Final = 40
_MAX_FILE_BYTES: Final = 1 << 20
_EXAMPLE: Final = "python -c 'import zmq; print(zmq.curve_keypair())' makes a pair, public and secret"


def read_secret_key(path: str) -> bytes:
    """Return the Z85 secret key in the file, which must be the user's alone. Raises ConfigError."""
    return _keys(path, "events.curve_secret_key_file", is_secret=True)[0]


def read_public_keys(path: str) -> frozenset[bytes]:
    """Return the Z85 public keys in the file, one per line. Raises ConfigError."""
    return frozenset(_keys(path, "events.curve_clients_file", is_secret=False))


def make_gate(context: "zmq.Context[zmq.Socket[bytes]]", allowed: frozenset[bytes]) -> "Gate":
    """Bind the gate; to be done before the sockets that it guards are bound."""
    socket = context.socket(zmq.REP)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(_ENDPOINT)
    return Gate(socket, allowed)


class Gate:
    """Answers, for each connection that is being made, whether its key is one of those."""

    def __init__(self, socket: "zmq.Socket[bytes]", allowed: frozenset[bytes]) -> None:
        self.socket = socket
        self._allowed = allowed

    def answer(self) -> None:
        """Answer one question that is there."""
        frames = self.socket.recv_multipart(zmq.NOBLOCK)
        self.socket.send_multipart(judge(frames, self._allowed))


def judge(frames: list[bytes], allowed: frozenset[bytes]) -> list[bytes]:
    """The answer to one question of ZAP 1.0: [version, id, domain, address, identity, mechanism, key]."""
    version, request = frames[0], frames[1] if len(frames) > 1 else b""
    is_known = len(frames) == 7 and frames[5] == b"CURVE" and zmq.utils.z85.encode(frames[6]) in allowed
    code, text = (b"200", b"OK") if is_known else (b"400", b"this key is not allowed")
    return [version, request, code, text, b"", b""]


def secure(socket: "zmq.Socket[bytes]", secret_key: bytes) -> None:
    """Have the socket, which is not bound yet, speak CURVE only."""
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret_key))
    socket.setsockopt(zmq.CURVE_SERVER, 1)


def _keys(path: str, setting: str, is_secret: bool) -> list[bytes]:
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from None
    if is_secret and stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{setting}: {path} is open to other users: chmod 600 {path}")
    keys = [line.strip() for line in data.splitlines() if line.strip()]
    if not keys or (is_secret and len(keys) > 1) or not all(_is_key(key) for key in keys):
        which = "one secret key" if is_secret else "public keys, one per line,"
        raise ConfigError(f"{setting}: {path} must hold {which} of 40 characters (Z85); {_EXAMPLE}")
    return keys


def _is_key(text: bytes) -> bool:
    if len(text) != _Z85_CHARS:
        return False
    try:
        return len(zmq.utils.z85.decode(text)) == 32
    except (KeyError, ValueError):
        return False
