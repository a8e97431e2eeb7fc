"""The thread that asks kvstore: the session of a turn, its tokens and keys, and which blocks exist where.

    open(ask):   session ─► tokens ─► keys ─► lookup ─► the step loop
    close(turn): the session with its new turn ─► kvstore; a report of what the request cost

So that the step loop never waits for a socket. Whatever the daemon does, `open` ends in bounded time: the request is
queued, or it is refused with a reason.
"""

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

from engine.chat import ASSISTANT, BadChat, Chat, Tokenizer, concatenate, match_history
from engine.counters import Counters
from engine.link import KVClient, Links, Roots
from engine.request import Cached, Progress, Request, wants_the_bytes
from engine.resume import SessionKeeper
from engine.turn import Ask, Keep, Refused, Saved, Turn
from kvstore import wire
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.key import BlockKey, Namespace, chain_keys
from kvstore.core.outcome import Outcome, TierKind
from kvstore.wire import ChatMessage

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# A lookup may take this share of what computing the prompt would, within these bounds.
_LOOKUP_SHARE = 0.05
_MIN_LOOKUP_S, _MAX_LOOKUP_S = 0.05, 0.25
# Who pins the plan to fetching wants the bytes, not the fastest answer.
_PINNED_LOOKUP_S = 2.0
_IDLE_S = 1.0
# For how long a request's blocks are pinned that belong to no session.
_PIN_S = 3600.0
# Of tenants, which without keys and without kvstore may be as many as clients care to name.
_MAX_NAMESPACES = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What a prompt and its reply may be. `max_kv_tokens` is how many tokens' KV the whole HBM pool holds."""

    vocab_size: int
    max_context_tokens: int
    max_kv_tokens: int
    default_reply_tokens: int
    eos_token_ids: frozenset[int]


