"""The client's end of one fetch: blocks as they land, and their pins."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from kvstore import wire
from kvstore.attachment import Attached
from kvstore.connection import refused_raises
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.key import join_keys, split_keys
from kvstore.core.outcome import Outcome, TierKind
from kvstore.wire import ErrorCode

# The daemon names the lease in its next turn.
_LEASE_DEADLINE_S = 0.2


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


class Channel(Protocol):
    """What a stream needs of its client."""

    @property
    def block_bytes(self) -> int: ...

    def attach(self, deadline_s: float) -> Attached: ...

    def send(self, attached: Attached, body: wire.Message) -> int: ...

    def receive(self, attached: Attached, timeout_s: float, asked: int) -> tuple[int, wire.Reply] | None: ...

    def refused(self, error: ProtocolError, attached: Attached) -> None: ...

    def post(self, attached: Attached, body: wire.Message) -> None: ...


class FetchStream:
    """The blocks of one fetch, as they land. Leaving it ends all pins; thread-confined, one at a time per client."""

    def __init__(self, client: Channel, attached: Attached, request: wire.Fetch) -> None:
        """Sends the request, unless it is for no blocks: then all is done. Raises TierUnavailable and ProtocolError."""
        self.done = not request.keys
        self._client = client
        self._attached = attached
        self._request = request
        self._sequence = 0 if self.done else client.send(attached, request)
        self._was_sent_again = False
        self._lease: int | None = None
        self._stale = 0
        self._released = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def landed(self, timeout_s: float) -> list[LandedBlock]:
        """Return what has landed since the last call, waiting for the first; [] at the timeout or when all is done."""
        deadline = time.monotonic() + timeout_s
        while not self.done:
            landed = self._next(deadline - time.monotonic())
            if landed is None:
                return []
            if landed.slots:
                return [self._block(slot) for slot in landed.slots]
        return []

    def still_valid(self, block: LandedBlock) -> bool:
        """Whether the bytes that were copied are the block's; ask after the copy. False: it counts as a miss."""
        try:
            valid = self._attached.region.generation(block.offset) == block.generation
        except ValueError:  # unmapped meanwhile: the daemon that vouched for the bytes is no more
            valid = False
        self._stale += not valid
        return valid

    def release_blocks(self, indexes: list[int]) -> None:
        """End the pins of blocks that have been copied, so that the daemon can use their slots for the rest."""
        if self._lease is not None and not self._released:
            self._client.post(self._attached, wire.Release(self._lease, indexes))

    def damaged(self, blocks: Sequence[LandedBlock]) -> None:
        """Say that these blocks, which have been released, are not what was stored: their copies are dropped."""
        keys = split_keys(self._request.keys)
        for source in {block.source for block in blocks}:
            wrong = [keys[block.index] for block in blocks if block.source is source]
            self._client.post(self._attached, wire.Damaged(join_keys(wrong), int(source)))

    def release(self) -> None:
        """End all pins; what has not landed is cancelled. Idempotent, never raises, hardly waits."""
        if self._released:
            return
        self._released = True
        if self._lease is None and not self.done:
            # The lease's number comes with the first message, which is on its way; a daemon that does not answer ends
            # the lease at its deadline.
            with contextlib.suppress(TierUnavailable, ProtocolError):
                self._next(_LEASE_DEADLINE_S)
        if self._lease is not None:
            self._client.post(self._attached, wire.Release(self._lease, None, self._stale))
        self.done = True

    # ------------------------------------------------------------ private

    def _next(self, timeout_s: float) -> wire.Landed | None:
        """Take in the next message of this fetch; None at the timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            received = self._client.receive(self._attached, deadline - time.monotonic(), self._sequence)
            if received is None:
                return None
            if received[0] == self._sequence:
                break
        try:
            landed = refused_raises(received[1])
            if not isinstance(landed, wire.Landed):
                raise ProtocolError(ErrorCode.MALFORMED, f"expected Landed, got {type(landed).__name__}")
        except ProtocolError as error:
            self.done = True
            self._client.refused(error, self._attached)
            if self._lease is not None or self._was_sent_again or self._released:
                raise TierUnavailable("the daemon was restarted") from None
            return self._send_again(deadline)
        self._lease = landed.lease
        self.done = landed.done
        return landed

    def _send_again(self, deadline: float) -> wire.Landed | None:
        """The daemon was restarted since we attached to it, and has nothing of this fetch yet."""
        self._was_sent_again = True
        self._attached = self._client.attach(deadline - time.monotonic())
        self._sequence = self._client.send(self._attached, self._request)
        self.done = False
        return self._next(deadline - time.monotonic())

    def _block(self, slot: wire.Slot) -> LandedBlock:
        outcome = Outcome(slot.outcome)
        view = None
        if outcome == Outcome.OK:
            try:
                view = self._attached.region.view(slot.offset, self._client.block_bytes)
            except ValueError:
                outcome = Outcome.STALE
        return LandedBlock(slot.index, outcome, view, slot.offset, slot.generation, TierKind(slot.source))
