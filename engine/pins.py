"""Keeps the shared region pinned, so that a GPU copies from and to it by itself; on a CPU pool this costs nothing.

A restarted daemon brings another region. The old one is unpinned once no copy uses it, and stays mapped until then.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

from kvstore.core.errors import ConfigError
from tiers.region import Region

_log = logging.getLogger(__name__)


class Pinning(Protocol):
    """See `tiers/hbm.py`."""

    def pin(self, address: int, num_bytes: int) -> None: ...

    def unpin(self, address: int) -> None: ...


class Hbm(Pinning, Protocol):
    """The bytes of the HBM pool, see `tiers/hbm.py`; both copies return when they are complete."""

    def gather(self, pool_blocks: Sequence[int], out: memoryview) -> None: ...

    def scatter(self, payload: memoryview, pool_blocks: Sequence[int]) -> None: ...


class RegionPin:
    """Any thread may use it. Copies from a region that is not pinned (yet) are slower, not wrong."""

    def __init__(self, hbm: Pinning) -> None:
        self._hbm = hbm
        self._lock = threading.Lock()
        self._num_copies = 0
        self._pinned: Region | None = None
        # Keeps the mapping alive for as long as it is pinned.
        self._view: memoryview | None = None
        self._is_refused = False

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Nothing is pinned or unpinned while a copy is inside."""
        with self._lock:
            self._num_copies += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_copies -= 1

    def ensure(self, region: Region | None) -> None:
        """Pin this region and no other, unless copies are under way: then the next call does. Takes seconds."""
        with self._lock:
            if region is None or region is self._pinned or self._num_copies or self._is_refused:
                return
            try:
                view = region.view(0, region.data_bytes)
            except ValueError:  # closed this moment: another one comes
                return
            self._let_go()
            try:
                self._hbm.pin(region.address, region.data_bytes)
            except ConfigError as error:
                _log.warning("the shared region stays unpinned, copies will be slow: %s", error)
                self._is_refused = True
                view.release()
                return
            self._pinned, self._view = region, view

    def close(self) -> None:
        """Idempotent; no copy may be under way."""
        with self._lock:
            self._let_go()

    def _let_go(self) -> None:
        if self._pinned is not None and self._view is not None:
            self._hbm.unpin(self._pinned.address)
            self._view.release()
        self._pinned = self._view = None
