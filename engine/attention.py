"""Attention of one packed step over the paged pool, in plain torch, and the K and V that the step adds to it.

Covers: where each token of a step lies in the pool, writing its K and V there, and causal attention of every
sequence over its own cached prefix and itself. Does not cover: choosing pool blocks, running the model.

The pool is `[num_pool_blocks, num_layers, 2, pool_block_tokens, num_kv_heads, head_dim]`. Seen flat, as rows of one
K or V part of one layer of one block, block b's part p (0: K, 1: V) of layer l is row

    (b * num_layers + l) * 2 + p

so that one index_select per layer collects K and V of every sequence: 14 GB/s on the two cores of the reference
machine, a third of what attending to them costs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from kvstore.core.errors import ConfigError

ATTENTION_NAME = "kvstore_paged"
_KEY, _VALUE = 0, 1
# What some models hand to their attention beside Q, K and V; leaving it out would change their output.
_UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias")


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The tokens of one sequence that one step computes.

    `start` tokens before them have their K and V in the pool already. `block_table[i]` is the pool block of the
    sequence's tokens [i * pool_block_tokens, (i + 1) * pool_block_tokens); it covers start + len(token_ids) tokens.
    `wants_logits` is False for a chunk whose sequence goes on in a later step: its logits would be thrown away, and
    on the reference machine they cost 4% of a prefill in chunks of 256.
    `before_layer` is called with each layer before what is cached of it is read: it may still be on its way.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    wants_logits: bool = True
    before_layer: Callable[[int], None] | None = None


@dataclass(frozen=True, slots=True)
class _Span:
    """One slice in the packed step: rows [first, end) of Q; its K and V are rows [gathered, gathered + length) of
    what is collected from the pool, or, for a slice that starts its sequence, the step's own rows."""

    first: int
    end: int
    start: int
    gathered: int
    causal_bias: Any

    @property
    def length(self) -> int:
        return self.start + self.end - self.first


