"""The pages of one of SGLang's host pools, kept in the daemon: which there are, loading, storing.

SGLang names a page by a chained SHA-256 over all tokens up to its end. Whether others come before it, and how many, it
tells only sometimes, so each page is a prefix of its own here (depth 0): of their order the daemon knows only in which
one requests use them.

Covers: keys, deadlines, a daemon that is gone or silent (a miss each time). Does not cover: SGLang's classes and
tensors (kvstore/connectors/sglang.py). Thread-safe: questions, loads and stores come from a thread each.
"""

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence

from kvstore.client import Client
from kvstore.connectors.sglang_parts.settings import Settings
from kvstore.core.counts import Counts
from kvstore.core.errors import KVStoreError
from kvstore.core.key import NAME_BYTES, BlockKey, Namespace, engine_keys
from kvstore.core.outcome import Outcome

_log = logging.getLogger(__name__)
_SHA256_HEX = re.compile(r"[0-9a-f]{64}")
# What landed is copied, and given back, in between.
_LANDED_TIMEOUT_S = 0.05
_WARN_EVERY_S = 60.0


class Pages:
    """See the module. `payload_bytes` of each page are those of `namespace`."""

    def __init__(
        self, namespace: Namespace, settings: Settings, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._root = namespace.root()
        self._settings = settings
        self._clock = clock
        self._asking = Client(settings.run_path, namespace=namespace, name=name, deadline_s=settings.lookup_deadline_s)
        self._loading, self._storing = self._asking.clone(), self._asking.clone()
        self._locks = threading.Lock(), threading.Lock(), threading.Lock()
        self._rests_until = 0.0
        self._next_warning = 0.0
        self.counts = Counts()

    def leading(self, names: Sequence[str]) -> int:
        """Return how many pages, from the first on, are there now; 0 where the daemon does not answer."""
        if not names or self._is_resting():
            return 0
        with self._locks[0]:
            try:
                found = self._asking.lookup(self._keys(names), self._settings.lookup_deadline_s)
            except KVStoreError as error:
                self._failed("lookup", error)
                return 0
        self.counts.add("pages_asked", len(names))
        self.counts.add("pages_found", len(found.tiers))
        return len(found.tiers)

    def load(self, names: Sequence[str], put: Callable[[int, memoryview], None]) -> list[bool]:
        """Have `put(i, payload)` copy each page that is there; out[i] says that page i's bytes are right and complete.

        The payload may change right after `put` returns, and `put` may be called for a page that then answers False.
        """
        right = [False] * len(names)
        if not names or self._is_resting():
            return right
        deadline = self._clock() + self._settings.load_deadline_s
        with self._locks[1]:
            try:
                with self._loading.fetch(self._keys(names), self._settings.load_deadline_s) as stream:
                    while not stream.done and self._clock() < deadline:
                        landed = stream.landed(_LANDED_TIMEOUT_S)
                        for block in landed:
                            if block.outcome == Outcome.OK and block.view is not None:
                                put(block.index, block.view)
                                right[block.index] = stream.still_valid(block)
                        stream.release_blocks([block.index for block in landed])
            except KVStoreError as error:
                self._failed("load", error)
        self.counts.add("pages_loaded", sum(right))
        self.counts.add("pages_not_loaded", len(right) - sum(right))
        return right

    def store(self, names: Sequence[str], get: Callable[[int, memoryview], None]) -> list[bool]:
        """Have `get(i, slot)` fill the slot of each page that is not there yet; out[i] says that page i is there then,
        or will be at once since another writes it."""
        stored = [False] * len(names)
        if not names or self._is_resting():
            return stored
        deadline = self._clock() + self._settings.store_deadline_s
        with self._locks[2]:
            try:
                self._store(self._keys(names), get, stored, deadline)
            except KVStoreError as error:
                self._failed("store", error)
        self.counts.add("pages_stored", sum(stored))
        self.counts.add("pages_not_stored", len(stored) - sum(stored))
        return stored

    def close(self) -> None:
        """Idempotent."""
        for lock, client in zip(self._locks, (self._asking, self._loading, self._storing), strict=True):
            with lock:
                client.close()

    # ------------------------------------------------------------ private

    def _store(
        self, keys: list[BlockKey], get: Callable[[int, memoryview], None], stored: list[bool], deadline: float
    ) -> None:
        granted: list[int] = []
        generations: list[int] = []
        written: list[bool] = []
        try:
            for index, key in enumerate(keys):
                left_s = deadline - self._clock()
                if left_s <= 0.0:
                    break
                (block,) = self._storing.store([key], BlockKey(self._root), 0, left_s).blocks
                stored[index] = block.outcome in (Outcome.EXISTS, Outcome.PENDING)
                if block.view is None:
                    continue
                granted.append(index)
                generations.append(block.generation)
                written.append(False)
                get(index, block.view)
                written[-1] = True
        finally:
            # Also after a failure: a grant lasts as long as we live.
            if granted:
                committed = self._storing.commit([keys[index] for index in granted], generations, written)
                for index, outcome in zip(granted, committed, strict=True):
                    stored[index] = outcome == Outcome.OK

    def _keys(self, names: Sequence[str]) -> list[BlockKey]:
        return engine_keys(self._root, [_hash(name) for name in names])

    def _is_resting(self) -> bool:
        return self._clock() < self._rests_until

    def _failed(self, what: str, error: KVStoreError) -> None:
        """The daemon is gone, silent, or refuses: a miss, and a rest, so that not every request waits for it."""
        now = self._clock()
        self._rests_until = now + self._settings.rest_s
        self.counts.add(f"failed_{what}")
        if now >= self._next_warning:
            self._next_warning = now + _WARN_EVERY_S
            _log.warning("the KV store does not answer, SGLang goes on without it: %s", error)


def _hash(name: str) -> bytes:
    """SGLang's names are SHA-256 in hex; whatever else comes is hashed.

    The first 8 bytes come last, for by these SGLang's own KV events call the page, and by the last of a key ours do.
    """
    value = bytes.fromhex(name) if _SHA256_HEX.fullmatch(name) else hashlib.sha256(name.encode()).digest()
    return value[NAME_BYTES:] + value[:NAME_BYTES]
