"""The operations that change a slow tier, in order of arrival, handed to several threads in batches.

Where the tier syncs per batch (SSD), two batches run side by side, so that one is written while the other's sync is
under way. What must stay in order does:

    one key, one name    never in two batches at once
    a write              not beside a delete that came before it, since that may be what makes room for it
"""

import threading
from collections import deque
from collections.abc import Iterable
from typing import Final

from kvstore.worker import ops

Change = ops.Write | ops.Delete | ops.RecordPut | ops.RecordDelete
_MAX_DELETES: Final = 1024


class Changes:
    """Thread-safe. `batch_bytes` 0: every batch is a single operation."""

    def __init__(self, batch_bytes: int) -> None:
        self._batch_bytes = batch_bytes
        self._changed = threading.Condition()
        self._waiting: deque[Change] = deque()
        self._under_way: set[bytes | str] = set()
        self._deletes_under_way = 0
        self._is_closed = False

    def put(self, operations: Iterable[Change]) -> None:
        """Add operations behind those that wait."""
        with self._changed:
            self._waiting.extend(operations)
            self._changed.notify_all()

    def take(self) -> list[Change]:
        """Return what may be done next, all of one kind; blocks until there is something. Call `done` afterwards.
        Empty once the queue was closed and nothing waits any more."""
        with self._changed:
            while not self._waiting or self._must_wait(self._waiting[0]):
                if self._is_closed and not self._waiting:
                    return []
                self._changed.wait()
            batch = [self._waiting.popleft()]
            taken_bytes = _payload_bytes(batch[0])
            while self._waiting and self._fits(batch, taken_bytes, self._waiting[0]):
                batch.append(self._waiting.popleft())
                taken_bytes += _payload_bytes(batch[-1])
            self._under_way.update(map(_identity, batch))
            self._deletes_under_way += isinstance(batch[0], ops.Delete)
            return batch

    def done(self, batch: list[Change]) -> None:
        """What `take` returned was carried out."""
        with self._changed:
            self._under_way.difference_update(map(_identity, batch))
            self._deletes_under_way -= isinstance(batch[0], ops.Delete)
            self._changed.notify_all()

    def close(self) -> None:
        """Let `take` come to an end, after everything that waits. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits; some may be under way."""
        return not self._waiting

    # ------------------------------------------------------------ helpers

    def _must_wait(self, op: Change) -> bool:
        behind_delete = self._batch_bytes > 0 and isinstance(op, ops.Write) and self._deletes_under_way > 0
        return behind_delete or _identity(op) in self._under_way

    def _fits(self, batch: list[Change], taken_bytes: int, op: Change) -> bool:
        if type(op) is not type(batch[0]) or self._must_wait(op):
            return False
        if isinstance(op, ops.Write):
            return taken_bytes < self._batch_bytes
        return isinstance(op, ops.Delete) and self._batch_bytes > 0 and len(batch) < _MAX_DELETES


def _identity(op: Change) -> bytes | str:
    match op:
        case ops.Write():
            return op.meta.key
        case ops.Delete():
            return op.key
        case _:
            return op.name


def _payload_bytes(op: Change) -> int:
    return op.meta.payload_bytes if isinstance(op, ops.Write) else 0
