"""Replays a trace of requests against one tier of blocks under an eviction policy, and counts what hits.

The rules:
- A block hits only if all blocks before it in the request hit.
- Only blocks of prompts are cached, and of each request at most the first `capacity_blocks`.
- A request's blocks are put in first, then room is made, where it lacks, for a thousandth of the tier more: its own may
  go, too, if the policy thinks least of them.
- The last block of a prompt counts the tokens it really holds.

Pure, and the same for the same trace, policy and capacity.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from policies.base import EvictionPolicy, Hint, Ids, Names
from policies.eviction.belady import NOT_AGAIN
from policies.trace import Trace


@dataclass(frozen=True, slots=True)
class Accesses:
    """A trace as columns. Blocks go by dense ids in order of first appearance, so a parent's id is below its child's.

    Request i needs blocks[starts[i] : starts[i + 1]], in prefix order.
    """

    block_tokens: int
    arrivals_s: Sequence[float]
    prompt_tokens: Sequence[int]
    starts: npt.NDArray[np.int64]
    blocks: Ids
    parents: Ids

    @property
    def num_blocks(self) -> int:
        """How many different blocks there are."""
        return len(self.parents)

    def of(self, request: int) -> Ids:
        return self.blocks[self.starts[request] : self.starts[request + 1]]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay counted, over all requests from the first on."""

    capacity_blocks: int
    num_requests: int
    num_accesses: int
    input_tokens: int
    hit_tokens: int
    hit_blocks: int
    inserted_blocks: int
    evicted_blocks: int

    @property
    def token_hit_ratio(self) -> float:
        return self.hit_tokens / self.input_tokens


class ReplayTier:
    """An EvictableView of one tier in which every block has one byte."""

    def __init__(self, parents: Ids) -> None:
        self._parents = parents
        self.resident = np.zeros(len(parents), dtype=np.bool_)
        self._children: Ids = np.zeros(len(parents), dtype=np.int32)
        self.num_resident = 0
        self.now_s = 0.0
        self._pins: Counter[int] = Counter()

    def clock(self) -> float:
        return self.now_s

    def pinned(self, block: int) -> bool:
        return block in self._pins

    def children(self, block: int) -> int:
        return int(self._children[block])

    def parent(self, block: int) -> int:
        return int(self._parents[block])

    def children_of(self, blocks: Ids) -> Ids:
        return self._children[blocks]

    def parents_of(self, blocks: Ids) -> Ids:
        return self._parents[blocks]

    def name(self, block: int) -> int:
        return block

    def names_of(self, blocks: Ids) -> Names:
        return blocks.astype(np.uint64)

    def size_bytes(self, block: int) -> int:
        return 1

    def add(self, blocks: Ids) -> None:
        """Blocks of one prefix, so each has another parent."""
        self.resident[blocks] = True
        parents = self._parents[blocks]
        self._children[parents[parents >= 0]] += 1
        self.num_resident += len(blocks)

    def pin(self, block: int) -> None:
        self._pins[block] += 1

    def unpin(self, block: int) -> None:
        self._pins[block] -= 1
        if not self._pins[block]:
            del self._pins[block]

    def drop(self, blocks: Ids) -> None:
        self.resident[blocks] = False
        parents = self._parents[blocks]
        np.subtract.at(self._children, parents[parents >= 0], 1)
        assert not self._children[blocks].any(), "a block was evicted before what continues it"
        self.num_resident -= len(blocks)


# When a tier is full this part of it is made free, as the daemon evicts in batches too. That costs half a per mille of
# the capacity on average, and takes a fifth less time.
_SPARE: Final = 1_024

# Makes a policy for a view; the array says for each block which request needs it next (policies/eviction/belady.py).
MakePolicy = Callable[[ReplayTier, npt.NDArray[np.int64]], EvictionPolicy]


