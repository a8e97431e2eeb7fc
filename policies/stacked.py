"""Replays a trace against RAM and SSD together, as the daemon runs them: with an admission policy in front of the SSD.

The rules of replay.py, and:
- Both policies are told of a request before its blocks are used, as by a lookup.
- A block hits if either tier has it. What only the SSD has is brought into RAM and stays on the SSD.
- A request's new blocks enter RAM. Those that the SSD does not have, from RAM or new, are shown to the admission
  policy, which says how many of the first of them are written.
- A block that was refused and leaves RAM is gone.
"""

from dataclasses import dataclass

import numpy as np

from policies.admission import Admission
from policies.base import EvictionPolicy, Ids
from policies.replay import Accesses, MakePolicy, ReplayTier


@dataclass(frozen=True, slots=True)
class Stacked:
    """What a stacked replay counted. `ram_hit_tokens` are those whose prefix RAM had; writes are in blocks."""

    ram_blocks: int
    ssd_blocks: int
    num_requests: int
    num_accesses: int
    input_tokens: int
    hit_tokens: int
    ram_hit_tokens: int
    ram_writes: int
    ssd_writes: int
    ssd_refused: int

    @property
    def token_hit_ratio(self) -> float:
        return self.hit_tokens / self.input_tokens


class _Level:
    """One tier with its policy."""

    def __init__(self, accesses: Accesses, capacity_blocks: int, make_policy: MakePolicy) -> None:
        self.view = ReplayTier(accesses.parents)
        self.policy: EvictionPolicy = make_policy(self.view, np.zeros(accesses.num_blocks, dtype=np.int64))
        self.capacity_blocks = capacity_blocks
        self.writes = 0

    def use(self, blocks: Ids, at_s: float) -> None:
        self.view.now_s = at_s
        if len(blocks):
            self.policy.on_access(blocks)

    def put(self, blocks: Ids) -> list[int]:
        """Put in new blocks; return what had to go."""
        if not len(blocks):
            return []
        self.view.add(blocks)
        self.policy.on_insert(blocks)
        self.writes += len(blocks)
        too_many = self.view.num_resident - self.capacity_blocks
        victims = self.policy.victims(too_many) if too_many > 0 else []
        if victims:
            self.policy.on_remove_many(victims)
            self.view.drop(np.array(victims, dtype=np.int32))
        return victims


def replay_stacked(
    accesses: Accesses,
    ram_blocks: int,
    ssd_blocks: int,
    make_ram_policy: MakePolicy,
    make_ssd_policy: MakePolicy,
    admission: Admission,
    clock: "TraceClock",
) -> Stacked:
    """Replay all requests. `clock` is what the admission policy was made with."""
    ram, ssd = _Level(accesses, ram_blocks, make_ram_policy), _Level(accesses, ssd_blocks, make_ssd_policy)
    hit_tokens = ram_hit_tokens = refused = 0
    for request, prompt_tokens in enumerate(accesses.prompt_tokens):
        blocks = accesses.of(request)
        clock.now_s = accesses.arrivals_s[request]
        in_ram, on_ssd = ram.view.resident[blocks], ssd.view.resident[blocks]
        hits = _leading(in_ram | on_ssd)
        hit_tokens += min(prompt_tokens, hits * accesses.block_tokens)
        ram_hits = _leading(in_ram)
        ram_hit_tokens += min(prompt_tokens, ram_hits * accesses.block_tokens)
        ram.policy.on_request(ram.view.names_of(blocks), ram_hits)
        ssd.policy.on_request(ssd.view.names_of(blocks), hits)
        ram.use(blocks[:hits], clock.now_s)
        ssd.use(blocks[:hits], clock.now_s)
        admission.on_read(_names(blocks[:hits][on_ssd[:hits] & ~in_ram[:hits]]))
        prompt = admission.prompt(_names(blocks))
        usable = blocks[:ssd_blocks]
        lacking = usable[~ssd.view.resident[usable]]
        admitted = admission.admit(_names(lacking), prompt)
        refused += len(lacking) - admitted
        entering = blocks[:ram_blocks]
        ram.put(entering[~ram.view.resident[entering]])
        admission.on_evicted(_names(np.array(ssd.put(lacking[:admitted]), dtype=np.int32)))
    return Stacked(
        ram_blocks,
        ssd_blocks,
        len(accesses.prompt_tokens),
        len(accesses.blocks),
        sum(accesses.prompt_tokens),
        hit_tokens,
        ram_hit_tokens,
        ram.writes,
        ssd.writes,
        refused,
    )


class TraceClock:
    """The time of the request that is replayed."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _leading(is_there: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> int:
    return len(is_there) if is_there.all() else int(is_there.argmin())


def _names(blocks: Ids) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """As spread as keys are."""
    return (blocks.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD1342543DE82EF95)
