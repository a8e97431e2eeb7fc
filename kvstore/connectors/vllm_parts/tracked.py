"""What the scheduler's side remembers of one request of vLLM's."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kvstore.connectors.vllm_parts.consult import Inquiry
from kvstore.connectors.vllm_parts.orders import StoreOrder
from kvstore.connectors.vllm_parts.wishes import Wishes
from kvstore.core.outcome import TierKind
from policies.decision import Decision


class Request(Protocol):
    """The part of `vllm.v1.request.Request` that is used."""

    request_id: str
    block_hashes: Sequence[bytes]
    num_computed_tokens: int
    num_preemptions: int
    num_prompt_tokens: int
    skip_reading_prefix_cache: bool
    kv_transfer_params: Any
    all_token_ids: Sequence[int]

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Match:
    """What was decided about a prompt: after `num_local` blocks that vLLM has, the blocks in `tiers` are loaded."""

    num_local: int
    tiers: tuple[TierKind, ...]
    decided_s: float
    plan: str
    decision: Decision | None = None


@dataclass(eq=False, slots=True)
class Tracked:
    """Block numbers count from the prompt's first. `adapter` as in `Adapters.digest_of`.

    `waiting_s`: since when the request has had its turn and waits for its inquiry's answer. `next_store` is the first
    block that has not been offered, `retry_s` when what was left out may be offered again. `outstanding` counts offered
    blocks of all ranks that are not settled. `num_loading` ranks have not ended the last load, which until `load_end_s`
    brought as many blocks as `loaded` counts; of its blocks those from `failed_from` on are of no use.
    """

    request: Request
    wishes: Wishes
    arrival_s: float
    adapter: bytes | None = b""
    inquiry: Inquiry | None = None
    waiting_s: float | None = None
    num_inquiries: int = 0
    match: Match | None = None
    num_cached: int = 0
    is_counted: bool = False
    may_load: bool = True
    may_store: bool = True
    num_preemptions: int = 0
    num_loading: int = 0
    block_ids: list[int] = field(default_factory=list)
    next_store: int = 0
    retry_s: float = 0.0
    outstanding: int = 0
    first_load: int = 0
    local_tokens: int = 0
    loaded: dict[TierKind, int] = field(default_factory=dict)
    load_end_s: float | None = None
    failed_from: int | None = None
    first_output_s: float | None = None
    plan: str = "prefill"
    why: str = ""

    @property
    def is_loading(self) -> bool:
        return self.num_loading > 0

    def begin_again(self, num_preemptions: int) -> None:
        """vLLM has taken all blocks of the request back, and asks anew."""
        self.num_preemptions = num_preemptions
        self.inquiry, self.match, self.num_inquiries = None, None, 0
        self.may_load = self.may_store = True
        self.num_cached, self.is_counted = 0, False
        # What it offered before may not have been stored; what was is not stored twice.
        self.block_ids, self.next_store = [], 0
        self.loaded, self.load_end_s, self.failed_from = {}, None, None

    def hashes(self, per_block: int) -> Sequence[bytes]:
        """vLLM's hash of each full block of known tokens, of which each spans `per_block` of its hashes."""
        hashes = self.request.block_hashes
        return hashes if per_block == 1 else hashes[per_block - 1 :: per_block]

    @property
    def is_plain(self) -> bool:
        """Whether token ids and the model alone make the blocks what they are."""
        request: Any = self.request
        others = ("lora_request", "mm_features", "cache_salt", "prompt_embeds")
        return all(getattr(request, name, None) in (None, "", []) for name in others)

    def store_order(self, hashes: Sequence[bytes], end: int, told_tokens: int = 0) -> StoreOrder | None:
        """Return the order for the blocks up to `end` that were not offered yet, and take them for offered. With
        `told_tokens`, how many a block has, their token ids are in it."""
        start = self.next_store
        end = min(end, len(hashes), len(self.block_ids))
        if end <= start:
            return None
        self.next_store = end
        tokens = b""
        with contextlib.suppress(ValueError, OverflowError):  # no token ids at all; nothing of vLLM's hangs on this
            told = self.request.all_token_ids[start * told_tokens : end * told_tokens]
            tokens = np.array(told, dtype="<u4").tobytes()
        return StoreOrder(
            self.request.request_id,
            tuple(hashes[start:end]),
            tuple(self.block_ids[start:end]),
            hashes[start - 1] if start else None,
            start,
            tokens,
        )
