"""What a quantised payload is: one byte per number, and one scale for every few numbers of a head.

Covers: names, sizes and constants that the kernels, the CPU's copies and the oracle agree on. Needs torch alone.

The payload of one block holds all its codes, then all its scales, so that it needs nothing else to be read:

    codes   [num_layers, 2, block_tokens, num_kv_heads, head_dim] int8, or float8 e4m3, one byte each
    scales  [num_layers, 2, block_tokens, num_kv_heads, groups] bfloat16
    number = code * scale of its group, then rounded to the pool's dtype

A group is 32 numbers of one head of one token (as in llama.cpp's Q8_0), or the nearest smaller count that divides
head_dim. Chosen by measurement on SmolLM2-135M, mean KL divergence of the next token behind 768 quantised tokens:

    int8, one scale per head and token       9.6e-5 at 8.25 bits per number
    int8, one scale per 32 numbers           4.7e-5 at 8.5
    int8, K by channel over 16 tokens        5.6e-5 at 8.6 (V by head); over 256 tokens 1.1e-4
    float8 e4m3, one scale per head          8.6e-4 at 8.25; without any scale 1.4e-3 at 8

A scale by channel would also tie a token's bytes to its neighbours'. A scale is rounded to bfloat16 before codes are
made with it, so that rounding it costs nothing, and has the range of float32: no K or V over- or underflows it. The
largest number of a group gets the largest code, whence dequantised float32 is quantised to the same bytes again.

A group that holds infinity or NaN has a scale of NaN and comes back as NaN: such a fault stays visible.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

QuantizedDtype = Literal["int8", "fp8"]
QUANTIZED_DTYPES: tuple[QuantizedDtype, ...] = get_args(QuantizedDtype)
POOL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

LARGEST_CODE: dict[QuantizedDtype, float] = {"int8": 127.0, "fp8": 448.0}
# Groups smaller than this get this scale's codes, which are 0: 2^-100 leaves no scale subnormal, and is no KV.
LEAST_MAGNITUDE = 2.0**-100
SCALE_BYTES = 2
_GROUP_NUMBERS = 32
_LEAST_GROUP_NUMBERS = 8


@dataclass(frozen=True, slots=True)
class QuantizedLayout:
    """Sizes of one block's payload; `block_tokens` are those of the block, not of a pool block."""

    num_layers: int
    block_tokens: int
    num_kv_heads: int
    head_dim: int

    @property
    def group_numbers(self) -> int:
        """How many numbers share a scale."""
        return group_numbers(self.head_dim)

    @property
    def groups_per_head(self) -> int:
        return self.head_dim // self.group_numbers

    @property
    def code_bytes(self) -> int:
        """Codes come first; their count is even, so that scales are aligned."""
        return self.num_layers * 2 * self.block_tokens * self.num_kv_heads * self.head_dim

    @property
    def payload_bytes(self) -> int:
        return self.code_bytes // self.group_numbers * (self.group_numbers + SCALE_BYTES)


def quantized_layout(pool: torch.Tensor, pool_blocks_per_block: int) -> QuantizedLayout:
    """Return how blocks of `[blocks, num_layers, 2, pool_block_tokens, num_kv_heads, head_dim]` are quantised.

    Raises ValueError for a pool that holds something else than float32, bfloat16 or float16.
    """
    if pool.dtype not in POOL_DTYPES:
        raise ValueError(f"a pool of {str(pool.dtype).removeprefix('torch.')} cannot be quantised")
    _, num_layers, _, tokens, heads, head_dim = pool.shape
    return QuantizedLayout(num_layers, tokens * pool_blocks_per_block, heads, head_dim)


def quantized_dtype(name: str) -> QuantizedDtype | None:
    """Return what blocks of an option's name are stored as; None for "auto", as they are. Raises ValueError for another
    name, which names those there are."""
    for known in QUANTIZED_DTYPES:
        if name == known:
            return known
    if name == "auto":
        return None
    raise ValueError(f"{name!r} is not one of auto, {', '.join(QUANTIZED_DTYPES)}")


def payload_bytes_of(pool: torch.Tensor, pool_blocks_per_block: int, store_dtype: QuantizedDtype | None) -> int:
    """Return the size of one block's payload. Raises ValueError as `quantized_layout`."""
    if store_dtype is None:
        return pool[0].nbytes * pool_blocks_per_block
    return quantized_layout(pool, pool_blocks_per_block).payload_bytes


def group_numbers(head_dim: int) -> int:
    """Return how many of a head's numbers share a scale: a divisor of head_dim."""
    for count in range(min(_GROUP_NUMBERS, head_dim), _LEAST_GROUP_NUMBERS - 1, -1):
        if head_dim % count == 0:
            return count
    return head_dim
