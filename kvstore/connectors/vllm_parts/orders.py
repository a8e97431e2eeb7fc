"""What the scheduler's side orders of the workers in one step, and what they tell back.

Plain values, since vLLM carries them from one process to another. Blocks are named by vLLM's own hash: each worker
makes the keys of its own namespace from it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

_Tier = TypeVar("_Tier", bound=int)


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Fill pool block `block_ids[i]` with the block of `hashes[i]`, which was last seen in `tiers[i]` (a TierKind).
    `patience_s`: after so long what is missing has failed; `silence_s`: also after so long without a block. A load that
    is not `is_async` is over before the step."""

    request_id: str
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    tiers: tuple[int, ...]
    patience_s: float
    silence_s: float
    is_async: bool


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """Store pool block `block_ids[i]` as the block of `hashes[i]`, once this step has run. Block 0 of the order is the
    `depth`-th of its prefix and follows `parent`, None at its begin. `tokens` are the blocks' token ids as
    little-endian uint32, joined, where the daemon wants them for routers; else b""."""

    request_id: str
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    parent: bytes | None
    depth: int
    tokens: bytes = b""

    def tokens_of(self, start: int, end: int) -> bytes:
        """Return the token ids of blocks `start` to `end` of the order."""
        share = len(self.tokens) // len(self.hashes)
        return self.tokens[start * share : end * share]


@dataclass(frozen=True, slots=True)
class Step:
    """`written` are pool blocks that this step or a later one may overwrite. `held` are finished requests whose blocks
    are kept until the worker says that their stores are over. A step without tokens runs no model. `writes_anywhere`:
    what it writes is not known, so it may be any block."""

    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
    written: tuple[int, ...] = ()
    held: tuple[str, ...] = ()
    num_tokens: int = 0
    number: int = 0
    writes_anywhere: bool = False


@dataclass(slots=True)
class News:
    """What one or several workers have to tell since the last time.

    `settled` counts per request the blocks of its store orders that are done with, stored or not; `unstored` has the
    first depth of a request's blocks that was left out. `loads` are (tier, bytes, seconds) that were measured, and
    `silences` (tier, seconds). `num_ended` counts per request the ranks whose load is over, and `load_ends` has the
    blocks loaded by tier; `failed_from` has the first block of an order that did not come. `steps` are those that have
    run the model.
    """

    settled: dict[str, int] = field(default_factory=dict)
    unstored: dict[str, int] = field(default_factory=dict)
    loads: list[tuple[int, int, float]] = field(default_factory=list)
    silences: list[tuple[int, float]] = field(default_factory=list)
    num_ended: dict[str, int] = field(default_factory=dict)
    load_ends: dict[str, dict[int, int]] = field(default_factory=dict)
    failed_from: dict[str, int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)

    def is_empty(self) -> bool:
        return self == News()

    def add(self, others: "Iterable[News]") -> None:
        for other in others:
            for request, count in other.settled.items():
                self.settled[request] = self.settled.get(request, 0) + count
            for request, depth in other.unstored.items():
                self.unstored[request] = min(depth, self.unstored.get(request, depth))
            self.loads += other.loads
            self.silences += other.silences
            for request, count in other.num_ended.items():
                self.num_ended[request] = self.num_ended.get(request, 0) + count
            for request, tiers in other.load_ends.items():
                most_by_tier(self.load_ends.setdefault(request, {}), tiers)
            for request, index in other.failed_from.items():
                self.failed_from[request] = min(index, self.failed_from.get(request, index))
            self.steps += other.steps


def most_by_tier(mine: dict[_Tier, int], others: Mapping[_Tier, int]) -> None:
    """Take into `mine` what others say of the same load: each rank brings its part of the same blocks."""
    for tier, count in others.items():
        mine[tier] = max(count, mine.get(tier, 0))
