"""The lease of a bucket: one daemon at a time deletes there what is nobody's any more.

    (none) ──put if absent──► HELD ──renew at a third: put if match──► HELD ──refused, or LEASE_S over──► (none)
    another's ──its tag unchanged for LEASE_S of our own time: put if match──► HELD

Clocks of two machines are never compared: another's lease has run out when we have seen its tag unchanged for LEASE_S
on our own monotonic clock, and ours ends LEASE_S after we began to send the last renewal. So two daemons never hold it
at once, as long as their clocks run at about the same pace; a request that is under way at that moment may still be
carried out, and everything that is done under the lease bears that.
"""

import contextlib
import secrets
from collections.abc import Callable
from typing import Final

import msgspec

from kvstore.core.errors import TierUnavailable, WrongKey
from tiers.base import Record, RecordStore

LEASE_NAME: Final = "lease"
LEASE_S: Final = 60.0
RENEW_EVERY_S: Final = LEASE_S / 3


class _Holder(msgspec.Struct, frozen=True):
    """What the lease says of who has it. `is_released`: nobody has, whatever time it is."""

    name: str
    is_released: bool = False


class BucketLease:
    """Used by one thread."""

    def __init__(self, records: RecordStore, clock: Callable[[], float], name: str = "") -> None:
        self._records = records
        self._clock = clock
        self._name = name or secrets.token_hex(8)
        self._etag: str | None = None
        self._until = 0.0
        self._seen: tuple[str, float] | None = None
        self._next_look = clock()

    @property
    def is_held(self) -> bool:
        return self._etag is not None and self._clock() < self._until

    @property
    def next_look(self) -> float:
        """When `tick` has something to do."""
        return self._next_look

    def tick(self) -> None:
        """Renew it, or take it if it is free, where it is time for that."""
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + RENEW_EVERY_S
        try:
            if self._etag is not None:
                self._hold(now, self._etag)
            if self._etag is None:
                self._try_to_take(now)
        except TierUnavailable:
            # Whether a put was carried out is not known. Ours ends by itself, and then it counts as another's.
            if self._etag is not None and now >= self._until:
                self._etag, self._seen = None, None
        except WrongKey:
            # Those who can read what is in this bucket keep it in order.
            self._etag = None

    def release(self) -> None:
        """Let the next one have it at once, if it is ours."""
        if self.is_held:
            with contextlib.suppress(TierUnavailable):
                self._put(_Holder(self._name, is_released=True), self._etag)
        self._etag = None

    # ------------------------------------------------------------ private

    def _try_to_take(self, now: float) -> None:
        found = self._records.get(LEASE_NAME)
        if found is None:
            self._hold(now, None)
            if self._etag is None:
                self._clear_damaged(now)
            return
        if self._seen is None or self._seen[0] != found.etag:
            self._seen = (found.etag, now)
        if _is_free(found) or now - self._seen[1] >= LEASE_S:
            self._hold(now, found.etag)

    def _clear_damaged(self, now: float) -> None:
        """There is something in the lease's place that is none: waited for as any other, it is removed."""
        if self._seen is None or self._seen[0]:
            self._seen = ("", now)
        elif now - self._seen[1] >= LEASE_S:
            self._records.delete(LEASE_NAME)

    def _hold(self, now: float, etag: str | None) -> None:
        """Put it as ours; `now` is when that was begun."""
        self._etag = self._put(_Holder(self._name), etag)
        if self._etag is not None:
            self._until = now + LEASE_S
            self._seen = None

    def _put(self, holder: _Holder, etag: str | None) -> str | None:
        data = msgspec.msgpack.encode(holder)
        return self._records.put(LEASE_NAME, data, if_match=etag, if_absent=etag is None)


def _is_free(found: Record) -> bool:
    try:
        return _decoder.decode(found.data).is_released
    except msgspec.DecodeError:
        return False


_decoder = msgspec.msgpack.Decoder(_Holder)
