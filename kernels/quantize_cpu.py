"""Quantises blocks of a pool in host memory, and dequantises them; the bytes are those of `kernels.quantized`.

One thread per call, without the interpreter lock: pieces are so small that torch takes no second thread for them (one
that would take its core from the model's step), and that what is computed in between stays in the core's cache.
"""

from collections.abc import Sequence

import torch

from kernels.quantized import LARGEST_CODE, LEAST_MAGNITUDE, QuantizedDtype, quantized_layout

# torch divides work of more numbers than this between threads. As large as may be, since each call costs microseconds.
_PIECE_NUMBERS = 32767
# Sign, the lower 4 bits of the exponent, the upper 3 of the mantissa: 0x87F00000, as torch's signed integers have it.
_E4M3_BITS = 0x87F00000 - (1 << 32)
_CODE_DTYPES: dict[QuantizedDtype, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class CpuQuantizer:
    """Copies blocks between `pool`, contiguous, and payloads. Thread-safe; pool blocks and lengths are taken as valid.
    Raises ValueError for a pool that cannot be quantised."""

    def __init__(self, pool: torch.Tensor, pool_blocks_per_block: int, store_dtype: QuantizedDtype) -> None:
        self._layout = quantized_layout(pool, pool_blocks_per_block)
        self._store_dtype: QuantizedDtype = store_dtype
        # [pool blocks, segments, groups in a segment, numbers in a group]
        self._pool = pool.view(pool.shape[0], pool.shape[1] * 2, -1, self._layout.group_numbers)
        self._limit = torch.finfo(pool.dtype).max
        num_segments = self._pool.shape[1]
        stride = max(1, _PIECE_NUMBERS // pool[0, 0, 0].numel())
        self._pieces = [slice(first, first + stride) for first in range(0, num_segments, stride)]

    @property
    def payload_bytes(self) -> int:
        return self._layout.payload_bytes

    def gather(self, groups: Sequence[Sequence[int]], outs: Sequence[memoryview]) -> None:
        """Quantise the pool blocks `groups[i]` into `outs[i]`."""
        for pool_blocks, out in zip(groups, outs, strict=True):
            codes, scales = self._parts(out, len(pool_blocks))
            for i, block in enumerate(pool_blocks):
                for piece in self._pieces:
                    _quantize(self._pool[block, piece], codes[piece, i], scales[piece, i], self._store_dtype)

    def scatter(self, payloads: Sequence[memoryview], groups: Sequence[Sequence[int]]) -> None:
        """Dequantise `payloads[i]` into the pool blocks `groups[i]`."""
        for payload, pool_blocks in zip(payloads, groups, strict=True):
            codes, scales = self._parts(payload, len(pool_blocks))
            for i, block in enumerate(pool_blocks):
                for piece in self._pieces:
                    self._dequantize(codes[piece, i], scales[piece, i], self._pool[block, piece])

    def _parts(self, view: memoryview, per_block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a payload's codes and scales, `[segments, pool blocks, groups in a segment, numbers or 1]`."""
        # A read-only buffer cannot become a tensor; no region hands one out, so the extra copy does not matter.
        whole = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
        _, num_segments, num_groups, group = self._pool.shape
        codes = whole[: self._layout.code_bytes].view(_CODE_DTYPES[self._store_dtype])
        scales = whole[self._layout.code_bytes :].view(torch.bfloat16)
        shape = (num_segments, per_block, num_groups)
        return codes.view(*shape, group), scales.view(*shape, 1)

    def _dequantize(self, codes: torch.Tensor, scales: torch.Tensor, numbers: torch.Tensor) -> None:
        values = numbers if numbers.dtype == torch.float32 else torch.empty(numbers.shape, dtype=torch.float32)
        if self._store_dtype == "fp8":
            _from_e4m3(codes, values)
        else:
            values.copy_(codes)
        values.mul_(scales)
        if values is not numbers:
            # The largest may round up past the dtype's range; NaN stays.
            numbers.copy_(values.clamp_(-self._limit, self._limit))


def _from_e4m3(codes: torch.Tensor, values: torch.Tensor) -> None:
    """Put the numbers of these codes into `values`, float32; exact, and 4 times as fast as torch's own conversion.

    The code's exponent and mantissa come to lie where float32 has its own, which is then too small by the difference of
    the two biases, 127 - 7. What e4m3 holds as subnormal is subnormal on the way too.
    """
    bits = values.view(torch.int32)
    # Widened with its sign: that fills the exponent's upper bits, which are cleared again.
    bits.copy_(codes.view(torch.int8)).bitwise_left_shift_(20).bitwise_and_(_E4M3_BITS)
    values.mul_(2.0**120)


def _quantize(numbers: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, store_dtype: QuantizedDtype) -> None:
    """Quantise `[segments, groups, numbers in a group]`; scales are `[segments, groups, 1]` bfloat16."""
    values = numbers.float()
    largest = values.abs().amax(dim=2, keepdim=True)
    scales.copy_(largest.clamp_min(LEAST_MAGNITUDE).mul_(1 / LARGEST_CODE[store_dtype]))
    inverse = scales.float().reciprocal_()
    scaled = values * inverse
    if not bool(largest.isfinite().all()):
        scales.masked_fill_(~largest.isfinite(), float("nan"))
        scaled.masked_fill_(~largest.isfinite(), 0.0)
    codes.copy_(scaled.round_() if store_dtype == "int8" else scaled)
