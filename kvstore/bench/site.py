"""What benchmarks of the whole path run on, each part as a user would start it.

    engines ─► daemon (RAM, no SSD) ─► (link) ─► S3 server

Covers starting, asking and ending. Does not cover what is measured.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httpx

from kvstore.bench.plan.linkprocess import LinkProcess
from kvstore.client import Client
from kvstore.core.errors import KVStoreError, TierUnavailable
from kvstore.demo.processes import Daemon, EngineProcess
from kvstore.s3server import REGION, S3Server

DEADLINE_S: Final = 120.0
_BUCKET: Final = "kvstore-bench"


class Site:
    """`folder` exists, is empty and is the caller's. `environment`: the daemon's settings beside those of RAM and
    bucket. All of it ends with the `with` block. Raises KVStoreError."""

    link: LinkProcess
    _daemon: Daemon
    console: Client

    def __init__(
        self, folder: Path, ram_size: str, *, has_link: bool = False, environment: Mapping[str, str] | None = None
    ) -> None:
        self._folder = folder
        self._ram_size = ram_size
        self._has_link = has_link
        self._environment = dict(environment or {})
        self._stack = contextlib.ExitStack()
        self._http = self._stack.enter_context(httpx.Client(timeout=DEADLINE_S))

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    # ------------------------------------------------------------ engines

    def new_engine(self, name: str, arguments: Sequence[str]) -> EngineProcess:
        """Start an engine that knows nothing of any link yet, and return it once it serves."""
        engine = EngineProcess([*arguments, "--run-dir", str(self._daemon.run_dir)], self._folder / f"{name}.log")
        self._stack.callback(engine.kill)
        engine.start()
        return engine

    def post(
        self, engine: EngineProcess, path: str, body: Mapping[str, Any], timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Raises httpx.ReadTimeout after `timeout_s`, KVStoreError where the engine refuses."""
        return _checked(self._http.post(f"{engine.url}{path}", json=body, timeout=timeout_s or DEADLINE_S))

    def get(self, engine: EngineProcess, path: str) -> dict[str, Any]:
        return _checked(self._http.get(f"{engine.url}{path}"))

    # ------------------------------------------------------------ the daemon

    def wait_durable(self, session_ids: Sequence[str]) -> None:
        """Return once the newest turns of these sessions are in the bucket."""

        def are_durable() -> bool:
            found = {view.id: view.durable for view in self.console.session_list().sessions}
            return all(found.get(session_id) == "s3" for session_id in session_ids)

        wait(are_durable, f"{len(session_ids)} sessions are not in the bucket", DEADLINE_S, 0.1)

    # ------------------------------------------------------------ start

    def _start(self) -> None:
        s3 = self._stack.enter_context(S3Server(self._folder / "s3", buckets=[_BUCKET]))
        endpoint = s3.endpoint
        if self._has_link:
            address = urlsplit(s3.endpoint)
            assert address.hostname is not None and address.port is not None
            self.link = self._stack.enter_context(LinkProcess(address.hostname, address.port))
            endpoint = self.link.endpoint
        self._daemon = Daemon(
            self._folder / "run", self._folder / "daemon.log", self._settings(s3, endpoint) | self._environment
        )
        self._stack.callback(self._daemon.stop)
        self._daemon.start()
        self.console = self._stack.enter_context(contextlib.closing(self._daemon.console()))

    def _settings(self, s3: S3Server, endpoint: str) -> dict[str, str]:
        keys = self._folder / "keys"
        keys.mkdir(mode=0o700)
        for name, secret in (("access", s3.access_key), ("secret", s3.secret_key)):
            (keys / name).touch(mode=0o600)
            (keys / name).write_text(secret)
        return {
            "KVSTORE_RAM_SIZE": self._ram_size,
            "KVSTORE_SSD_ENABLED": "false",
            "KVSTORE_HTTP_ENABLED": "false",
            "KVSTORE_S3_BUCKET": _BUCKET,
            "KVSTORE_S3_ENDPOINT": endpoint,
            "KVSTORE_S3_REGION": REGION,
            "KVSTORE_S3_ACCESS_KEY_FILE": str(keys / "access"),
            "KVSTORE_S3_SECRET_KEY_FILE": str(keys / "secret"),
        }


def wait(condition: Callable[[], bool], what: str, deadline_s: float, look_every_s: float) -> None:
    """Return once `condition` holds. Raises TierUnavailable, saying `what` is the matter, after `deadline_s`."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end_s:
            raise TierUnavailable(f"{what} after {deadline_s:.0f} s")
        time.sleep(look_every_s)


def _checked(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code != 200:
        raise KVStoreError(f"the engine answered {answer.status_code}: {answer.text[:500]}")
    return dict(answer.json())
