"""Starts the link as a process and tells it how to be."""

import subprocess
import sys
from typing import Self

import msgspec

from kvstore.bench.plan.link import Line, Status
from kvstore.core.errors import TierUnavailable


class LinkProcess:
    """A link to `host`:`port`, open and without limits at first. `endpoint` is where clients find it.

    Raises TierUnavailable where the process has ended.
    """

    def __init__(self, host: str, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvstore.bench.plan.link", host, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.endpoint = f"http://127.0.0.1:{self._hear().port}"

    def be(self, line: Line) -> Status:
        """Return once the link is as told, with what has passed by then."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(line) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise TierUnavailable("the link's process has ended") from None
        return self._hear()

    def close(self) -> None:
        """Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hear(self) -> Status:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise TierUnavailable("the link's process has ended")
        return msgspec.json.decode(text, type=Status)
