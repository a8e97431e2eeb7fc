"""Deletes the records of sessions, in every tier, however long that tier is away and whatever kills us meanwhile.

    bucket   put the tombstone, then delete the record
    SSD      put the tombstone too, then delete the record; delete that tombstone when the bucket has its own

So from the first step on there is a tombstone for whoever comes next: a daemon that is killed finds the one on its disk
and brings it to the bucket. A record that is being put is deleted after that put has ended, since the two might
overtake each other; and as long as its deletion is pending, a record in that tier counts as deleted.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from kvstore import session_record as records
from kvstore.bucket import tombstone
from kvstore.bucket.tombstone import Tombstone
from kvstore.core.outcome import Outcome, TierKind
from kvstore.session_record import SessionKey
from kvstore.store.link import WorkerLink
from kvstore.store.session import Session
from kvstore.worker import ops

_RETRY_AFTER_S = 1.0

Done = Callable[[], None]
_Step = Callable[[int], ops.RecordPut | ops.RecordDelete]


@dataclass(slots=True)
class _Removal:
    """What is still to be done with one record in one tier, in order; then everybody in `done` is told."""

    steps: deque[_Step] = field(default_factory=deque)
    is_putting: dict[TierKind, bool] = field(default_factory=dict)
    done: list[Done] = field(default_factory=list)
    is_out: bool = False
    not_before: float = 0.0


class SessionRemovals:
    """Owned by the control thread."""

    def __init__(
        self, links: dict[TierKind, WorkerLink], on_fault: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self._links = links
        self._on_fault = on_fault
        self._clock = clock
        self._pending: dict[tuple[TierKind, str], _Removal] = {}

    def __len__(self) -> int:
        """How many are pending in tiers that answer."""
        return sum(self._links[tier].ready for tier, _ in self._pending)

    def pending(self, tier: TierKind, key: SessionKey) -> bool:
        return bool(self._pending) and (tier, records.record_name(key)) in self._pending

    def remove(self, session: Session, tiers: Collection[TierKind], stone: Tombstone | None, done: Done) -> None:
        """Begin; `done` is told once no restart of this daemon brings the session back.

        With a tombstone, no other daemon's will either.
        """
        name = records.record_name(session.key)
        marking = [] if stone is None else [_putting(stone)]
        for tier in tiers:
            removal = self._add(tier, name, [*marking, _deleting(name)])
            removal.is_putting = session.is_putting
            if tier == TierKind.S3 and stone is not None and TierKind.SSD in tiers:
                removal.done.append(lambda: self._clear_note(name, stone))
        decisive = min(tiers, default=None)
        if decisive is None:
            done()
        else:
            self._pending[decisive, name].done.append(done)
        self.pump()

    def resume(self, stone: Tombstone) -> None:
        """Bring a tombstone to the bucket that a predecessor of ours could not.

        The record there is left to the lease's holder: it may be that of a new session by now.
        """
        if TierKind.S3 in self._links:
            removal = self._add(TierKind.S3, stone.name, [_putting(stone)])
            removal.done.append(lambda: self._clear_note("", stone))

    def pump(self) -> None:
        now = self._clock()
        for (tier, name), removal in list(self._pending.items()):
            if not removal.is_out and not removal.is_putting.get(tier) and now >= removal.not_before:
                self._send(tier, name, removal)

    # ------------------------------------------------------------ private

    def _add(self, tier: TierKind, name: str, steps: list[_Step]) -> _Removal:
        removal = self._pending.setdefault((tier, name), _Removal())
        removal.steps.extend(steps)
        return removal

    def _clear_note(self, name: str, stone: Tombstone) -> None:
        """The bucket has the tombstone; ours may still be on its way to the disk, and then it goes after that."""
        is_under_way = (TierKind.SSD, name) in self._pending
        self._add(TierKind.SSD, name if is_under_way else stone.name, [_deleting(stone.name)])

    def _send(self, tier: TierKind, name: str, removal: _Removal) -> None:
        link = self._links[tier]
        if not link.ready:
            return
        removal.is_out = True

        def answered(result: ops.Result) -> None:
            removal.is_out = False
            if result.outcome not in (Outcome.OK, Outcome.MISS):
                self._on_fault(f"{tier.label}_session_delete_failed")
                removal.not_before = self._clock() + _RETRY_AFTER_S
                return
            removal.steps.popleft()
            if removal.steps:
                self._send(tier, name, removal)
                return
            del self._pending[tier, name]
            for done in removal.done:
                done()

        link.record(removal.steps[0](link.next_op()), answered)


def _putting(stone: Tombstone) -> _Step:
    data = tombstone.encode(stone)
    return lambda op: ops.RecordPut(op, stone.name, data)


def _deleting(name: str) -> _Step:
    return lambda op: ops.RecordDelete(op, name)
