"""The thread that greets sessions and tells the daemon of requests that have ended: what may take seconds, of a bucket
or of a busy daemon, and must hold up no lookup.

It alone speaks with `Guests`, but for `knows`.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvstore.connectors.vllm_parts.gate import Gate
from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.wire import ErrorCode

if TYPE_CHECKING:
    from kvstore.connectors.vllm_parts.consult import Shard

_log = logging.getLogger("vllm.kvstore")

_GREET_S = 2.0
_MAX_GREETS = 256
_MAX_TOLD = 256

Work = Callable[[Sequence["Shard"]], None]


class Guests(Protocol):
    """Sessions, as far as they are met here."""

    def knows(self, session_id: str, num_shards: int) -> bool:
        """Whether the session was asked for before. From any thread."""
        ...

    def greet(self, shards: Sequence["Shard"], session_id: str, deadline_s: float) -> None:
        """Have the daemon find out what there is of the session. Raises TierUnavailable and ProtocolError."""
        ...


@dataclass(frozen=True, slots=True)
class _Greet:
    session_id: str
    is_wanted: Callable[[], bool]
    done: Callable[[], None]


class Teller:
    """All methods but those of the thread return at once."""

    def __init__(self, guests: Guests, gate: Gate, counters: Counters) -> None:
        self._guests = guests
        self._gate = gate
        self._counters = counters
        self._wanted = threading.Condition()
        self._greets: deque[_Greet] = deque()
        self._told: deque[Work] = deque()
        self._is_ending = False
        self._thread: threading.Thread | None = None
        # Whether the last greeting got no answer in its time: nobody then waits for the next.
        self.is_slow = False

    def start(self, shards: Sequence["Shard"]) -> None:
        """Begin, with clients that are the thread's own from now on."""
        self._thread = threading.Thread(target=self._run, args=(shards,), name="kvstore-tell", daemon=True)
        self._thread.start()

    def greet(self, session_id: str, is_wanted: Callable[[], bool], done: Callable[[], None]) -> bool:
        """Greet, then call `done` on the thread, whatever came of it; where it is not wanted any more by its turn call
        `done` alone. False: too many wait, and `done` is never called."""
        with self._wanted:
            if self._is_ending or len(self._greets) >= _MAX_GREETS:
                return False
            self._greets.append(_Greet(session_id, is_wanted, done))
            self._wanted.notify()
        return True

    def tell(self, work: Work) -> None:
        with self._wanted:
            if len(self._told) >= _MAX_TOLD:
                self._counters.add("faults", "told_too_much")
                return
            self._told.append(work)
            self._wanted.notify()

    def close(self, timeout_s: float) -> None:
        """Do what was told, greet nobody, and end. Idempotent."""
        with self._wanted:
            self._is_ending = True
            self._wanted.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    # ------------------------------------------------------------ the thread

    def _run(self, shards: Sequence["Shard"]) -> None:
        try:
            while (work := self._next()) is not None:
                if isinstance(work, _Greet):
                    self._do_greet(shards, work)
                else:
                    self._do_tell(shards, work)
        finally:
            for shard in shards:
                shard.client.close()

    def _next(self) -> "_Greet | Work | None":
        """Somebody waits for a greeting, nobody for what is told."""
        with self._wanted:
            while not (self._greets or self._told or self._is_ending):
                self._wanted.wait()
            if self._greets:
                return self._greets.popleft()
            return self._told.popleft() if self._told else None

    def _do_greet(self, shards: Sequence["Shard"], greet: _Greet) -> None:
        try:
            if greet.is_wanted() and self._gate.is_open and not self._is_ending:
                self._guests.greet(shards, greet.session_id, _GREET_S)
                self.is_slow = False
        except TierUnavailable:
            # A slow bucket says nothing of the daemon.
            self.is_slow = True
            self._counters.add("faults", "greet")
        except ProtocolError:
            self._counters.add("faults", "greet")
        except Exception:
            _log.exception("kvstore: asking for a session failed")
            self._counters.add("faults", "greet")
        finally:
            greet.done()

    def _do_tell(self, shards: Sequence["Shard"], work: Work) -> None:
        if not self._gate.is_open:
            return
        try:
            work(shards)
        except TierUnavailable:
            # Whether the daemon is there is for those to say who wait for it: what is told may take it long.
            return
        except ProtocolError as error:
            # What one request asked for shuts nobody out.
            self._counters.add("faults", "tell")
            if error.code == ErrorCode.VERSION:
                self._gate.failed(error)
        except Exception:
            _log.exception("kvstore: telling of a request that has ended failed")
            self._counters.add("faults", "tell")
