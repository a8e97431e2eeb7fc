"""Replays a trace as engines bring it: prompts come in pieces, those of several requests in turns.

As policies/replay.py, but of the requests that are under way, `concurrent` at most, each does one piece of at most
`piece_blocks` blocks in its turn: first what hits is fetched, then what is new is stored, then the next one begins.
What hits was looked up before the first piece and stays until it is fetched. A piece that another request has stored
meanwhile is passed over; once the block before a piece is gone, the rest of the prompt is not stored.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from policies.base import EvictionPolicy, Ids
from policies.eviction.belady import NOT_AGAIN
from policies.replay import Accesses, MakePolicy, Replayed, ReplayTier


@dataclass(slots=True)
class _Running:
    blocks: Ids  # no more of the prompt than fits into the tier
    hits: int
    done: int = 0  # so many of them were fetched or stored


def replay_in_pieces(
    accesses: Accesses, capacity_blocks: int, make_policy: MakePolicy, piece_blocks: int, concurrent: int
) -> Replayed:
    """Replay all requests with room for `capacity_blocks`. `piece_blocks` and `concurrent` are at least 1."""
    tier = ReplayTier(accesses.parents)
    # The future is not told apart by pieces, so this is nothing for Belady.
    needed: npt.NDArray[np.int64] = np.full(accesses.num_blocks, NOT_AGAIN, dtype=np.int64)
    policy = make_policy(tier, needed)
    running: deque[_Running] = deque()
    hit_tokens = hit_blocks = inserted = evicted = 0
    request = 0
    while running or request < len(accesses.prompt_tokens):
        if len(running) < concurrent and request < len(accesses.prompt_tokens):
            blocks = accesses.of(request)
            tier.now_s = accesses.arrivals_s[request]
            is_resident = tier.resident[blocks]
            hits = len(blocks) if is_resident.all() else int(is_resident.argmin())
            hit_blocks += hits
            hit_tokens += min(accesses.prompt_tokens[request], hits * accesses.block_tokens)
            request += 1
            if hits < len(blocks):
                policy.on_request(tier.names_of(blocks[:capacity_blocks]), hits)
            if hits:
                tier.pin(int(blocks[hits - 1]))
            # In front: its first piece is next.
            running.appendleft(_Running(blocks[: max(hits, capacity_blocks)], hits))
        one = running.popleft()
        if one.done < one.hits:
            piece = one.blocks[one.done : min(one.done + piece_blocks, one.hits)]
            policy.on_access(piece)
            one.done += len(piece)
            if one.done == one.hits:
                tier.unpin(int(piece[-1]))
        else:
            piece = one.blocks[one.done : one.done + piece_blocks]
            one.done += len(piece)
            parent = tier.parent(int(piece[0])) if len(piece) else -1
            if parent >= 0 and not tier.resident[parent]:
                one.done = len(one.blocks)
            else:
                inserted += _store(tier, policy, piece)
        evicted += _make_room(tier, policy, capacity_blocks)
        if one.done < len(one.blocks):
            running.append(one)
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


def _store(tier: ReplayTier, policy: EvictionPolicy, piece: Ids) -> int:
    """Return how many of the blocks were not there."""
    new = piece[~tier.resident[piece]]
    if len(new):
        tier.add(new)
        policy.on_insert(new)
    return len(new)


def _make_room(tier: ReplayTier, policy: EvictionPolicy, capacity_blocks: int) -> int:
    """Evict what is too much, or where too much is pinned as much of it as there is; return how many blocks."""
    too_many = tier.num_resident - capacity_blocks
    while too_many > 0:
        victims = policy.victims(too_many)
        if victims:
            policy.on_remove_many(victims)
            tier.drop(np.array(victims, dtype=np.int32))
            return len(victims)
        too_many //= 2
    return 0
