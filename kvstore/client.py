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
import os
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from kvstore import wire
from kvstore.connection import Connection, daemon_lives, lock, refused_raises
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.key import BlockKey, Namespace, join_keys
from kvstore.core.outcome import Outcome, TierKind
from kvstore.wire import ErrorCode
from tiers.region import Region

_Reply = TypeVar("_Reply")
# A message that nobody waits for is worth no more than this.
_REPORT_DEADLINE_S = 0.2


@dataclass(frozen=True, slots=True)
class LookupResult:
    """`tiers[i]` is the fastest tier of block i, for the leading blocks that exist; `next` says what the block after
    them is (OK: all exist), and `why` what became of it, where that is known."""

    tiers: list[TierKind]
    next: Outcome
    why: str


@dataclass(frozen=True, slots=True)
class LandedBlock:
    """Block `index` of a fetch. Where the outcome is OK, `view` holds its payload in the region, to be copied before
    `FetchStream.still_valid` is asked and the stream is left."""

    index: int
    outcome: Outcome
    view: memoryview | None
    offset: int
    generation: int
    source: TierKind


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


class _Attachment:
    """What all clones share: the region, the epoch and the incarnation, and the lock that says that we live."""

    def __init__(self, run_dir: Path, namespace: Namespace, model_label: str, name: str) -> None:
        self.run_dir = run_dir
        self.region: Region | None = None
        self.epoch = 0
        self.incarnation = 0
        self.tiers: list[str] = []
        self._spec = wire.NamespaceSpec(
            namespace.digest(),
            namespace.root(),
            model_label or namespace.model,
            namespace.block_tokens,
            namespace.block_bytes,
        )
        self._name = name
        self._mutex = threading.Lock()
        self._liveness: tuple[int, Path] | None = None
        self._users = 1

    def ensure(self, connection: Connection, deadline_s: float) -> None:
        """Attach unless that is done. Copies under way keep the old mapping alive by their views."""
        with self._mutex:
            if self.region is not None:
                return
            file_name = self._hold_liveness()
            request = wire.Attach(self._spec, file_name, self._name)
            reply = connection.request(0, 0, request, deadline_s)
            attached = _expect(reply, wire.Attached)
            self.region = Region.attach(Path(attached.region_path), attached.epoch)
            self.epoch, self.incarnation = attached.epoch, attached.incarnation
            self.tiers = attached.tiers

    def forget(self, epoch: int) -> None:
        """The daemon that gave us this epoch is no more; the next call attaches anew."""
        with self._mutex:
            if self.region is not None and self.epoch == epoch:
                self.region.close()
                self.region = None
                self.epoch = self.incarnation = 0

    def join(self) -> None:
        with self._mutex:
            self._users += 1

    def leave(self) -> bool:
        """Whether that was the last user; then everything is closed."""
        with self._mutex:
            self._users -= 1
            if self._users:
                return False
            if self.region is not None:
                self.region.close()
                self.region = None
            if self._liveness is not None:
                descriptor, path = self._liveness
                path.unlink(missing_ok=True)
                os.close(descriptor)
                self._liveness = None
            return True

    def _hold_liveness(self) -> str:
        if self._liveness is not None and not self._liveness[1].exists():
            os.close(self._liveness[0])  # another boot of the daemon has cleared its folder
            self._liveness = None
        if self._liveness is None:
            path = self.run_dir / "clients" / secrets.token_hex(8)
            try:
                self._liveness = (lock(path), path)
            except OSError as error:
                raise TierUnavailable(f"cannot hold a lock in {path.parent}: {error.strerror}") from error
        return self._liveness[1].name


