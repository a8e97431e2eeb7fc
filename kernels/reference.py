"""What each kernel must do, in plain torch: the oracle of its tests. Needs no triton; works on any device."""

import torch

from kernels.quantized import LARGEST_CODE, LEAST_MAGNITUDE, QuantizedDtype, quantized_layout


def gather(pool: torch.Tensor, pool_blocks: torch.Tensor, payloads: torch.Tensor) -> None:
    """As `kernels.gather.gather`."""
    # [payloads, blocks, layers, 2, tokens, heads, dim] -> [payloads, layers, 2, blocks, tokens, heads, dim]
    blocks = pool[pool_blocks].permute(0, 2, 3, 1, 4, 5, 6)
    payloads.copy_(blocks.reshape(payloads.shape))


def scatter(payloads: torch.Tensor, pool_blocks: torch.Tensor, pool: torch.Tensor) -> None:
    """As `kernels.scatter.scatter`."""
    _, num_layers, parts, tokens, heads, head_dim = pool.shape
    num_payloads, per_payload = pool_blocks.shape
    blocks = payloads.reshape(num_payloads, num_layers, parts, per_payload, tokens, heads, head_dim)
    pool[pool_blocks] = blocks.permute(0, 3, 1, 2, 4, 5, 6)


def quantize_gather(
    pool: torch.Tensor, pool_blocks: torch.Tensor, payloads: torch.Tensor, store_dtype: QuantizedDtype
) -> None:
    """As `kernels.quantize.quantize_gather`."""
    layout = quantized_layout(pool, pool_blocks.shape[1])
    numbers = torch.empty(len(payloads), layout.code_bytes, dtype=pool.dtype, device=pool.device)
    gather(pool, pool_blocks, numbers)
    groups = numbers.float().view(len(payloads), -1, layout.group_numbers)
    largest = groups.abs().amax(dim=2, keepdim=True)
    scales = (largest.clamp_min(LEAST_MAGNITUDE) * (1 / LARGEST_CODE[store_dtype])).to(torch.bfloat16)
    scales[~largest.isfinite()] = float("nan")
    scaled = torch.where(scales.isnan(), 0.0, groups * (1 / scales.float()))
    if store_dtype == "int8":
        codes = scaled.round().to(torch.int8)
    else:
        codes = scaled.clamp(-LARGEST_CODE["fp8"], LARGEST_CODE["fp8"]).to(torch.float8_e4m3fn)
    payloads[:, : layout.code_bytes] = codes.view(torch.uint8).flatten(1)
    payloads[:, layout.code_bytes :] = scales.squeeze(2).contiguous().view(torch.uint8)


def dequantize_scatter(
    payloads: torch.Tensor, pool_blocks: torch.Tensor, pool: torch.Tensor, store_dtype: QuantizedDtype
) -> None:
    """As `kernels.quantize.dequantize_scatter`."""
    layout = quantized_layout(pool, pool_blocks.shape[1])
    codes = payloads[:, : layout.code_bytes].contiguous()
    scales = payloads[:, layout.code_bytes :].contiguous().view(torch.bfloat16).float()
    numbers = codes.view(torch.int8 if store_dtype == "int8" else torch.float8_e4m3fn).float()
    values = numbers.view(len(payloads), -1, layout.group_numbers) * scales.unsqueeze(2)
    limit = torch.finfo(pool.dtype).max
    scatter(values.clamp(-limit, limit).flatten(1).to(pool.dtype), pool_blocks, pool)
