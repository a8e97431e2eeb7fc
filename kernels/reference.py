"""What each kernel must do, in plain torch: the oracle of its tests. Needs no triton; works on any device."""

import torch


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
