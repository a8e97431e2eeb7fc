"""A tier that stores nothing: the least that keeps the contract of tiers, for tests."""

from collections.abc import Iterator, Sequence

from kvstore.core.block import BlockMeta
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome, TierKind
from tiers.base import RecoveredBatch, Usage
from tiers.batch import check_lengths


class NoopTier:
    """Implements `tiers.base.Tier`: every read misses, every write answers FULL. Thread-safe."""

    def __init__(self, kind: TierKind) -> None:
        self._kind = kind

    @property
    def kind(self) -> TierKind:
        return self._kind

    def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return [Outcome.MISS] * len(keys)

    def read(self, blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> list[Outcome]:
        check_lengths(blocks, into)
        return [Outcome.MISS] * len(blocks)

    def write(self, blocks: Sequence[BlockMeta], payloads: Sequence[memoryview]) -> list[Outcome]:
        check_lengths(blocks, payloads)
        return [Outcome.FULL] * len(blocks)

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        return [Outcome.MISS] * len(keys)

    def usage(self) -> Usage:
        return Usage(0, 0, 0)

    def recover_batches(self) -> Iterator[RecoveredBatch]:
        return iter(())

    def faults(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Nothing was opened."""
