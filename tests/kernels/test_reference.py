"""The oracle itself, against a loop over tokens that nobody can get wrong."""

import torch

from kernels import reference


def test_gather_lays_out_layer_part_token_head_number() -> None:
    pool = torch.arange(5 * 2 * 2 * 3 * 2 * 4).reshape(5, 2, 2, 3, 2, 4)
    blocks = torch.tensor([[4, 1], [0, 3]])
    payloads = torch.empty(2, 2 * 2 * 6 * 2 * 4, dtype=pool.dtype)
    reference.gather(pool, blocks, payloads)
    shaped = payloads.view(2, 2, 2, 6, 2, 4)
    for i in range(2):
        for token in range(6):
            block, offset = int(blocks[i, token // 3]), token % 3
            assert torch.equal(shaped[i, :, :, token], pool[block, :, :, offset])


def test_scatter_undoes_gather_and_leaves_other_blocks_alone() -> None:
    pool = torch.arange(5 * 2 * 2 * 3 * 2 * 4).reshape(5, 2, 2, 3, 2, 4)
    blocks = torch.tensor([[4, 1]])
    payloads = torch.empty(1, 2 * 2 * 6 * 2 * 4, dtype=pool.dtype)
    reference.gather(pool, blocks, payloads)
    target = torch.full_like(pool, -1)
    reference.scatter(payloads, blocks, target)
    assert torch.equal(target[[4, 1]], pool[[4, 1]])
    assert bool((target[[0, 2, 3]] == -1).all())
