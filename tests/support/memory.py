"""A tier and a record store in memory, with a capacity, for tests of what stands above them."""

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvstore.core.block import BlockMeta
from kvstore.core.errors import TierUnavailable
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome, TierKind
from tests.support.batches import batches_of
from tiers.base import Record, RecoveredBatch, Tier, Usage
from tiers.inventory import BlockPage, ListedRecord, RecordPage


class MemoryTier:
    """Implements `tiers.base.Tier`. What it holds survives being wrapped anew, as a disk survives a restart."""

    def __init__(self, kind: TierKind, capacity_bytes: int | None = None) -> None:
        self.kind = kind
        self.capacity_bytes = capacity_bytes
        self.blocks: dict[BlockKey, tuple[BlockMeta, bytes]] = {}
        self.modified_s: dict[BlockKey, float] = {}
        self.most_bytes = 0
        self.trouble = ""  # what a tier says of itself, as `tiers.s3.S3Tier.trouble`

    def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return [Outcome.OK if key in self.blocks else Outcome.MISS for key in keys]

    def read(self, blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> list[Outcome]:
        return [self._read(meta, view) for meta, view in zip(blocks, into, strict=True)]

    def write(self, blocks: Sequence[BlockMeta], payloads: Sequence[memoryview]) -> list[Outcome]:
        return [self._write(meta, view) for meta, view in zip(blocks, payloads, strict=True)]

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return [Outcome.MISS if self.blocks.pop(key, None) is None else Outcome.OK for key in keys]

    def usage(self) -> Usage:
        return Usage(len(self.blocks), self._used_bytes(), self.capacity_bytes)

    def recover_batches(self) -> Iterator[RecoveredBatch]:
        return batches_of([meta for meta, _ in self.blocks.values()])

    def close(self) -> None:
        pass

    def _used_bytes(self) -> int:
        return sum(meta.payload_bytes for meta, _ in self.blocks.values())

    def _read(self, meta: BlockMeta, view: memoryview) -> Outcome:
        found = self.blocks.get(meta.key)
        if found is None:
            return Outcome.MISS
        if found[0] != meta:
            del self.blocks[meta.key]
            return Outcome.CORRUPT
        view[:] = found[1]
        return Outcome.OK

    def _write(self, meta: BlockMeta, view: memoryview) -> Outcome:
        if meta.key in self.blocks:
            return Outcome.EXISTS
        if self.capacity_bytes is not None and self._used_bytes() + meta.payload_bytes > self.capacity_bytes:
            return Outcome.FULL
        self.blocks[meta.key] = (meta, bytes(view))
        self.most_bytes = max(self.most_bytes, self._used_bytes())
        return Outcome.OK


class MemoryInventory:
    """An `Inventory` of both. A block, or the write of a record, dates from its first listing."""

    def __init__(self, tier: Tier, records: "MemoryRecords", clock: Callable[[], float], page_blocks: int = 3) -> None:
        self._tier = tier
        self._records = records
        self._clock = clock
        self._page_blocks = page_blocks
        self.uploads: list[float] = []
        self.num_requests = 0

    def blocks(self, following: str | None = None) -> BlockPage:
        self.num_requests += 1
        self._records.check()
        blocks, modified_s = _of_bucket(self._tier)
        start = int(following or 0)
        keys = sorted(blocks)[start : start + self._page_blocks]
        return BlockPage(
            b"".join(keys),
            np.array([blocks[key][0].payload_bytes for key in keys], dtype=np.int64),
            np.array([modified_s.setdefault(key, self._clock()) for key in keys], dtype=np.float64),
            str(start + self._page_blocks) if start + self._page_blocks < len(blocks) else None,
        )

    def records(self, prefix: str, following: str | None = None) -> RecordPage:
        self.num_requests += 1
        etags = {name: self._records.records[name].etag for name in self._records.names(prefix)}
        times = self._records.modified_s
        found = [ListedRecord(name, etag, times.setdefault(etag, self._clock())) for name, etag in etags.items()]
        start = int(following or 0)
        return RecordPage(found[start : start + 2], str(start + 2) if start + 2 < len(found) else None)

    def abort_uploads(self, begun_before_s: float) -> int:
        self._records.check()
        left = [begun_s for begun_s in self.uploads if begun_s >= begun_before_s]
        aborted, self.uploads = len(self.uploads) - len(left), left
        return aborted

    def delete_blocks(self, keys: Sequence[BlockKey]) -> int:
        self.num_requests += 1
        self._records.check()
        return sum(outcome == Outcome.UNAVAILABLE for outcome in self._tier.delete(keys))


def _of_bucket(tier: Tier) -> tuple[dict[BlockKey, tuple[BlockMeta, bytes]], dict[BlockKey, float]]:
    while not isinstance(tier, MemoryTier):
        tier = tier._inner  # type: ignore[attr-defined]
    return tier.blocks, tier.modified_s


class MemoryRecords:
    """Implements `tiers.base.RecordStore`. With `is_down` every call raises TierUnavailable."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.modified_s: dict[str, float] = {}
        self.is_down = False
        self._counter = 0
        self._lock = threading.Lock()

    def put(self, name: str, data: bytes, *, if_match: str | None = None, if_absent: bool = False) -> str | None:
        self.check()
        with self._lock:
            present = self.records.get(name)
            if if_absent and present is not None:
                return None
            if if_match is not None and (present is None or present.etag != if_match):
                return None
            self._counter += 1
            self.records[name] = Record(data, f"etag-{self._counter}")
            return self.records[name].etag

    def get(self, name: str) -> Record | None:
        self.check()
        return self.records.get(name)

    def names(self, prefix: str) -> Iterator[str]:
        self.check()
        return iter(sorted(name for name in self.records if name.startswith(prefix)))

    def delete(self, name: str) -> bool:
        self.check()
        return self.records.pop(name, None) is not None

    def check(self) -> None:
        if self.is_down:
            raise TierUnavailable("down")
