"""Two other users of the engine: each reads a long answer as a stream, then asks for the next."""

import contextlib
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

import httpx

_REPLY_TOKENS: Final = 1000
_DEADLINE_S: Final = 60.0
_START_S: Final = 30.0


class Streams:
    """`num_streams` of them, decoding all the time while the block lasts. They leave no trace in any cache."""

    def __init__(self, url: str, prompt: Sequence[int], num_streams: int) -> None:
        self._url = url
        self._prompt = list(prompt)
        self._is_over = threading.Event()
        self._begun = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._run) for _ in range(num_streams)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            self._begun.acquire(timeout=_START_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        body = {
            "prompt": self._prompt,
            "max_tokens": _REPLY_TOKENS,
            "ignore_eos": True,
            "plan": "recompute",
            "stream": True,
        }
        with httpx.Client(timeout=_DEADLINE_S) as client:
            while not self._is_over.is_set():
                # An engine that ends or is busy is no reason to stop the benchmark.
                with (
                    contextlib.suppress(httpx.HTTPError),
                    client.stream("POST", f"{self._url}/v1/completions", json=body) as answer,
                ):
                    self._begun.release()
                    for _ in answer.iter_raw():
                        if self._is_over.is_set():
                            return
                self._is_over.wait(0.1)
