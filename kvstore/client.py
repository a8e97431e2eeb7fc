"""The client of the daemon, for engines and for consoles: synchronous, one thread, every call with a deadline.

    client = Client(run_dir, namespace=namespace)          # the daemon may be down
    found = client.lookup(keys)
    with client.fetch(keys[:n], deadline_s=0.5) as stream:
        for block in stream.landed(timeout_s=0.05):
            copy(block.view); stream.still_valid(block)
    grant = client.store(keys, parent, depth); copy(...); client.commit(...)

It attaches by itself, and again after the daemon was restarted. Several threads take a `clone` each, which
share one attachment. Faults: TierUnavailable (no daemon, or it was silent), ProtocolError (refused).
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvstore import wire
from kvstore.attachment import Attached, Attachment
from kvstore.connection import Connection, daemon_lives
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.key import BlockKey, Namespace, join_keys
from kvstore.core.outcome import Outcome, TierKind
from kvstore.stream import FetchStream, LandedBlock
from kvstore.wire import ErrorCode
from tiers.region import Region

__all__ = ["Client", "FetchStream", "GrantedBlock", "LandedBlock", "LookupResult", "StoreGrant"]

_Reply = TypeVar("_Reply")
_TIERS = tuple(TierKind)
# A message that nobody waits for is worth no more than this.
_REPORT_DEADLINE_S = 0.2
# Routers can do without; the keys must fit into the message.
_MAX_TOKEN_BYTES = wire.MAX_BODY_BYTES // 2


@dataclass(frozen=True, slots=True)
class LookupResult:
    """`tiers[i]` is the fastest tier of block i, for the leading blocks that exist; `next` says what the block after
    them is (OK: all exist), and `why` what became of it, where that is known. `s3` is UNKNOWN where the bucket might
    have more and has not been asked yet; for this request that is a miss."""

    tiers: list[TierKind]
    next: Outcome
    why: str
    s3: Outcome = Outcome.MISS


@dataclass(frozen=True, slots=True)
class GrantedBlock:
    """Block i of a store. Where the outcome is OK, its payload is to be copied to `view`, then committed."""

    outcome: Outcome
    view: memoryview | None
    offset: int
    generation: int


@dataclass(frozen=True, slots=True)
class StoreGrant:
    """`retry_s` is how long to wait before blocks that answered BUSY are worth another try; 0: none did."""

    blocks: list[GrantedBlock]
    retry_s: float


class Client:
    """See the module. `namespace` None: a console, which attaches to nothing and can only ask and order."""

    def __init__(
        self,
        run_dir: Path,
        *,
        namespace: Namespace | None = None,
        model_label: str = "",
        name: str = "",
        deadline_s: float = 1.0,
        _attachment: Attachment | None = None,
    ) -> None:
        self._connection = Connection(run_dir)
        self._run_dir = run_dir
        self._namespace = namespace
        self._deadline_s = deadline_s
        self._closed = False
        self._attachment = _attachment
        if namespace is not None and _attachment is None:
            self._attachment = Attachment(run_dir, namespace, model_label, name)
        # Which boot of the daemon granted what we have not committed yet, and grants whose commit was not answered.
        self._granted: dict[BlockKey, Attached] = {}
        self._unanswered: list[tuple[Attached, BlockKey, int]] = []

    def clone(self) -> "Client":
        """Return a client for another thread, with the same attachment; each is closed by itself."""
        if self._attachment is not None:
            self._attachment.join()
        return Client(
            self._run_dir, namespace=self._namespace, deadline_s=self._deadline_s, _attachment=self._attachment
        )

    def close(self) -> None:
        """Idempotent. The last clone detaches."""
        if self._closed:
            return
        self._closed = True
        if self._attachment is not None:
            self._attachment.leave(self._connection)
        self._connection.close()

    @property
    def block_bytes(self) -> int:
        assert self._namespace is not None, "a console has no blocks"
        return self._namespace.block_bytes

    @property
    def region(self) -> Region | None:
        """The region as it is mapped now; another one after the daemon was restarted. For pinning it."""
        current = None if self._attachment is None else self._attachment.current
        return None if current is None else current.region

    @property
    def tiers(self) -> list[str]:
        """The tiers of the daemon we are attached to, fastest first; [] while there is none."""
        current = None if self._attachment is None else self._attachment.current
        return [] if current is None else list(current.tiers)

    @property
    def wants_tokens(self) -> bool:
        """Whether the daemon publishes events for routers, and so has a use for the token ids of what is stored."""
        current = None if self._attachment is None else self._attachment.current
        return current is not None and current.wants_tokens

    # ------------------------------------------------------------ blocks

    def lookup(self, keys: Sequence[BlockKey], deadline_s: float | None = None) -> LookupResult:
        """Say which leading blocks of one prefix exist, and where; moves nothing."""
        if not keys:
            return LookupResult([], Outcome.OK, "")
        found = self._ask(wire.Lookup(join_keys(keys)), wire.Found, deadline_s)
        # By a table, since calling the enum for each of thousands of blocks costs more than the whole question; most
        # often they all lie in one tier.
        first = found.tiers[:1]
        if first and found.tiers.count(first) == len(found.tiers):
            tiers = [_TIERS[first[0]]] * len(found.tiers)
        else:
            tiers = [_TIERS[tier] for tier in found.tiers]
        return LookupResult(tiers, Outcome(found.next), found.why, Outcome(found.s3))

    def fetch(self, keys: Sequence[BlockKey], deadline_s: float) -> FetchStream:
        """Begin to bring the blocks into the region; what has not landed after `deadline_s` answers TIMED_OUT.

        Until the stream is left this client is busy with it. No keys: a stream that is done.
        """
        attached = self.attach(min(self._deadline_s, deadline_s))
        return FetchStream(self, attached, wire.Fetch(join_keys(keys), deadline_s))

    def store(
        self,
        keys: Sequence[BlockKey],
        parent: BlockKey,
        depth: int,
        deadline_s: float | None = None,
        tokens: bytes = b"",
    ) -> StoreGrant:
        """Ask for slots for consecutive blocks of one prefix; `parent` is the key before the first (the namespace's
        root at depth 0), at most 1024 at once. What is granted must be committed, as written or not.

        `tokens` are the blocks' token ids, joined as little-endian uint32: for routers, where `wants_tokens`, and only
        where tokens alone make the blocks what they are. With an adapter, an image or a salt leave them out: a router
        would take the blocks for those of the plain text.
        """
        self._give_back_unanswered()
        if not keys:
            return StoreGrant([], 0.0)
        if len(tokens) > _MAX_TOKEN_BYTES or not self.wants_tokens:
            tokens = b""
        request = wire.Store(join_keys(keys), parent, depth, tokens)
        granted, attached = self._ask_attached(request, wire.Granted, deadline_s)
        if len(granted.slots) != len(keys):
            raise ProtocolError(ErrorCode.MALFORMED, f"{len(granted.slots)} answers to {len(keys)} keys")
        blocks = []
        for key, slot in zip(keys, granted.slots, strict=True):
            outcome = Outcome(slot.outcome)
            view = None
            if outcome == Outcome.OK:
                try:
                    view = attached.region.view(slot.offset, self.block_bytes)
                except ValueError:
                    raise TierUnavailable("the daemon was restarted this moment") from None
                self._granted[key] = attached
            blocks.append(GrantedBlock(outcome, view, slot.offset, slot.generation))
        return StoreGrant(blocks, granted.retry_s)

    def commit(self, keys: Sequence[BlockKey], generations: list[int], written: list[bool]) -> list[Outcome]:
        """Say that granted slots are complete (or, `written[i]` false, given back). OK: the block can be fetched now.

        After a restart of the daemon every grant is STALE: the bytes lie in the old region, which nobody reads.
        """
        granted_by = [self._granted.pop(key, None) for key in keys]
        attached = self.attach(self._deadline_s)
        # The new daemon may have granted the same block, under the same generation, to another thread of ours.
        valid = [index for index, one in enumerate(granted_by) if one is None or one is attached]
        outcomes = [Outcome.STALE] * len(keys)
        if valid:
            request = wire.Commit(
                join_keys([keys[i] for i in valid]), [generations[i] for i in valid], [written[i] for i in valid]
            )
            try:
                committed = self._request(attached, request, wire.Committed, self._deadline_s)
            except ProtocolError as error:
                self.refused(error, attached)
                return outcomes
            except TierUnavailable:
                self._unanswered += [(attached, keys[i], generations[i]) for i in valid]
                raise
            for index, outcome in zip(valid, committed.outcomes, strict=True):
                outcomes[index] = Outcome(outcome)
        return outcomes

    def hint(
        self,
        keys: Sequence[BlockKey],
        *,
        expect_followup: bool = False,
        end: bool = False,
        priority: int = 0,
        ttl_s: float = 0.0,
        pin_s: float | None = None,
        pin_name: str = "",
    ) -> None:
        """Say what will become of a request's blocks, from the first of its prefix on; see `wire.Hint`.

        Raises ProtocolError, busy where they were to be pinned and there is no room for that.
        """
        if keys:
            hint = wire.Hint(join_keys(keys), expect_followup, end, priority, ttl_s, pin_s, pin_name)
            self._ask(hint, wire.Done, None)

    # ------------------------------------------------------------ statistics

    def report(self, report: wire.Report) -> None:
        """Tell what became of a request. Never raises."""
        with contextlib.suppress(TierUnavailable, ProtocolError):
            self._ask(report, wire.Done, _REPORT_DEADLINE_S)

    def observe(self, errors: dict[str, int]) -> None:
        """Count faults that only we have seen. Never raises."""
        with contextlib.suppress(TierUnavailable, ProtocolError):
            self._ask(wire.Observe(errors), wire.Done, _REPORT_DEADLINE_S)

    def decision_get(self, request_id: str, tenant: str | None = None) -> wire.DecisionView:
        """Return what the daemon knows of a finished request, by its id or a beginning of it that no other has.

        Raises ProtocolError (not_found, or conflict where several begin so).
        """
        found = self._ask(wire.DecisionGet(request_id, tenant), wire.Decisions, None)
        return wire.decision_view(found.decisions[0])

    def decision_list(self, tenant: str | None = None, limit: int = 1000) -> tuple[list[wire.DecisionView], int]:
        """Return the last finished requests, newest first, and how many the daemon knows."""
        found = self._ask(wire.DecisionList(tenant, limit), wire.Decisions, None)
        return [wire.decision_view(encoded) for encoded in found.decisions], found.total

    # ------------------------------------------------------------ sessions

    def session_get(
        self, session_id: str, tenant: str = "", deadline_s: float | None = None
    ) -> wire.SessionView | None:
        """Return the session with its messages, or None where there is none (here and, in time, in the bucket)."""
        wait_s = self._deadline_s if deadline_s is None else deadline_s
        namespace = b"" if self._namespace is None else self._namespace.digest()
        request = wire.SessionGet(session_id, tenant, namespace, wait_s)
        try:
            # The daemon itself keeps to the deadline; we allow it the way there and back.
            return self._ask(request, wire.SessionFound, wait_s + 0.5).session
        except ProtocolError as error:
            if error.code == ErrorCode.NOT_FOUND:
                return None
            raise

    def session_put(self, put: wire.SessionPut, deadline_s: float | None = None) -> wire.SessionSaved:
        return self._ask(put, wire.SessionSaved, deadline_s)

    def session_list(self, tenant: str | None = None, limit: int = 1000) -> wire.Sessions:
        return self._ask(wire.SessionList(tenant, limit), wire.Sessions, None)

    def session_pin(self, session_id: str, pinned: bool, tenant: str = "", namespace: bytes = b"") -> None:
        self._ask(wire.SessionPin(session_id, pinned, tenant, namespace), wire.Done, None)

    def session_hint(
        self,
        session_id: str,
        *,
        expect_followup: bool = False,
        end: bool = False,
        priority: int = 0,
        ttl_s: float = 0.0,
        tenant: str = "",
        namespace: bytes = b"",
    ) -> None:
        """Say what will become of a session's blocks, or (`ttl_s`) how long the session lives after its last turn."""
        hint = wire.SessionHint(session_id, tenant, namespace, expect_followup, end, priority, ttl_s)
        self._ask(hint, wire.Done, None)

    def session_prefetch(self, session_id: str, tenant: str = "", namespace: bytes = b"") -> wire.Prefetching:
        """Say that the session is about to go on, so that its blocks are brought into RAM. Returns at once."""
        return self._ask(wire.SessionPrefetch(session_id, tenant, namespace), wire.Prefetching, None)

    def session_delete(self, session_id: str, tenant: str = "", namespace: bytes = b"") -> wire.SessionDeleted:
        return self._ask(wire.SessionDelete(session_id, tenant, namespace), wire.SessionDeleted, None)

    # ------------------------------------------------------------ operation

    def ping(self) -> float:
        """Return the seconds that a round trip took."""
        started = time.perf_counter()
        self._ask(wire.Ping(), wire.Pong, None)
        return time.perf_counter() - started

    def evict(
        self, tiers: list[str], drop: bool = False, deadline_s: float = 60.0, session_id: str = ""
    ) -> wire.Evicted:
        return self._ask(wire.Evict(tiers, drop, session_id), wire.Evicted, deadline_s)

    def verify(
        self, tiers: Sequence[str] = (), repair: bool = False, drop_wrong_key: bool = False
    ) -> wire.VerifyReport:
        """Begin a verification. Raises ProtocolError (busy) where one is under way."""
        return self._ask(wire.Verify(list(tiers), repair, drop_wrong_key), wire.VerifyReport, None)

    def verify_status(self) -> wire.VerifyReport:
        return self._ask(wire.VerifyStatus(), wire.VerifyReport, None)

    def verify_cancel(self) -> wire.VerifyReport:
        return self._ask(wire.VerifyCancel(), wire.VerifyReport, None)

    def stats(self) -> dict[str, object]:
        """Return the snapshot of docs/stats.md."""
        return self._ask(wire.Stats(), wire.StatsReply, None).stats

    # ------------------------------------------------------------ for FetchStream

    def attach(self, deadline_s: float) -> Attached:
        """Attach unless that is done. Raises TierUnavailable and ProtocolError."""
        assert self._attachment is not None, "a console is not attached"
        return self._attachment.ensure(self._connection, deadline_s)

    def send(self, attached: Attached, body: wire.Message) -> int:
        """Return the sequence number that the replies will carry. Raises TierUnavailable."""
        return self._connection.send(attached.epoch, attached.incarnation, body)

    def receive(self, attached: Attached, timeout_s: float, asked: int) -> tuple[int, wire.Reply] | None:
        """The next message of the stream that is open, which `asked` began; None at the timeout. Raises TierUnavailable
        at once where its answers went with their connection, though another was made since."""
        try:
            return self._connection.receive(timeout_s, asked)
        except TierUnavailable:
            self._lost(attached)
            raise

    def refused(self, error: ProtocolError, attached: Attached) -> None:
        """Raise the error, unless it says that our attachment is void: then the next call attaches anew."""
        if error.code not in (ErrorCode.STALE_EPOCH, ErrorCode.NOT_ATTACHED) or self._attachment is None:
            raise error
        self._attachment.forget(attached)

    def post(self, attached: Attached, body: wire.Message) -> None:
        """Send a message whose answer nobody waits for."""
        with contextlib.suppress(TierUnavailable, ProtocolError):
            self.send(attached, body)

    # ------------------------------------------------------------ private

    def _give_back_unanswered(self) -> None:
        """A grant lasts as long as we live, so those whose commit may never have arrived are given back."""
        current = self.attach(self._deadline_s)
        while self._unanswered:
            attached, key, generation = self._unanswered[-1]
            if attached is current:
                self.send(attached, wire.Commit(key, [generation], [False]))
            self._unanswered.pop()

    def _ask(self, body: wire.Message, expected: type[_Reply], deadline_s: float | None) -> _Reply:
        if self._attachment is None:
            wait_s = self._deadline_s if deadline_s is None else deadline_s
            return _expect(self._connection.request(0, 0, body, wait_s), expected)
        return self._ask_attached(body, expected, deadline_s)[0]

    def _ask_attached(
        self, body: wire.Message, expected: type[_Reply], deadline_s: float | None
    ) -> tuple[_Reply, Attached]:
        """Ask, if need be after attaching anew; return the reply and the boot of the daemon that it is from."""
        deadline = time.monotonic() + (self._deadline_s if deadline_s is None else deadline_s)
        for is_last_try in (False, True):
            attached = self.attach(deadline - time.monotonic())
            try:
                return self._request(attached, body, expected, deadline - time.monotonic()), attached
            except ProtocolError as error:
                self.refused(error, attached)
                if is_last_try:
                    raise TierUnavailable("the daemon was restarted") from None
        raise AssertionError("unreachable")

    def _request(self, attached: Attached, body: wire.Message, expected: type[_Reply], deadline_s: float) -> _Reply:
        try:
            return _expect(self._connection.request(attached.epoch, attached.incarnation, body, deadline_s), expected)
        except TierUnavailable:
            self._lost(attached)
            raise

    def _lost(self, attached: Attached) -> None:
        """If the daemon is gone for good, so is the region; one that is only slow is found again by its epoch."""
        if self._attachment is not None and not daemon_lives(self._run_dir):
            self._attachment.forget(attached)


def _expect(reply: object, expected: type[_Reply]) -> _Reply:
    if not isinstance(reply, expected):
        raise ProtocolError(ErrorCode.MALFORMED, f"expected {expected.__name__}, got {type(reply).__name__}")
    return reply