class FetchStream:
    """The blocks of one fetch, as they land. Leaving it ends all pins; thread-confined, one at a time per client."""

    def __init__(self, client: "Client", region: Region, epoch: int, incarnation: int, sequence: int) -> None:
        self.done = False
        self._client = client
        self._region = region
        self._epoch = epoch
        self._incarnation = incarnation
        self._sequence = sequence
        self._lease: int | None = None
        self._stale = 0
        self._released = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def landed(self, timeout_s: float) -> list[LandedBlock]:
        """Return what has landed since the last call, waiting for the first; [] at the timeout or when all is done."""
        if self.done:
            return []
        received = self._client.receive(timeout_s)
        if received is None or received[0] != self._sequence:
            return []
        try:
            landed = _expect(refused_raises(received[1]), wire.Landed)
        except ProtocolError as error:
            self.done = True
            self._client.refused(error, self._epoch)
            raise TierUnavailable("the daemon was restarted") from None
        self._lease = landed.lease
        self.done = landed.done
        return [self._block(slot) for slot in landed.slots]

    def still_valid(self, block: LandedBlock) -> bool:
        """Whether the bytes that were copied are the block's; ask after the copy. False: it counts as a miss."""
        try:
            valid = self._region.generation(block.offset) == block.generation
        except ValueError:  # unmapped meanwhile: the daemon that vouched for the bytes is no more
            valid = False
        self._stale += not valid
        return valid

    def release_blocks(self, indexes: list[int]) -> None:
        """End the pins of blocks that have been copied, so that the daemon can use their slots for the rest."""
        if self._lease is not None and not self._released:
            self._client.post(self._epoch, self._incarnation, wire.Release(self._lease, indexes))

    def release(self) -> None:
        """End all pins; what has not landed is cancelled. Idempotent, never raises, does not wait."""
        if self._released:
            return
        self._released = True
        if self._lease is None and not self.done:
            # Not one message yet, so the lease's number is unknown. One arrives at the daemon's next turn at the latest
            # if we ask it anything; a daemon that does not answer ends the lease at its deadline.
            with contextlib.suppress(TierUnavailable, ProtocolError):
                self.landed(_REPORT_DEADLINE_S)
        if self._lease is not None:
            self._client.post(self._epoch, self._incarnation, wire.Release(self._lease, None, self._stale))
        self.done = True

    def _block(self, slot: wire.Slot) -> LandedBlock:
        outcome = Outcome(slot.outcome)
        view = None
        if outcome == Outcome.OK:
            try:
                view = self._region.view(slot.offset, self._client.block_bytes)
            except ValueError:
                outcome = Outcome.STALE
        return LandedBlock(slot.index, outcome, view, slot.offset, slot.generation, TierKind(slot.source))


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
        _attachment: _Attachment | None = None,
    ) -> None:
        self._connection = Connection(run_dir)
        self._run_dir = run_dir
        self._namespace = namespace
        self._deadline_s = deadline_s
        self._closed = False
        self._attachment = _attachment
        if namespace is not None and _attachment is None:
            self._attachment = _Attachment(run_dir, namespace, model_label, name)

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
        attachment = self._attachment
        if attachment is not None:
            epoch, incarnation = attachment.epoch, attachment.incarnation
            if attachment.leave() and epoch:
                with contextlib.suppress(TierUnavailable, ProtocolError):
                    self._connection.request(epoch, incarnation, wire.Detach(), _REPORT_DEADLINE_S)
        self._connection.close()

    @property
    def block_bytes(self) -> int:
        assert self._namespace is not None, "a console has no blocks"
        return self._namespace.block_bytes

    @property
    def region(self) -> Region | None:
        """The region as it is mapped now; another one after the daemon was restarted. For pinning it."""
        return None if self._attachment is None else self._attachment.region

    @property
    def tiers(self) -> list[str]:
        """The tiers of the daemon we are attached to, fastest first; [] while there is none."""
        return [] if self._attachment is None else self._attachment.tiers

    # ------------------------------------------------------------ blocks

    def lookup(self, keys: Sequence[BlockKey], deadline_s: float | None = None) -> LookupResult:
        """Say which leading blocks of one prefix exist, and where; moves nothing."""
        if not keys:
            return LookupResult([], Outcome.OK, "")
        found = self._ask(wire.Lookup(join_keys(keys)), wire.Found, deadline_s)
        return LookupResult([TierKind(tier) for tier in found.tiers], Outcome(found.next), found.why)

    def fetch(self, keys: Sequence[BlockKey], deadline_s: float) -> FetchStream:
        """Begin to bring the blocks into the region; what has not landed after `deadline_s` answers TIMED_OUT.

        Until the stream is left this client is busy with it.
        """
        attachment = self._attached(self._deadline_s)
        region = attachment.region
        if region is None:
            raise TierUnavailable("the daemon was restarted this moment")
        epoch, incarnation = attachment.epoch, attachment.incarnation
        sequence = self._connection.send(epoch, incarnation, wire.Fetch(join_keys(keys), deadline_s))
        return FetchStream(self, region, epoch, incarnation, sequence)

    def store(
        self, keys: Sequence[BlockKey], parent: BlockKey, depth: int, deadline_s: float | None = None
    ) -> StoreGrant:
        """Ask for slots for consecutive blocks of one prefix; `parent` is the key before the first (the namespace's
        root at depth 0). What is granted must be committed, as written or not."""
        granted = self._ask(wire.Store(join_keys(keys), parent, depth), wire.Granted, deadline_s)
        region = self.region
        if region is None:
            raise TierUnavailable("the daemon was restarted this moment")
        blocks = []
        for slot in granted.slots:
            outcome = Outcome(slot.outcome)
            view = region.view(slot.offset, self.block_bytes) if outcome == Outcome.OK else None
            blocks.append(GrantedBlock(outcome, view, slot.offset, slot.generation))
        return StoreGrant(blocks, granted.retry_s)

    def commit(self, keys: Sequence[BlockKey], generations: list[int], written: list[bool]) -> list[Outcome]:
        """Say that granted slots are complete (or, `written[i]` false, given back). OK: the block can be fetched now.

        After a restart of the daemon every grant is STALE: the bytes lie in the old region, which nobody reads.
        """
        committed = self._ask(wire.Commit(join_keys(keys), generations, written), wire.Committed, None)
        return [Outcome(outcome) for outcome in committed.outcomes]

    # ------------------------------------------------------------ statistics

    def report(self, report: wire.Report) -> None:
        """Tell what became of a request. Never raises."""
        with contextlib.suppress(TierUnavailable, ProtocolError):
            self._ask(report, wire.Done, _REPORT_DEADLINE_S)

    def observe(self, errors: dict[str, int]) -> None:
        """Count faults that only we have seen. Never raises."""
        with contextlib.suppress(TierUnavailable, ProtocolError):
            self._ask(wire.Observe(errors), wire.Done, _REPORT_DEADLINE_S)

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

    def session_put(self, put: wire.SessionPut) -> wire.SessionSaved:
        return self._ask(put, wire.SessionSaved, None)

    def session_list(self, tenant: str | None = None, limit: int = 1000) -> wire.Sessions:
        return self._ask(wire.SessionList(tenant, limit), wire.Sessions, None)

    def session_pin(self, session_id: str, pinned: bool, tenant: str = "", namespace: bytes = b"") -> None:
        self._ask(wire.SessionPin(session_id, pinned, tenant, namespace), wire.Done, None)

    def session_delete(self, session_id: str, tenant: str = "", namespace: bytes = b"") -> wire.SessionDeleted:
        return self._ask(wire.SessionDelete(session_id, tenant, namespace), wire.SessionDeleted, None)

    # ------------------------------------------------------------ operation

    def ping(self) -> float:
        """Return the seconds that a round trip took."""
        started = time.perf_counter()
        self._ask(wire.Ping(), wire.Pong, None)
        return time.perf_counter() - started

    def evict(self, tiers: list[str], drop: bool = False, deadline_s: float = 60.0) -> wire.Evicted:
        return self._ask(wire.Evict(tiers, drop), wire.Evicted, deadline_s)

    def stats(self) -> dict[str, object]:
        """Return the snapshot of docs/stats.md."""
        return self._ask(wire.Stats(), wire.StatsReply, None).stats

    # ------------------------------------------------------------ for FetchStream

    def receive(self, timeout_s: float) -> tuple[int, wire.Reply] | None:
        """The next message of the stream that is open; None at the timeout."""
        try:
            return self._connection.receive(timeout_s)
        except TierUnavailable:
            self._lost()
            raise

    def refused(self, error: ProtocolError, epoch: int) -> None:
        """Raise the error, unless it says that our attachment is void: then the next call attaches anew."""
        if error.code not in (ErrorCode.STALE_EPOCH, ErrorCode.NOT_ATTACHED) or self._attachment is None:
            raise error
        self._attachment.forget(epoch)

    def post(self, epoch: int, incarnation: int, body: wire.Message) -> None:
        """Send a message whose answer nobody waits for."""
        with contextlib.suppress(TierUnavailable, ProtocolError):
            self._connection.send(epoch, incarnation, body)

    # ------------------------------------------------------------ private

    def _ask(self, body: wire.Message, expected: type[_Reply], deadline_s: float | None) -> _Reply:
        wait_s = self._deadline_s if deadline_s is None else deadline_s
        if self._attachment is None:
            return _expect(self._connection.request(0, 0, body, wait_s), expected)
        for is_last_try in (False, True):
            attachment = self._attached(wait_s)
            epoch, incarnation = attachment.epoch, attachment.incarnation
            try:
                return _expect(self._connection.request(epoch, incarnation, body, wait_s), expected)
            except TierUnavailable:
                self._lost()
                raise
            except ProtocolError as error:
                self.refused(error, epoch)
                # Grants of the old epoch are void, whoever attaches again; only asking anew makes sense.
                if is_last_try or isinstance(body, wire.Commit):
                    raise TierUnavailable("the daemon was restarted") from None
        raise AssertionError("unreachable")

    def _attached(self, deadline_s: float) -> _Attachment:
        attachment = self._attachment
        assert attachment is not None, "a console is not attached"
        attachment.ensure(self._connection, deadline_s)
        return attachment

    def _lost(self) -> None:
        """If the daemon is gone for good, so is the region; one that is only slow is found again by its epoch."""
        attachment = self._attachment
        if attachment is not None and not daemon_lives(self._run_dir):
            attachment.forget(attachment.epoch)


def _expect(reply: object, expected: type[_Reply]) -> _Reply:
    if not isinstance(reply, expected):
        raise ProtocolError(ErrorCode.MALFORMED, f"expected {expected.__name__}, got {type(reply).__name__}")
    return reply
