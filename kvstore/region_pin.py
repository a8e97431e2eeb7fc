"""Keeps the shared region pinned, so that a GPU copies from and to it by itself; on a CPU pool its pages are entered
into the page table ahead of the copies, for which a first touch costs eight times a warm one.

    region of this daemon ──► pinning ──► pinned ──► (another daemon's region) ──► leaving ──► gone
                                 └─ refused: copies stay slow

All of that takes seconds for a large region, so a thread of its own does it, and no copy waits for it: until a region
is pinned, copies go through the driver's own staging. A restarted daemon brings another region; the old one is unpinned
once no copy uses it, and stays mapped until then. Copies from a region on its way out are refused: its blocks are those
of a daemon that is no more.
"""

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from kvstore.core.errors import ConfigError
from tiers.region import Region

_log = logging.getLogger(__name__)


class Pinning(Protocol):
    """See `tiers/hbm.py`."""

    def pin(self, address: int, num_bytes: int, goes_on: Callable[[], bool]) -> None: ...

    def unpin(self, address: int) -> None: ...


class Hbm(Pinning, Protocol):
    """The bytes of the HBM pool, see `tiers/hbm.py`; copies return when they are complete."""

    def gather(self, pool_blocks: Sequence[int], out: memoryview) -> None: ...

    def scatter(self, payload: memoryview, pool_blocks: Sequence[int]) -> None: ...

    def scatter_layers(
        self, payloads: Sequence[memoryview], groups: Sequence[Sequence[int]], first: int, end: int
    ) -> None: ...


class _Pinned:
    """A region that is pinned, or about to be, or on its way out."""

    def __init__(self, region: Region) -> None:
        """Raises ValueError where the region was closed."""
        # Keeps the mapping alive for as long as it is pinned.
        self.view = region.view(0, region.data_bytes)
        self.region = region
        self.num_copies = 0
        self.is_leaving = False

    def holds(self, address: int) -> bool:
        return self.region.address <= address < self.region.address + self.region.data_bytes


class RegionPin:
    """Any thread may use it."""

    def __init__(self, hbm: Pinning) -> None:
        self._hbm = hbm
        self._changed = threading.Condition()
        self._wanted: Region | None = None
        self._pinned: _Pinned | None = None
        self._is_refused = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def copying(self, view: memoryview) -> Iterator[bool]:
        """Around a copy from or to `view`, a part of some region. False: that one is on its way out, copy nothing."""
        address = _address(view)
        with self._changed:
            pinned = self._pinned
            if pinned is not None and pinned.holds(address):
                pinned.num_copies += not pinned.is_leaving
            else:
                pinned = None
            may_copy = pinned is None or not pinned.is_leaving
        try:
            yield may_copy
        finally:
            if pinned is not None and may_copy:
                with self._changed:
                    pinned.num_copies -= 1
                    self._changed.notify_all()

    def ensure(self, region: Region | None) -> None:
        """Have this region pinned and no other. Returns at once."""
        with self._changed:
            if region is None or region is self._wanted or self._is_refused or self._is_closed:
                return
            self._wanted = region
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-pin", daemon=True)
                self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Unpin, once no copy is under way; after `timeout_s` that is left to the end of the process. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._wanted = None
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    # ------------------------------------------------------------ on the thread

    def _run(self) -> None:
        while (region := self._next()) is not None:
            try:
                pinned = _Pinned(region)
            except ValueError:  # closed this moment: another one comes
                self._give_up(region)
                continue
            with self._changed:
                # From here on it cannot leave under a copy, though not all of it is pinned yet.
                self._pinned = pinned
            try:
                self._hbm.pin(region.address, region.data_bytes, partial(self._is_wanted, region))
            except ConfigError as error:
                _log.warning("the shared region stays unpinned, copies will be slow: %s", error)
                self._is_refused = True
            except Exception:
                # The root of this thread, and a driver may raise anything: copies go on, unpinned.
                _log.exception("the shared region stays unpinned, copies will be slow")
                self._is_refused = True

    def _is_wanted(self, region: Region) -> bool:
        return self._wanted is region

    def _give_up(self, region: Region) -> None:
        with self._changed:
            if self._wanted is region:
                self._wanted = None

    def _next(self) -> Region | None:
        """Wait for another region to be wanted and let go of the present one; return it, or None at the end."""
        with self._changed:
            present = None if self._pinned is None else self._pinned.region
            self._changed.wait_for(lambda: self._is_closed or self._is_refused or self._wanted is not present)
            leaving = self._pinned
            if leaving is not None:
                leaving.is_leaving = True
                self._changed.wait_for(lambda: leaving.num_copies == 0)
        if leaving is not None:
            # Without the lock: no copy of it begins any more, and those of other regions go on.
            self._hbm.unpin(leaving.region.address)
            leaving.view.release()
        with self._changed:
            self._pinned = None
            return None if self._is_closed or self._is_refused else self._wanted


def _address(view: memoryview) -> int:
    # A read-only view has no address to be had so cheaply, and no region hands one out.
    return 0 if view.readonly or not view.nbytes else ctypes.addressof(ctypes.c_char.from_buffer(view))
