"""The interface of every tier: a place that holds whole blocks by key.

Covers: bytes by key, one outcome per key. Does not cover: choosing victims, copying between tiers, leases,
deadlines of requests; those belong to the store above.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.core.block import BlockMeta
from kvstore.core.key import KEY_BYTES, BlockKey, split_keys
from kvstore.core.outcome import Outcome, TierKind


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tier holds now. `used_bytes` is what it takes up physically, headers and slack included;
    `capacity_bytes` is None where the tier knows no limit of its own."""

    blocks: int
    used_bytes: int
    capacity_bytes: int | None


@dataclass(frozen=True, slots=True, eq=False)
class RecoveredBatch:
    """Some of the blocks a tier kept from before it was opened, in columns: a million objects would take a gigabyte.

    All have one namespace (its digest) and one payload size. `keys` and `parents` are joined, as long as each other;
    `depths` is [num_blocks] int32, and where it is 0 the parent is the namespace's root.
    """

    namespace: bytes
    payload_bytes: int
    keys: bytes
    parents: bytes
    depths: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.depths)

    def __post_init__(self) -> None:
        if not len(self.keys) == len(self.parents) == len(self.depths) * KEY_BYTES:
            raise ValueError("the columns of a batch differ in length")

    def metas(self) -> list[BlockMeta]:
        """Return the blocks one by one, for tools and tests."""
        columns = zip(split_keys(self.keys), split_keys(self.parents), self.depths.tolist(), strict=True)
        return [BlockMeta(key, parent, self.namespace, depth, self.payload_bytes) for key, parent, depth in columns]


class Tier(Protocol):
    """Holds blocks by key; every call is a batch and answers per key, `out[i]` for the i-th.

    A call blocks until the batch is done and may be made from any thread. An expected result is an Outcome;
    no call raises for a fault of the medium: that is UNAVAILABLE (nothing can be said) or CORRUPT (found, failed
    verification; the copy is quarantined, that is deleted and counted, so that the block can be stored again).
    """

    @property
    def kind(self) -> TierKind: ...

    def contains(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """OK, MISS or UNAVAILABLE per key; moves no payload."""
        ...

    def read(self, blocks: Sequence[BlockMeta], into: Sequence[memoryview]) -> list[Outcome]:
        """Copy the payload of `blocks[i]` into `into[i]`, a writable view of exactly payload_bytes bytes.

        OK, MISS, CORRUPT or UNAVAILABLE. Unless OK, the content of `into[i]` is undefined.
        """
        ...

    def write(self, blocks: Sequence[BlockMeta], payloads: Sequence[memoryview]) -> list[Outcome]:
        """Store `payloads[i]` as `blocks[i]`. On OK the copy is visible to `contains` and as durable as the tier gets.

        OK, EXISTS (an equal key was there; it is left alone), FULL (nothing was stored) or UNAVAILABLE.
        """
        ...

    def delete(self, keys: Sequence[BlockKey]) -> list[Outcome]:
        """Forget the blocks and free their room. OK, MISS or UNAVAILABLE."""
        ...

    def usage(self) -> Usage: ...

    def recover_batches(self) -> Iterator[RecoveredBatch]:
        """Yield what the tier holds from before it was opened, in batches of a few thousand blocks and in no particular
        order; reads no payloads."""
        ...

    def close(self) -> None:
        """Free everything that was opened; idempotent. What is durable stays."""
        ...


@dataclass(frozen=True, slots=True)
class Record:
    """A small named value with the tag of its present version."""

    data: bytes
    etag: str


class RecordStore(Protocol):
    """Small named values with compare-and-swap, for sessions and indexes; the SSD and S3 tiers have one each.

    Names are '/'-separated printable ASCII without '..'. Calls block, may be made from any thread, and
    raise TierUnavailable where the medium does not answer.
    """

    def put(self, name: str, data: bytes, *, if_match: str | None = None, if_absent: bool = False) -> str | None:
        """Write durably; return the new tag, or None if the condition did not hold (and then nothing was written)."""
        ...

    def get(self, name: str) -> Record | None:
        """Raises WrongKey where there is a record that cannot be read with our keys; it stays."""
        ...

    def names(self, prefix: str) -> Iterator[str]:
        """Yield the names that start with `prefix`, in order."""
        ...

    def delete(self, name: str) -> bool:
        """Return whether the name existed."""
        ...
