"""A process that keeps a daemon busy while lookups are timed: sessions that are stored and uploaded, and HTTP
requests.

Run as `python -m kvstore.bench.load` with LoadSettings as JSON on standard input, until it is killed. One thread
stores turns of a session as fast as the daemon takes them, so that uploads never pause; another asks the HTTP API for
the statistics a hundred times a second, and waits for each answer.
"""

import contextlib
import sys
import threading
import time
from pathlib import Path
from typing import Final

import httpx
import msgspec

from kvstore import wire
from kvstore.bench.daemon import DEADLINE_S, prefix, store
from kvstore.bench.memory import Buffers, copy
from kvstore.bench.settings import namespace
from kvstore.client import Client
from kvstore.core.errors import TierUnavailable
from kvstore.core.key import join_keys

_BLOCKS_PER_TURN: Final = 16
_REQUEST_EVERY_S: Final = 0.01
# More would wait for the bucket in any case, and only fill the disk.
_MAX_WAITING: Final = 64


class LoadSettings(msgspec.Struct, frozen=True):
    run_dir: str
    http_url: str
    block_bytes: int


def encode(settings: LoadSettings) -> bytes:
    return msgspec.json.encode(settings)


def main() -> None:
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=LoadSettings)
    threading.Thread(target=_request, args=(settings,), daemon=True).start()
    _store_sessions(settings)


def _store_sessions(settings: LoadSettings) -> None:
    space = namespace(settings.block_bytes, block_tokens=16, name="load")
    source = Buffers(_BLOCKS_PER_TURN, settings.block_bytes)
    with contextlib.closing(Client(Path(settings.run_dir), namespace=space, deadline_s=DEADLINE_S)) as client:
        number = 0
        while True:
            number += 1
            keys = prefix(space, _BLOCKS_PER_TURN, number)
            with contextlib.suppress(TierUnavailable):
                store(client, space, keys, lambda i, view: copy(view, source.views[i]))
                _put(client, space.digest(), f"load-{number}", join_keys(keys))
            while _waiting(client) > _MAX_WAITING:
                time.sleep(0.02)


def _put(client: Client, digest: bytes, session_id: str, keys: bytes) -> None:
    message = wire.ChatMessage("user", "load", list(range(16 * _BLOCKS_PER_TURN)))
    client.session_put(wire.SessionPut(session_id, "", digest, 0, [message], keys))


def _waiting(client: Client) -> int:
    stats = msgspec.convert(client.stats(), type=_Stats)
    return stats.tiers["s3"].queue


class _TierQueue(msgspec.Struct, frozen=True):
    queue: int = 0


class _Stats(msgspec.Struct, frozen=True):
    tiers: dict[str, _TierQueue]


def _request(settings: LoadSettings) -> None:
    with httpx.Client(base_url=settings.http_url, timeout=DEADLINE_S) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                client.get("/v1/stats")
            time.sleep(_REQUEST_EVERY_S)


if __name__ == "__main__":
    main()
