"""The thread that asks the daemon what is cached for a prompt, and tells it of requests that have ended.

    ask ──► session (where its id is new here) ──► lookup in the namespace of every rank ──► answer
    tell ─► turns of sessions, hints, reports

The scheduler asks and goes on; whatever the daemon does, it looks for an answer later and takes none for nothing once
the deadline has passed. With several ranks a block counts as cached where every rank's part of it is.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.client import Client
from kvstore.connectors.vllm_parts.gate import Gate
from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.key import BlockKey, Namespace, engine_keys
from kvstore.core.outcome import Outcome, TierKind

_log = logging.getLogger(__name__)

_IDLE_S = 1.0
_SCOUT_DEADLINE_S = 0.25
_MAX_ASKED = 1024
_MAX_TOLD = 256


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's namespace, and the client that asks in it."""

    namespace: Namespace
    client: Client

    def keys(self, hashes: Sequence[bytes]) -> list[BlockKey]:
        return engine_keys(self.namespace.root(), hashes)


@dataclass(frozen=True, slots=True)
class Answer:
    """`tiers[i]` is where block `first + i` of the prompt lies, the slowest of all ranks'. `why` nothing follows them.
    `asked` False: nobody answered."""

    first: int = 0
    tiers: tuple[TierKind, ...] = ()
    why: str = ""
    asked: bool = False


@dataclass(eq=False, slots=True)
class Inquiry:
    """A question under way. `hashes` are the prompt's, from block `first` on. It is asked until `deadline_s`; who waits
    for it waits `patience_s`. `answer` is set by the thread, or by who does not wait any longer."""

    request_id: str
    first: int
    hashes: Sequence[bytes]
    asked_s: float
    deadline_s: float
    patience_s: float = 0.0
    session_id: str = ""
    answer: Answer | None = None
    is_dropped: bool = field(default=False)


class Consult:
    """`greet(shards, session_id, deadline_s)` is called before a lookup for a request with a session, and finds out
    whether the session is known. All methods but those of the thread return at once."""

    def __init__(
        self,
        shards: Callable[[], Sequence[Shard]],
        greet: Callable[[Sequence[Shard], str, float], None],
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._make_shards = shards
        self._shards: Sequence[Shard] = ()
        self._greet = greet
        self._counters = counters
        self._clock = clock
        self.gate = Gate("scheduler", clock)
        # One lock over all that follows but the thread.
        lock = threading.Lock()
        self._wanted = threading.Condition(lock)
        self._answered = threading.Condition(lock)
        self._asked: deque[Inquiry] = deque()
        self._told: deque[Callable[[Sequence[Shard]], None]] = deque()
        self._num_open = 0
        self._is_ending = False
        self._thread: threading.Thread | None = None
        counters.level("attached", "scheduler", lambda: self.gate.is_attached)

    # ------------------------------------------------------------ for the scheduler

    @property
    def wants_tokens(self) -> bool:
        """Whether the daemon tells routers which tokens its blocks have; False as long as it was not asked anything."""
        return any(shard.client.wants_tokens for shard in self._shards)

    def ask(self, inquiry: Inquiry) -> None:
        if self._num_open >= _MAX_ASKED:
            inquiry.answer = Answer(why="busy")
            return
        self._start()
        with self._wanted:
            self._num_open += 1
            self._asked.append(inquiry)
            self._wanted.notify()

    def tell(self, work: Callable[[Sequence[Shard]], None]) -> None:
        """Have `work` done on the thread, when nobody asks anything."""
        if len(self._told) >= _MAX_TOLD:
            self._counters.add("faults", "told_too_much")
            return
        self._start()
        with self._wanted:
            self._told.append(work)
            self._wanted.notify()

    def wait(self, timeout_s: float) -> None:
        """Wait for an answer, if one is to come: for steps that have nothing else to do."""
        with self._answered:
            if self._num_open:
                self._answered.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Finish what was asked and told, in time, and end. Idempotent."""
        with self._wanted:
            self._is_ending = True
            self._wanted.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    # ------------------------------------------------------------ the thread

    def _start(self) -> None:
        if self._thread is None and not self._is_ending:
            self._thread = threading.Thread(target=self._run, name="kvstore-consult", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self._shards = self._make_shards()
            while (work := self._next()) is not None:
                if isinstance(work, Inquiry):
                    self._do(work)
                else:
                    self._tell(work)
        finally:
            for shard in self._shards:
                shard.client.close()

    def _next(self) -> "Inquiry | Callable[[Sequence[Shard]], None] | None":
        """Return what to do next; None at the end. Those who ask wait, those who tell do not."""
        while True:
            with self._wanted:
                if not (self._asked or self._told or self._is_ending):
                    self._wanted.wait(_IDLE_S)
                if self._asked:
                    return self._asked.popleft()
                if self._told:
                    return self._told.popleft()
                if self._is_ending:
                    return None
            self._scout()

    def _scout(self) -> None:
        """Attach, again where the daemon was restarted, before somebody asks."""
        if not self._shards or not self.gate.is_open:
            return
        try:
            for shard in self._shards:
                # The root is no block: asking for it counts as no request.
                shard.client.lookup([shard.namespace.root()], _SCOUT_DEADLINE_S)
            self.gate.passed()
        except (TierUnavailable, ProtocolError) as error:
            self.gate.failed(error)
        except Exception:
            _log.exception("kvstore: attaching failed")

    def _do(self, inquiry: Inquiry) -> None:
        answer = Answer(why="fault")
        try:
            answer = self._find(inquiry)
        except TierUnavailable as error:
            self.gate.failed(error)
            answer = Answer(why="unavailable")
        except ProtocolError as error:
            self.gate.failed(error)
            answer = Answer(why="refused")
        except Exception:
            _log.exception("kvstore: a lookup failed")
            self._counters.add("faults", "lookup")
        finally:
            self._counters.took("consult", self._clock() - inquiry.asked_s)
            with self._answered:
                inquiry.answer = answer
                self._num_open -= 1
                self._answered.notify_all()

    def _find(self, inquiry: Inquiry) -> Answer:
        if inquiry.is_dropped or not self.gate.is_open:
            return Answer(why="unavailable")
        if inquiry.session_id:
            self._greet(self._shards, inquiry.session_id, inquiry.deadline_s - self._clock())
        tiers: list[TierKind] | None = None
        why = ""
        for shard in self._shards:
            wait_s = inquiry.deadline_s - self._clock()
            if wait_s <= 0:
                return Answer(why="timed_out")
            count = len(inquiry.hashes) if tiers is None else len(tiers)
            found = shard.client.lookup(shard.keys(inquiry.hashes[:count]), wait_s)
            if tiers is None or len(found.tiers) < len(tiers):
                why = found.why or ("" if found.next is Outcome.OK else found.next.label)
            tiers = found.tiers if tiers is None else [max(pair) for pair in zip(tiers, found.tiers, strict=False)]
        self.gate.passed()
        return Answer(inquiry.first, tuple(tiers or ()), why, asked=True)

    def _tell(self, work: Callable[[Sequence[Shard]], None]) -> None:
        if not self.gate.is_open:
            return
        try:
            work(self._shards)
        except (TierUnavailable, ProtocolError) as error:
            self.gate.failed(error)
        except Exception:
            _log.exception("kvstore: telling of a request that has ended failed")
            self._counters.add("faults", "tell")