class Consult:
    """`roots` None: there is no kvstore, and sessions live in this process only.

    `submit` hands a request to the step loop; `predict_prefill` says how many seconds computing so many tokens takes,
    None while that is not known. Both are called on this thread.
    """

    def __init__(
        self,
        roots: Roots | None,
        namespace: Namespace,
        chat: Chat,
        tokenizer: Tokenizer,
        limits: Limits,
        submit: Callable[[Turn, Request], None],
        predict_prefill: Callable[[int], float | None],
        counters: Counters,
        faults: Counters,
        *,
        max_jobs: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._links = None if roots is None else Links(roots)
        # For looking whether the daemon is back: a client that got no answer leaves the daemon alone for a while, and
        # that must not hit the next request.
        self._scouts = None if roots is None else Links(roots)
        self._namespace = namespace
        self._namespaces: dict[str, tuple[Namespace, BlockKey]] = {}
        self._chat = chat
        self._tokenizer = tokenizer
        self._limits = limits
        self._submit = submit
        self._predict_prefill = predict_prefill
        self._faults = faults
        self._told_faults: dict[str, int] = {}
        self._clock = clock
        self._sessions = SessionKeeper(
            self._links, lambda tenant: self._of(tenant)[0], self._deadline_for, counters, faults
        )
        # Only opening is bounded: what is to be saved has been opened, and must not be lost.
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._max_jobs = max_jobs
        self._thread = threading.Thread(target=self._run, name="engine-consult", daemon=True)

    # ------------------------------------------------------------ for other threads

    def start(self) -> None:
        self._thread.start()

    def open(self, ask: Ask, listener: Callable[[Progress], None]) -> "tuple[Turn, Future[None]]":
        """Prepare a request and hand it to the step loop, with `listener` for its events.

        The future is done when it is handed over, or fails with Refused where it cannot be served.
        """
        turn = Turn(ask)
        if self._jobs.qsize() >= self._max_jobs:
            busy: Future[None] = Future()
            busy.set_exception(Refused(429, "busy", "too many requests are waiting"))
            return turn, busy
        return turn, self._enqueue(lambda: self._open(turn, listener))

    def close(self, turn: Turn, reply: list[int], text: str) -> "Future[Saved | None]":
        """Save the session of a finished request and report it. The future is None where there is nothing to save."""
        return self._enqueue(lambda: self._save(turn, reply, text), then=lambda: self._tell(turn))

    def stop(self, timeout_s: float = 5.0) -> None:
        """Finish what is queued, try once more to put what is unsaved, and end. Idempotent."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join(timeout_s)

    def _enqueue(self, work: Callable[[], _Result], then: Callable[[], None] | None = None) -> "Future[_Result]":
        future: Future[_Result] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
                if then is not None:
                    then()
            except Exception as error:
                # The root of every job: whoever waits for it is told, and the thread goes on with the next.
                if not isinstance(error, Refused):
                    _log.exception("consulting failed")
                if not future.done():
                    future.set_exception(error)

        self._jobs.put(job)
        return future

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            for links in (self._links, self._scouts):
                if links is not None:
                    links.close()

    def _serve(self) -> None:
        settle_at_s = self._clock() + _IDLE_S
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                job = _nothing
            if job is not None:
                job()
            if job is None or self._clock() >= settle_at_s:
                self._settle()
                settle_at_s = self._clock() + _IDLE_S
            if job is None:
                return

    def _settle(self) -> None:
        """Attach to a daemon that was restarted, put what is unsaved, and tell of faults that only we have seen."""
        if self._scouts is None:
            return
        try:
            client = self._scouts.client(self._namespace.tenant)
            # A question with a short deadline: a silent daemon must not keep this thread from requests.
            client.lookup([self._of(self._namespace.tenant)[1]], _MAX_LOOKUP_S)
            self._sessions.flush()
            self._tell_faults(client)
        except (TierUnavailable, ProtocolError):
            return
        except Exception:
            # Nobody asked for it, and without this thread no request would be answered any more.
            _log.exception("settling with the daemon failed")

    # ------------------------------------------------------------ before a request

    def _open(self, turn: Turn, listener: Callable[[Progress], None]) -> None:
        ask = turn.ask
        if turn.cancelled:
            # Its client is gone: those who wait behind it should not wait for it.
            raise Refused(503, "cancelled", "the request was cancelled")
        namespace, root = self._of(ask.tenant)
        asking_s = 0.0
        if ask.messages is not None:
            began_s = self._clock()
            remembered = self._sessions.begin(turn) if ask.session_id else []
            asking_s += self._clock() - began_s
            turn.messages = self._compose(turn, remembered)
        prompt = self._prompt(turn)
        reply_tokens = self._reply_tokens(ask, len(prompt))
        keys = chain_keys(namespace, prompt)
        began_s = self._clock()
        cached = self._lookup(ask, prompt, keys)
        asking_s += self._clock() - began_s
        turn.request = Request(
            id=ask.id,
            tenant=ask.tenant,
            prompt=prompt,
            max_new_tokens=reply_tokens,
            arrival_s=ask.arrival_s,
            listener=listener,
            sampling=ask.sampling,
            stop_token_ids=frozenset() if ask.ignore_eos else self._limits.eos_token_ids,
            plan=ask.plan,
            # A turn that computes everything only to measure it leaves no trace; one that is saved must have its KV.
            cache=ask.plan != "recompute" or ask.saves,
            root=root,
            keys=keys,
            cached=cached,
            asking_s=asking_s,
        )
        self._submit(turn, turn.request)

    def _compose(self, turn: Turn, remembered: list[ChatMessage]) -> list[ChatMessage]:
        ask = turn.ask
        assert ask.messages is not None
        mode = ask.session_mode or ("append" if ask.session_id and len(ask.messages) == 1 else "history")
        kept = len(remembered) if mode == "append" else match_history(remembered, ask.messages)
        new = ask.messages if mode == "append" else ask.messages[kept:]
        turn.is_fork = kept < len(remembered)
        try:
            return remembered[:kept] + self._chat.extend(remembered[:kept], new)
        except BadChat as error:
            raise Refused(400, error.code, str(error)) from None

    def _prompt(self, turn: Turn) -> list[int]:
        prompt = turn.ask.prompt
        if prompt is None:
            tokens = concatenate(turn.messages)
        elif isinstance(prompt, str):
            tokens = list(self._tokenizer.encode(prompt, add_special_tokens=True))
        else:
            tokens = list(prompt)
        if not tokens:
            raise Refused(400, "empty_prompt", "the prompt has no tokens")
        if min(tokens) < 0 or max(tokens) >= self._limits.vocab_size:
            outside = min(tokens) if min(tokens) < 0 else max(tokens)
            raise Refused(400, "bad_token", f"token id {outside} is not in 0 … {self._limits.vocab_size - 1}")
        return tokens

    def _reply_tokens(self, ask: Ask, prompt_tokens: int) -> int:
        """Return how long the reply may get. Raises Refused where prompt and reply do not fit."""
        limits = self._limits
        # The token that is sampled last needs a place in the context, but no KV.
        room = min(limits.max_context_tokens - prompt_tokens, limits.max_kv_tokens - prompt_tokens + 1)
        wanted = ask.max_tokens if ask.max_tokens is not None else min(limits.default_reply_tokens, max(room, 1))
        if prompt_tokens + wanted > limits.max_context_tokens:
            raise Refused(
                400,
                "context_length_exceeded",
                f"the prompt has {prompt_tokens} tokens and the reply may have {wanted}; "
                f"the model's context is {limits.max_context_tokens}",
            )
        if wanted > room:
            raise Refused(
                400,
                "hbm_too_small",
                f"the prompt has {prompt_tokens} tokens and the reply may have {wanted}; "
                f"the HBM pool holds the KV of {limits.max_kv_tokens}",
            )
        return wanted

    def _lookup(self, ask: Ask, prompt: list[int], keys: list[BlockKey]) -> Cached:
        # The last token is always computed, so a block that ends with it is of no use.
        usable = keys[: (len(prompt) - 1) // self._namespace.block_tokens]
        if self._links is None or ask.plan == "recompute":
            return Cached()
        if not usable:
            return Cached(asked=True)
        try:
            deadline_s = _PINNED_LOOKUP_S if wants_the_bytes(ask.plan) else self._deadline_for(len(prompt))
            found = self._links.client(ask.tenant).lookup(usable, deadline_s)
        except TierUnavailable:
            return Cached(why="unavailable")
        except ProtocolError as error:
            self._faults.add(f"lookup_refused_{error.code}")
            return Cached(why="refused")
        why = found.why or (found.next.label if found.next is not Outcome.OK else "")
        return Cached(found.tiers, why or "unknown", asked=True)

    def _deadline_for(self, num_tokens: int) -> float:
        """Return how long the daemon may take to answer about a prompt of so many tokens."""
        predicted_s = self._predict_prefill(num_tokens)
        share_s = _MAX_LOOKUP_S if predicted_s is None else predicted_s * _LOOKUP_SHARE
        return min(max(share_s, _MIN_LOOKUP_S), _MAX_LOOKUP_S)

    # ------------------------------------------------------------ after a request

    def _save(self, turn: Turn, reply: list[int], text: str) -> Saved | None:
        request = turn.request
        if not turn.ask.saves or request is None:
            return None
        messages = [*turn.messages, ChatMessage(ASSISTANT, text, reply)]
        # The reply's last token was sampled but never computed: it has no KV.
        full = (len(request.prompt) + len(reply) - 1) // self._namespace.block_tokens
        return self._sessions.save(turn, messages, request.keys[:full])

    def _tell(self, turn: Turn) -> None:
        self._hint(turn)
        self._report(turn)

    def _hint(self, turn: Turn) -> None:
        """Say what will become of a prompt's blocks where no session says it."""
        request, keep = turn.request, turn.ask.keep
        if self._links is None or request is None or turn.ask.saves or keep == Keep() or not request.cache:
            return
        full = len(request.prompt) // self._namespace.block_tokens
        try:
            self._links.client(turn.ask.tenant).hint(
                request.keys[:full],
                expect_followup=keep.expect_followup,
                end=keep.end,
                priority=keep.priority,
                ttl_s=keep.ttl_s,
                pin_s=None if keep.pin is None else _PIN_S if keep.pin else 0.0,
                pin_name=_pin_name(turn, request.prompt),
            )
        except (TierUnavailable, ProtocolError):
            self._faults.add("hint_refused")

    def _report(self, turn: Turn) -> None:
        request = turn.request
        if self._links is None or request is None or request.result is None or request.plan == "recompute":
            return
        served, decision = request.result, request.decision
        if decision is not None and request.course is not None:
            decision = request.course.judge(decision)
        self._links.client(turn.ask.tenant).report(
            wire.Report(
                request_id=request.id,
                prompt_tokens=served.prompt_tokens,
                hbm=served.tokens.get(TierKind.HBM, 0),
                ram=served.tokens.get(TierKind.RAM, 0),
                ssd=served.tokens.get(TierKind.SSD, 0),
                s3=served.tokens.get(TierKind.S3, 0),
                recomputed=served.recomputed,
                miss=served.miss,
                plan=served.plan,
                ttft_s=served.ttft_s,
                saved_prefill_s=served.saved_prefill_s,
                tenant=turn.ask.tenant,
                decision=decision,
                output_tokens=len(request.output),
                last_block=self._last_looked_up(request),
            )
        )

    def _last_looked_up(self, request: Request) -> bytes:
        usable = (len(request.prompt) - 1) // self._namespace.block_tokens
        return bytes(request.keys[usable - 1]) if usable else b""

    def _tell_faults(self, client: KVClient) -> None:
        now = self._faults.snapshot()
        news = {kind: count - self._told_faults.get(kind, 0) for kind, count in now.items()}
        if any(news.values()):
            client.observe({kind: count for kind, count in news.items() if count})
            self._told_faults = now

    def _of(self, tenant: str) -> tuple[Namespace, BlockKey]:
        if tenant not in self._namespaces:
            if len(self._namespaces) >= _MAX_NAMESPACES:
                self._namespaces.clear()
            namespace = replace(self._namespace, tenant=tenant)
            self._namespaces[tenant] = (namespace, namespace.root())
        return self._namespaces[tenant]


def _pin_name(turn: Turn, prompt: list[int]) -> str:
    """Name the pin of a turn that is not saved: the session's, which its next such turn replaces, else the whole
    prompt's. Request ids are random, so a client can only name what it pinned by asking the same again; and the last
    block is not enough, since it may be where a common system prompt ends.
    """
    session_id = turn.session_id or turn.ask.session_id
    named = f"session {session_id}" if session_id else f"prompt {prompt}"
    return hashlib.sha256(named.encode()).hexdigest()


def _nothing() -> None:
    return
