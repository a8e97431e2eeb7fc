"""The thread that asks the daemon what is cached for a prompt.

    ask ──► lookup in the namespace of every rank ──────────────────────────────► answer
              └─► session that is new here (teller.py) ──► lookup once more ──────┘

The scheduler asks and goes on; whatever the daemon does, it looks for an answer later and takes none for nothing once
the deadline has passed. With several ranks a block counts as cached where every rank's part of it is. Of a session that
is new here the bucket may have more than the first lookup finds, which is the answer where nothing more comes in time.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.client import Client
from kvstore.connectors.vllm_parts import scout
from kvstore.connectors.vllm_parts.gate import Gate
from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.connectors.vllm_parts.teller import Guests, Teller, Work
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.key import BlockKey, Namespace, engine_keys
from kvstore.core.outcome import Outcome, TierKind

_log = logging.getLogger("vllm.kvstore")

_MAX_ASKED = 1024


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
    for it waits `patience_s`, or `session_patience_s` once there is `early`, what was found before the session was met.
    `answer` is set by the thread, or by who does not wait any longer."""

    request_id: str
    first: int
    hashes: Sequence[bytes]
    asked_s: float
    deadline_s: float
    patience_s: float = 0.0
    session_patience_s: float = 0.0
    session_id: str = ""
    early: Answer | None = None
    answer: Answer | None = None
    is_dropped: bool = field(default=False)


class Consult:
    """All methods but those of the thread return at once."""

    def __init__(
        self,
        shards: Callable[[], Sequence[Shard]],
        guests: Guests,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._make_shards = shards
        self._shards: Sequence[Shard] = ()
        self._guests = guests
        self._counters = counters
        self._clock = clock
        self.gate = Gate("scheduler", clock)
        self._teller = Teller(guests, self.gate, counters)
        # One lock over all that follows but the thread.
        lock = threading.Lock()
        self._wanted = threading.Condition(lock)
        self._answered = threading.Condition(lock)
        self._asked: deque[Inquiry] = deque()
        self._num_open = 0
        self._is_ending = False
        self._thread: threading.Thread | None = None
        self._idle_s = scout.EVERY_S
        counters.level("attached", "scheduler", lambda: self.gate.is_attached)

    # ------------------------------------------------------------ for the scheduler

    @property
    def wants_tokens(self) -> bool:
        """Whether the daemon tells routers which tokens its blocks have; False as long as it was not asked anything."""
        return any(shard.client.wants_tokens for shard in self._shards)

    def begin(self) -> None:
        """Attach at once, which otherwise the first question does. Before any other call."""
        self._idle_s = 0.0
        self._start()

    def ask(self, inquiry: Inquiry) -> None:
        if self._num_open >= _MAX_ASKED:
            inquiry.answer = Answer(why="busy")
            return
        self._start()
        with self._wanted:
            self._num_open += 1
            self._asked.append(inquiry)
            self._wanted.notify()

    def awaits(self, session_id: str) -> bool:
        """Whether it is worth waiting until the session was met: it is new here, and others were met in time."""
        return not self._teller.is_slow and not self._guests.knows(session_id, max(1, len(self._shards)))

    def tell(self, work: Work) -> None:
        """Have `work` done on a thread that nobody waits for."""
        self._start()
        self._teller.tell(work)

    def wait(self, timeout_s: float) -> None:
        """Wait for an answer, if one is to come: for steps that have nothing else to do."""
        with self._answered:
            if self._num_open:
                self._answered.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Finish what was asked and told, in time, and end. Idempotent."""
        until_s = time.monotonic() + timeout_s
        with self._wanted:
            self._is_ending = True
            self._wanted.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._teller.close(max(0.0, until_s - time.monotonic()))

    # ------------------------------------------------------------ the thread

    def _start(self) -> None:
        if self._thread is None and not self._is_ending:
            self._thread = threading.Thread(target=self._run, name="kvstore-consult", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        do = self._do
        try:
            self._shards = self._make_shards()
            self._teller.start([Shard(shard.namespace, shard.client.clone()) for shard in self._shards])
        except Exception:
            # Who asks is answered at once, and vLLM goes on without the daemon.
            _log.exception("kvstore: the connector cannot look up blocks; it stays off until vLLM is started again")
            self._counters.add("faults", "consult")
            do = self._refuse
        try:
            while (inquiry := self._next()) is not None:
                do(inquiry)
        finally:
            for shard in self._shards:
                shard.client.close()

    def _next(self) -> Inquiry | None:
        """Return what to ask next; None at the end."""
        while True:
            with self._wanted:
                if not (self._asked or self._is_ending):
                    self._wanted.wait(self._idle_s)
                self._idle_s = scout.EVERY_S
                if self._asked:
                    return self._asked.popleft()
                if self._is_ending:
                    return None
            if self._shards:
                scout.scout(self.gate, [(shard.client, shard.namespace.root()) for shard in self._shards])

    def _refuse(self, inquiry: Inquiry) -> None:
        self._end(inquiry, Answer(why="fault"))

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
        if not self._waits_for_session(inquiry, answer):
            self._end(inquiry, answer if answer.asked or inquiry.early is None else inquiry.early)

    def _end(self, inquiry: Inquiry, answer: Answer) -> None:
        self._counters.took("consult", self._clock() - inquiry.asked_s)
        with self._answered:
            # Who no longer waits has taken what there was; only an answer is better.
            if answer.asked or inquiry.answer is None:
                inquiry.answer = answer
            self._num_open -= 1
            self._answered.notify_all()

    def _waits_for_session(self, inquiry: Inquiry, answer: Answer) -> bool:
        """Have the session met, if there may be more of it than was found, and ask again then."""
        session_id, inquiry.session_id = inquiry.session_id, ""
        if not session_id or not answer.asked or len(answer.tiers) == len(inquiry.hashes):
            return False
        if self._guests.knows(session_id, len(self._shards)):
            return False
        inquiry.early = answer
        return self._teller.greet(session_id, lambda: not inquiry.is_dropped, lambda: self._ask_again(inquiry))

    def _ask_again(self, inquiry: Inquiry) -> None:
        with self._wanted:
            self._asked.append(inquiry)
            self._wanted.notify()

    def _find(self, inquiry: Inquiry) -> Answer:
        if inquiry.is_dropped or not self.gate.is_open:
            return Answer(why="unavailable")
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
