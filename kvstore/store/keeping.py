"""What clients say about what should stay: hints, pins, and times to live of blocks and sessions.

Hint         an engine, of a finished request's blocks      priority, returns ─► Room.hint ─► both tiers' policies
SessionPut   the same of a session's newest turn            pin               ─► Pins, within its budget
SessionHint  the same of a session, by anybody              ttl               ─► an end, when its time is over
"""

import heapq
import math
from collections.abc import Callable

import numpy as np

from kvstore import wire
from kvstore.config import Config
from kvstore.core.errors import ProtocolError
from kvstore.core.index import Ids
from kvstore.core.outcome import TierKind
from kvstore.session_record import SessionKey
from kvstore.store.catalog import Catalog
from kvstore.store.engines import Engine
from kvstore.store.pins import Pins
from kvstore.store.prefetch import Prefetch
from kvstore.store.room import Room
from kvstore.store.session import Session
from kvstore.wire import ErrorCode
from policies.base import Hint

_MAX_PIN_S = 7 * 86400.0
_MAX_TTL_S = 366 * 86400.0
# Prefixes with a time to live of their own, and all their keys together.
_MAX_TIMED, _MAX_TIMED_BYTES = 4096, 16 << 20
_MAX_NAME = 200
_END = Hint(returns=False)


def make_pins(catalog: Catalog, config: Config, ram_bytes: int) -> Pins:
    """Return pins whose budgets are the configured shares of RAM and SSD."""
    ram_budget = int(config.ram.pin_share * ram_bytes)
    budgets: dict[TierKind, Callable[[], int]] = {TierKind.RAM: lambda: ram_budget}
    if config.ssd.enabled:
        ssd_budget = int(config.ssd.pin_share * config.ssd.max_bytes)
        budgets[TierKind.SSD] = lambda: ssd_budget
    return Pins(catalog, budgets)


