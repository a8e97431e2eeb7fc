"""When to speak to a daemon that refuses us: not at all for a while, then again by itself.

A daemon that is away costs nothing to ask for (its lock is looked at), and is asked for each time. One that refuses the
attachment, such as another version's, is left alone for longer and longer. One that refuses a single request is not:
what one client asks for must shut nobody else out.
"""

import logging
import threading
from collections.abc import Callable

from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.wire import ErrorCode

_log = logging.getLogger("vllm.kvstore")

_FIRST_S, _MOST_S = 0.5, 30.0
# Nothing can be asked of such a daemon.
_NEVER_UNDERSTOOD = frozenset({ErrorCode.VERSION, ErrorCode.MALFORMED})
# What concerns one request and says nothing about the next.
_HARMLESS = frozenset({ErrorCode.BUSY, ErrorCode.NOT_FOUND, ErrorCode.STALE_EPOCH, ErrorCode.NOT_ATTACHED})


class Gate:
    """Thread-safe. `who` is for the log."""

    def __init__(self, who: str, clock: Callable[[], float]) -> None:
        self._who = who
        self._clock = clock
        self._lock = threading.Lock()
        self._closed_until_s = 0.0
        self._wait_s = 0.0
        # None: nobody has asked yet.
        self._was_there: bool | None = None

    @property
    def is_open(self) -> bool:
        return self._clock() >= self._closed_until_s

    @property
    def is_attached(self) -> bool:
        """Whether the daemon answered the last time."""
        return bool(self._was_there)

    @property
    def is_silent(self) -> bool:
        """Whether the daemon was asked the last time, and did not answer."""
        return self._was_there is False

    def passed(self) -> None:
        """The daemon has answered."""
        with self._lock:
            self._wait_s = 0.0
            was_there, self._was_there = self._was_there, True
        if not was_there:
            _log.info("kvstore: the %s is attached to the daemon", self._who)

    def failed(self, error: TierUnavailable | ProtocolError) -> None:
        """It has not, or refused."""
        is_refusal = isinstance(error, ProtocolError) and self._shuts(error)
        if isinstance(error, ProtocolError) and not is_refusal:
            return
        with self._lock:
            if is_refusal:
                self._wait_s = min(max(_FIRST_S, 2 * self._wait_s), _MOST_S)
                self._closed_until_s = self._clock() + self._wait_s
            was_there, self._was_there = self._was_there, False
        if was_there is not False:
            # As text: a handler that keeps its records would keep the old region mapped, by the error's traceback.
            _log.warning("kvstore: the %s goes on without the daemon, and tries again: %s", self._who, str(error))

    def _shuts(self, error: ProtocolError) -> bool:
        if error.code in _NEVER_UNDERSTOOD:
            return True
        # Once it has answered us all else is about the one request; before, it may be the attachment that is refused.
        return error.code not in _HARMLESS and not self._was_there