class PagedBatch:
    """The slices of one step, packed flat in order, and their places in the pool. Serves one pass of the model."""

    def __init__(self, slices: Sequence[SequenceSlice], pool: torch.Tensor) -> None:
        _, num_layers, _, block_tokens, num_kv_heads, head_dim = pool.shape
        self._rows_per_block = num_layers * 2
        self._block_tokens = block_tokens
        self._heads = (num_kv_heads, head_dim)
        self._part_rows = pool.view(-1, block_tokens * num_kv_heads * head_dim)
        self._token_rows = pool.view(-1, num_kv_heads * head_dim)
        self._before_layer = [piece.before_layer for piece in slices if piece.before_layer is not None]
        self._lay_out(slices, pool)

    def _lay_out(self, slices: Sequence[SequenceSlice], pool: torch.Tensor) -> None:
        positions: list[np.ndarray[Any, Any]] = []
        write_rows: list[np.ndarray[Any, Any]] = []
        read_blocks: list[np.ndarray[Any, Any]] = []
        self._spans: list[_Span] = []
        first = gathered = 0
        for piece in slices:
            count = len(piece.token_ids)
            position = np.arange(piece.start, piece.start + count)
            table = np.asarray(piece.block_table, dtype=np.int64)
            part_row = table[position // self._block_tokens] * self._rows_per_block
            positions.append(position)
            write_rows.append(part_row * self._block_tokens + position % self._block_tokens)
            bias = None
            if piece.start and count > 1:
                bias = _causal_bias(count, piece.start + count, pool)
            self._spans.append(_Span(first, first + count, piece.start, gathered, bias))
            if piece.start:
                blocks = table[: -(-(piece.start + count) // self._block_tokens)]
                read_blocks.append(blocks * self._rows_per_block)
                gathered += len(blocks) * self._block_tokens
            first += count
        self.longest = max(span.length for span in self._spans)
        # One copy to the device for all indices of the step.
        parts = [np.concatenate(positions), np.concatenate(write_rows), *read_blocks]
        packed = torch.from_numpy(np.concatenate(parts)).to(pool.device)
        self.positions = packed[:first]
        self._write_rows = packed[first : 2 * first]
        read_keys = packed[2 * first :]
        self._read_rows = torch.cat([read_keys, read_keys + _VALUE])
        self._gathered = pool.new_empty(len(self._read_rows), self._part_rows.shape[1])

    @property
    def num_tokens(self) -> int:
        return self._spans[-1].end

    def last_rows(self) -> list[int]:
        """Return the packed row of each slice's last token."""
        return [span.end - 1 for span in self._spans]

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put the step's K and V, `[1, num_kv_heads, num_tokens, head_dim]` each, into their places in the pool."""
        shape = (1, self._heads[0], self.num_tokens, self._heads[1])
        if key.shape != shape or value.shape != shape:
            raise ConfigError(f"the model makes K {tuple(key.shape)} and V {tuple(value.shape)}, expected {shape}")
        for part, states in ((_KEY, key), (_VALUE, value)):
            rows = self._write_rows + (layer * 2 + part) * self._block_tokens
            self._token_rows.index_copy_(0, rows, states[0].transpose(0, 1).reshape(self.num_tokens, -1))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Return the attention output `[1, num_tokens, num_heads, head_dim]`; `write` of this layer came before.

        `query` is `[1, num_heads, num_tokens, head_dim]`, `key` and `value` are the step's own.
        """
        for wait in self._before_layer:
            wait(layer)
        cached_key, cached_value = self._collect(layer)
        outputs: list[torch.Tensor] = []
        for span in self._spans:
            own_query = query[:, :, span.first : span.end]
            if span.start:
                # Cut at the sequence's length: what lies behind it in its last block is nobody's.
                keys = cached_key[:, :, span.gathered : span.gathered + span.length]
                values = cached_value[:, :, span.gathered : span.gathered + span.length]
            else:
                keys = key[:, :, span.first : span.end]
                values = value[:, :, span.first : span.end]
            outputs.append(_attend_one(own_query, keys, values, span.causal_bias, scaling).transpose(1, 2))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _collect(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of all cached prefixes, own tokens included, `[1, num_kv_heads, tokens, head_dim]` each."""
        torch.index_select(self._part_rows, 0, self._read_rows + layer * 2, out=self._gathered)
        parts = self._gathered.view(1, 2, -1, *self._heads)
        return parts[:, _KEY].transpose(1, 2), parts[:, _VALUE].transpose(1, 2)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    paged_batch: PagedBatch | None = None,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls in every attention layer, registered under ATTENTION_NAME.

    Raises ConfigError where the layer asks for something other than full causal softmax attention.
    """
    if paged_batch is None or attention_mask is not None:
        raise ConfigError(f"{type(module).__name__} does not pass the packed batch on to its attention")
    if sliding_window is not None and sliding_window < paged_batch.longest:
        raise ConfigError(f"{type(module).__name__} attends to a sliding window of {sliding_window} tokens")
    for name in _UNSUPPORTED_ARGUMENTS:
        if others.get(name) is not None:
            raise ConfigError(f"{type(module).__name__} needs {name}, which this attention does not know")
    layer = module.layer_idx
    assert isinstance(layer, int)
    return paged_batch.attend(layer, query, key, value, scaling), None


def _attend_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal_bias: Any, scaling: float | None
) -> torch.Tensor:
    """Attention of one sequence's new tokens, `[1, num_heads, count, head_dim]`, over all its tokens so far."""
    _, num_heads, count, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if count == 1:
        # One token sees everything: the heads that share K and V become rows of one product, no mask, no copies.
        grouped = query.reshape(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = F.scaled_dot_product_attention(grouped, key, value, scale=scaling)
        return out.reshape(1, num_heads, 1, head_dim)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=causal_bias,
        is_causal=causal_bias is None,
        scale=scaling,
        enable_gqa=num_heads != num_kv_heads,
    )


def _causal_bias(count: int, length: int, like: torch.Tensor) -> Any:
    """Return what makes the last `count` of `length` tokens see all before them and themselves."""
    if like.device.type == "cuda":
        # Picks a kernel that knows this shape of mask, instead of reading one.
        return causal_lower_right(count, length)
    # In the dtype of Q: a boolean mask would be converted again in each layer.
    bias = torch.zeros(count, length, dtype=like.dtype, device=like.device)
    visible = torch.ones(count, length, dtype=torch.bool, device=like.device).tril_(length - count)
    return bias.masked_fill_(~visible, float("-inf"))