def accesses_of(trace: Trace) -> Accesses:
    """Return the trace's columns. A number that follows two different prefixes is two blocks: a block's identity
    includes all that is before it."""
    ids: dict[tuple[int, int], int] = {}
    parents: list[int] = []
    blocks: list[int] = []
    starts = [0]
    for request in trace.requests:
        parent = -1
        for number in request.hash_ids:
            block = ids.setdefault((parent, number), len(parents))
            if block == len(parents):
                parents.append(parent)
            blocks.append(block)
            parent = block
        starts.append(len(blocks))
    return Accesses(
        trace.block_tokens,
        [request.arrival_s for request in trace.requests],
        [request.prompt_tokens for request in trace.requests],
        np.array(starts, dtype=np.int64),
        np.array(blocks, dtype=np.int32),
        np.array(parents, dtype=np.int32),
    )


def replay(
    accesses: Accesses, capacity_blocks: int, make_policy: MakePolicy, *, tells_returns: bool = False
) -> Replayed:
    """Replay all requests with room for `capacity_blocks`. A capacity of zero hits nothing.

    `tells_returns`: as a client's hints would, the policy is told of each request whether its session returns, from the
    trace's future, and nothing else: whether a later request continues all of it but its last, maybe partial block.
    """
    tier = ReplayTier(accesses.parents)
    needed: npt.NDArray[np.int64] = np.full(accesses.num_blocks, NOT_AGAIN, dtype=np.int64)
    next_needed = _next_needed(accesses)
    policy = make_policy(tier, needed)
    hit_tokens = hit_blocks = inserted = evicted = 0
    for request, prompt_tokens in enumerate(accesses.prompt_tokens):
        start, end = int(accesses.starts[request]), int(accesses.starts[request + 1])
        blocks = accesses.blocks[start:end]
        tier.now_s = accesses.arrivals_s[request]
        needed[blocks] = next_needed[start:end]
        is_resident = tier.resident[blocks]
        hits = len(blocks) if np.count_nonzero(is_resident) == len(blocks) else int(is_resident.argmin())
        hit_blocks += hits
        hit_tokens += min(prompt_tokens, hits * accesses.block_tokens)
        if hits:
            policy.on_access(blocks[:hits])
        new = blocks[hits:capacity_blocks]
        if len(new):
            tier.add(new)
            policy.on_insert(new)
            inserted += len(new)
        if tells_returns:
            returns = bool(next_needed[max(start, end - 2)] != NOT_AGAIN)
            policy.on_hint(blocks[: hits + len(new)], Hint(returns=returns))
        too_many = tier.num_resident - capacity_blocks
        if too_many > 0:
            wanted = too_many + capacity_blocks // _SPARE
            victims = policy.victims(wanted)
            assert len(victims) == wanted, "the policy found no room, though nothing is pinned"
            policy.on_remove_many(victims)
            tier.drop(np.array(victims, dtype=np.int32))
            evicted += len(victims)
    return Replayed(
        capacity_blocks,
        len(accesses.prompt_tokens),
        len(accesses.blocks),
        sum(accesses.prompt_tokens),
        hit_tokens,
        hit_blocks,
        inserted,
        evicted,
    )


def infinite_hit_ratio(accesses: Accesses) -> float:
    """Return the token hit ratio of a tier that never evicts: of each request a leading part was there before."""
    newest = np.maximum.accumulate(accesses.blocks)
    was_there = np.concatenate([[False], accesses.blocks[1:] <= newest[:-1]])
    hits = np.add.reduceat(was_there, accesses.starts[:-1], dtype=np.int64)
    prompts = np.array(accesses.prompt_tokens, dtype=np.int64)
    return float(np.minimum(prompts, hits * accesses.block_tokens).sum() / prompts.sum())


def _next_needed(accesses: Accesses) -> npt.NDArray[np.int64]:
    """Return for each access which request, counted from 1, needs the same block next, or NOT_AGAIN."""
    numbers = np.repeat(np.arange(1, len(accesses.starts), dtype=np.int64), np.diff(accesses.starts))
    order = np.argsort(accesses.blocks, kind="stable")
    found = np.full(len(order), NOT_AGAIN, dtype=np.int64)
    again = accesses.blocks[order[1:]] == accesses.blocks[order[:-1]]
    found[order[:-1][again]] = numbers[order[1:][again]]
    return found
