"""Lets coroutines ask the daemon through one client, which belongs to one thread."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from kvstore.client import Client

_T = TypeVar("_T")
# Each call has a deadline of about a second, so that a queue of these is answered, if by an error, in bounded time.
_MAX_WAITING: Final = 32


class LineBusy(Exception):
    """Too many calls wait for the daemon already; nothing was asked."""


class Line:
    """One thread and the client that it alone uses, made by `connect` at the first call."""

    def __init__(self, connect: Callable[[], Client]) -> None:
        self._connect = connect
        self._client: Client | None = None
        self._places = threading.BoundedSemaphore(_MAX_WAITING)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="line")
        self._closed = False

    async def ask(self, call: Callable[[Client], _T]) -> _T:
        """Run `call` on the line's thread, after the calls before it. Raises what it raises, and LineBusy.

        If the caller is cancelled, the call is not made, unless it has begun.
        """
        if not self._places.acquire(blocking=False):
            raise LineBusy("too many requests wait for the daemon; try again later")
        answer = self._thread.submit(self._run, call)
        # Not in a `finally` here: a call that has begun keeps its place, whether or not anyone still waits.
        answer.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(answer)

    def close(self) -> None:
        """Wait for the calls that were asked and let the client go; idempotent."""
        if not self._closed:
            self._closed = True
            self._thread.submit(self._hang_up)
            self._thread.shutdown(wait=True)

    def _run(self, call: Callable[[Client], _T]) -> _T:
        if self._client is None:
            self._client = self._connect()
        return call(self._client)

    def _hang_up(self) -> None:
        if self._client is not None:
            self._client.close()
