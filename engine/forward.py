"""One pass of a transformers model over several sequences packed flat, with K and V in the paged pool."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, Cache, PreTrainedModel

from engine.attention import ATTENTION_NAME, PagedBatch, SequenceSlice, paged_attention

AttentionInterface.register(ATTENTION_NAME, paged_attention)


class PoolCache(Cache):
    """The cache a transformers model writes to: it puts K (after RoPE) and V of the step into the pool.

    It hands back the step's own K and V; the attention function collects the cached ones itself. `layers_written`
    names the layers that wrote, so that a model with layers that keep no KV is found out.
    """

    def __init__(self, batch: PagedBatch) -> None:
        super().__init__(layers=[])
        self._batch = batch
        self.layers_written: list[int] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._batch.write(layer_idx, key_states, value_states)
        self.layers_written.append(layer_idx)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        # The packed sequences differ in length; positions are always given explicitly.
        return 0


def packed_forward(
    model: PreTrainedModel, slices: Sequence[SequenceSlice], pool: torch.Tensor
) -> tuple[torch.Tensor, list[int]]:
    """Compute the slices' tokens, leave their K and V in the pool, and return the logits of each slice's last token,
    `[len(slices), vocab]` float32, and the layers that wrote to the pool. A slice that wants no logits has a NaN row.

    The slices are taken as valid: `Model.forward` checks them.
    """
    batch = PagedBatch(slices, pool)
    wanting = [i for i, piece in enumerate(slices) if piece.wants_logits]
    last_rows = batch.last_rows()
    rows = [last_rows[i] for i in wanting]
    flat = [token for piece in slices for token in piece.token_ids]
    cache = PoolCache(batch)
    arguments: dict[str, Any] = {
        "input_ids": torch.tensor([flat], dtype=torch.int64, device=pool.device),
        "position_ids": batch.positions.unsqueeze(0),
        "cache": cache,
        "use_cache": True,
        "logits_to_keep": torch.tensor(rows, dtype=torch.int64, device=pool.device),
        "paged_batch": batch,
    }
    with torch.inference_mode():
        logits = model(**arguments).logits[0].float()
        if len(wanting) < len(slices):
            every = logits.new_full((len(slices), logits.shape[1]), float("nan"))
            every[wanting] = logits
            logits = every
    return logits, cache.layers_written
