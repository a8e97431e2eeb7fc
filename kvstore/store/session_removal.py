"""Deletes the records of sessions, in every tier, however long that tier is away.

A record that is being put is deleted after that put has ended, since the two might overtake each other; and as long as
its deletion is pending, a record in that tier counts as deleted.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvstore.core.outcome import Outcome, TierKind
from kvstore.store import ops
from kvstore.store import record as records
from kvstore.store.link import WorkerLink
from kvstore.store.record import SessionKey
from kvstore.store.session import Session

_RETRY_AFTER_S = 1.0

Done = Callable[[], None]


@dataclass(slots=True)
class _Removal:
    is_putting: dict[TierKind, bool]
    done: list[Done]
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
        self._pending: dict[tuple[TierKind, SessionKey], _Removal] = {}

    def __len__(self) -> int:
        """How many are pending in tiers that answer."""
        return sum(self._links[tier].ready for tier, _ in self._pending)

    def pending(self, tier: TierKind, key: SessionKey) -> bool:
        return (tier, key) in self._pending

    def remove(self, session: Session, tiers: Collection[TierKind], done: Done) -> None:
        """Begin; `done` is told once the record is gone from SSD, so that no restart brings it back."""
        for tier in tiers:
            removal = self._pending.setdefault((tier, session.key), _Removal(session.is_putting, []))
            removal.is_putting = session.is_putting
            if tier == TierKind.SSD:
                removal.done.append(done)
        if TierKind.SSD not in tiers:
            done()
        self.pump()

    def pump(self) -> None:
        now = self._clock()
        for (tier, key), removal in list(self._pending.items()):
            if not removal.is_out and not removal.is_putting[tier] and now >= removal.not_before:
                self._send(tier, key, removal)

    def _send(self, tier: TierKind, key: SessionKey, removal: _Removal) -> None:
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
            del self._pending[tier, key]
            for done in removal.done:
                done()

        link.record(ops.RecordDelete(link.next_op(), records.record_name(key)), answered)
