"""Quantising copies that make the same bytes as the torch oracle, at odd sizes; run on a GPU, or interpreted.

Not a test file by itself: `test_interpreted.py` and `tests/gpu/test_kernels.py` run it.
"""

import torch

from kernels import reference
from kernels.quantize import dequantize_scatter, quantize_gather
from kernels.quantized import QuantizedDtype, quantized_layout
from tests.kernels.cases import HEADS_FIRST, LAYERS_FIRST, Case, pool_blocks_of, pool_of

_POISON = 93

SMALL_CASES = [
    Case(torch.float32, 1, 4, 2, 64, num_payloads=1, per_payload=1),
    Case(torch.bfloat16, 2, 3, 1, 32, num_payloads=2, per_payload=2),
    # Groups of 20, 12, 7 and 43 numbers; more than one tile of groups in the last two.
    Case(torch.float16, 1, 3, 2, 80, num_payloads=1, per_payload=2),
    Case(torch.float32, 1, 3, 1, 12, num_payloads=2, per_payload=1),
    Case(torch.float32, 1, 43, 3, 7, num_payloads=1, per_payload=1),
    Case(torch.bfloat16, 1, 9, 2, 43, num_payloads=1, per_payload=1),
    Case(torch.float32, 1, 2, 3, 64, num_payloads=1, per_payload=2, order=HEADS_FIRST),
    Case(torch.float16, 2, 2, 1, 96, num_payloads=1, per_payload=2, order=LAYERS_FIRST, spare=1),
]

# Of ordinary models; too slow to interpret.
LARGE_CASES = [
    Case(torch.bfloat16, 32, 16, 8, 128, num_payloads=3, per_payload=16),
    Case(torch.float32, 30, 16, 3, 64, num_payloads=7, per_payload=1),
    Case(torch.float16, 28, 16, 2, 128, num_payloads=3, per_payload=4, order=HEADS_FIRST),
    Case(torch.bfloat16, 13, 7, 5, 80, num_payloads=4, per_payload=3, spare=8),
]


def check_quantize(case: Case, store_dtype: QuantizedDtype, device: str) -> None:
    pool, blocks = kv_pool(case, device), pool_blocks_of(case, device)
    expected, found = _payloads(case, device), _payloads(case, device)
    reference.quantize_gather(pool, blocks, expected, store_dtype)
    quantize_gather(pool, blocks, found, store_dtype)
    assert torch.equal(found, expected)
    whole = torch.empty(0, dtype=torch.uint8, device=device).set_(found.untyped_storage()).view(len(found), -1)
    assert bool((whole[:, found.shape[1] :] == _POISON).all())


def check_dequantize(case: Case, store_dtype: QuantizedDtype, device: str) -> None:
    blocks, payloads = pool_blocks_of(case, device), _payloads(case, device)
    reference.quantize_gather(kv_pool(case, device), blocks, payloads, store_dtype)
    expected, found = pool_of(case, device), pool_of(case, device)
    reference.dequantize_scatter(payloads, blocks, expected, store_dtype)
    dequantize_scatter(payloads, blocks, found, store_dtype)
    # The interpreter cuts bfloat16 off where it should round.
    is_cut = case.dtype == torch.bfloat16 and device == "cpu"
    torch.testing.assert_close(found, expected, rtol=2**-7 if is_cut else 0, atol=0, equal_nan=True)


def kv_pool(case: Case, device: str) -> torch.Tensor:
    """Numbers of very different sizes, as K and V are, and what a conversion may trip over."""
    pool = pool_of(case, device)
    generator = torch.Generator().manual_seed(4)
    sizes = torch.exp2(torch.randint(-12, 9, pool.shape, generator=generator).float())
    values = (torch.randn(pool.shape, generator=generator) * sizes).to(pool.dtype)
    for block in range(len(values)):
        values[block, 0, 0, 0, 0] = 0.0
        values[block, 0, 1, 0, 0] = 1e-40
        values[block, 0, 0, 1, 0, 0] = torch.finfo(pool.dtype).max
        values[block, 0, 1, 1, 0, :5] = torch.tensor([1.0, 0.5, -0.5, 127.0, 2**-9])
        values[block, -1, 1, -1, -1, -1] = float("-inf") if block % 2 else float("nan")
    pool.copy_(values)
    return pool


def _payloads(case: Case, device: str) -> torch.Tensor:
    layout = quantized_layout(pool_of(case, device), case.per_payload)
    # Rows apart from each other, and still at even addresses.
    storage = torch.full((case.num_payloads, layout.payload_bytes + 2 * case.spare), _POISON, dtype=torch.uint8)
    return storage.to(device)[:, : layout.payload_bytes]