class Keeping:
    """Owned by the control thread."""

    def __init__(
        self,
        catalog: Catalog,
        room: Room,
        pins: Pins,
        prefetch: Prefetch,
        pin_for_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._room = room
        self.pins = pins
        self.prefetch = prefetch
        self._pin_for_s = pin_for_s
        self._clock = clock
        # (when, a number that orders equals, namespace, joined keys)
        self._timed: list[tuple[float, int, int, bytes]] = []
        self._timed_bytes = 0
        self._num_timed = 0

    # ------------------------------------------------------------ requests

    def hint(self, engine: Engine, request: wire.Hint) -> None:
        """Raises ProtocolError: bad_request, or busy where the pin or the time to live finds no room."""
        _check(request.expect_followup, request.end, request.ttl_s)
        if len(request.pin_name) > _MAX_NAME or not 0.0 <= (request.pin_s or 0.0) <= _MAX_PIN_S:
            raise ProtocolError(ErrorCode.BAD_REQUEST, f"pin_s lies between 0 and {_MAX_PIN_S:.0f} seconds")
        blocks = self._known(engine.namespace, request.keys)
        now_s = self._clock()
        if request.ttl_s:
            # Before anything is done, since who is refused counts on nothing.
            self._make_room_for_ttl(request.keys, now_s + request.ttl_s)
        if request.pin_s is not None:
            owner = (engine.incarnation, request.pin_name)
            if request.pin_s:
                self.pins.hold(owner, blocks, now_s + request.pin_s, whole=True)
            else:
                self.pins.release(owner)
        hint = _hint(request.expect_followup, request.end, request.priority)
        if request.ttl_s:
            self._remember_ttl(engine.namespace, request.keys, now_s + request.ttl_s)
            self._room.hint(blocks, hint, ends_at_s=now_s + request.ttl_s)
        else:
            self._room.hint(blocks, hint)

    def session_hint(self, session: Session, request: wire.SessionHint) -> None:
        self._room.hint(session.blocks, _hint(request.expect_followup, request.end, request.priority))

    def recorded(self, session: Session, request: wire.SessionPut) -> None:
        """A turn was recorded: what was said of the one before is over."""
        hint = _hint(request.expect_followup, request.end, request.priority)
        self._room.hint(session.blocks, hint)
        self.prefetch.ended(session, hint)

    def detached(self, engine: Engine) -> None:
        self.pins.release_of(engine.incarnation)

    # ------------------------------------------------------------ sessions

    def adopted(self, session: Session) -> None:
        """A session has new blocks, or was pinned or unpinned; called with each new state of one. A pinned session that
        has outgrown the budget keeps its head pinned."""
        self.prefetch.changed(session)
        if session.pinned:
            self.pins.hold(session.key, session.blocks, self._clock() + self._pin_for_s, whole=False)
        else:
            self.pins.release(session.key)

    def check_pin(self, owner: SessionKey | None, keys: bytes, namespace: int) -> None:
        """Raise ProtocolError (busy) where not all of these blocks can be pinned for the session; None: a new one."""
        self.pins.check(owner, self._catalog.find_joined(keys, namespace), namespace)

    def removed(self, session: Session) -> None:
        self.pins.release(session.key)
        self.prefetch.removed(session)

    # ------------------------------------------------------------ time

    def expire(self, now: float) -> None:
        """End pins and blocks whose time is over."""
        self.pins.expire(now)
        while self._timed and self._timed[0][0] <= now:
            _, _, namespace, keys = heapq.heappop(self._timed)
            self._timed_bytes -= len(keys)
            self._room.hint(self._room.hints.timed(self._known(namespace, keys), now), _END)

    # ------------------------------------------------------------ private

    def _known(self, namespace: int, keys: bytes) -> Ids:
        """Return the ids of the leading blocks that are known and continue one another, so that none comes twice."""
        ids = self._catalog.find_joined(keys, namespace)
        goes_on = ids >= 0
        goes_on[1:] &= self._catalog.parents_of(ids[1:]) == ids[:-1]
        gaps = np.flatnonzero(~goes_on)
        return ids[: int(gaps[0])] if len(gaps) else ids

    def _make_room_for_ttl(self, keys: bytes, ends_at_s: float) -> None:
        """Forget those that would end last, which then go as any others do: who names a year must not keep out who
        names a minute. Raises ProtocolError (busy) where this one would end last."""
        if self._has_room_for_ttl(keys):
            return
        self._timed.sort()  # which is a heap, too
        while not self._has_room_for_ttl(keys):
            if self._timed[-1][0] <= ends_at_s:
                raise ProtocolError(ErrorCode.BUSY, f"{_MAX_TIMED} prefixes have a time to live of their own already")
            self._timed_bytes -= len(self._timed.pop()[3])

    def _has_room_for_ttl(self, keys: bytes) -> bool:
        return len(self._timed) < _MAX_TIMED and self._timed_bytes + len(keys) <= _MAX_TIMED_BYTES

    def _remember_ttl(self, namespace: int, keys: bytes, ends_at_s: float) -> None:
        self._num_timed += 1
        self._timed_bytes += len(keys)
        heapq.heappush(self._timed, (ends_at_s, self._num_timed, namespace, keys))


def check_session_hint(request: wire.SessionHint | wire.SessionPut) -> None:
    """Raises ProtocolError (bad_request)."""
    _check(request.expect_followup, request.end, request.ttl_s)


def _check(expect_followup: bool, end: bool, ttl_s: float) -> None:
    if expect_followup and end:
        raise ProtocolError(ErrorCode.BAD_REQUEST, "expect_followup and end contradict each other")
    if not (math.isfinite(ttl_s) and 0.0 <= ttl_s <= _MAX_TTL_S):
        raise ProtocolError(ErrorCode.BAD_REQUEST, "ttl_s is a number of seconds up to a year, or 0")


def _hint(expect_followup: bool, end: bool, priority: int) -> Hint:
    return Hint(returns=True if expect_followup else False if end else None, priority=priority)
