"""Copies that the kernels must do exactly as the torch oracle does, at odd sizes; run on a GPU, or interpreted.

Not a test file by itself: `test_interpreted.py` and `tests/gpu/test_kernels.py` run it.
"""

from dataclasses import dataclass

import torch

from kernels import reference
from kernels.gather import gather
from kernels.scatter import scatter

# Padding and blocks that nobody names must keep this.
_POISON = 93


@dataclass(frozen=True)
class Case:
    """`order` is how the pool stores its dimensions [block, layer, K/V, token, head, number], outermost first.

    `spare` numbers are left between one payload and the next, and before the pool.
    """

    dtype: torch.dtype
    num_layers: int
    tokens: int
    heads: int
    head_dim: int
    num_payloads: int
    per_payload: int
    order: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    spare: int = 0

    def __str__(self) -> str:
        shape = f"{self.num_layers}x{self.tokens}x{self.heads}x{self.head_dim}"
        order = "".join(map(str, self.order))
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}-{shape}-{self.num_payloads}of{self.per_payload}-{order}-{self.spare}"


HEADS_FIRST = (0, 1, 2, 4, 3, 5)
LAYERS_FIRST = (1, 2, 0, 3, 4, 5)

SMALL_CASES = [
    Case(torch.float32, 1, 4, 2, 8, num_payloads=1, per_payload=1),
    Case(torch.bfloat16, 2, 3, 1, 12, num_payloads=2, per_payload=1),
    # Heads of 5, 3 and 7 numbers: lanes of 4, 2 and 1 bytes.
    Case(torch.float32, 1, 3, 3, 5, num_payloads=2, per_payload=2),
    Case(torch.float16, 2, 2, 1, 3, num_payloads=1, per_payload=3),
    Case(torch.int8, 1, 5, 3, 7, num_payloads=1, per_payload=2),
    Case(torch.float32, 1, 2, 3, 8, num_payloads=2, per_payload=2, order=HEADS_FIRST),
    Case(torch.bfloat16, 2, 2, 1, 6, num_payloads=1, per_payload=2, order=LAYERS_FIRST),
    Case(torch.int8, 1, 3, 2, 5, num_payloads=1, per_payload=2, order=HEADS_FIRST, spare=3),
    # Starts 4 bytes off an 8-byte boundary, payloads apart from each other.
    Case(torch.float32, 1, 2, 2, 4, num_payloads=2, per_payload=1, spare=1),
    # A segment of more than one tile of lanes, and not a whole number of tiles.
    Case(torch.int8, 1, 9, 3, 43, num_payloads=1, per_payload=1),
]

# Of ordinary models; too slow to interpret.
LARGE_CASES = [
    Case(torch.bfloat16, 32, 16, 8, 128, num_payloads=5, per_payload=16),
    Case(torch.float32, 30, 16, 3, 64, num_payloads=7, per_payload=1),
    Case(torch.float16, 28, 16, 2, 128, num_payloads=3, per_payload=4, order=HEADS_FIRST),
    Case(torch.bfloat16, 36, 16, 8, 128, num_payloads=2, per_payload=8, order=LAYERS_FIRST),
    Case(torch.bfloat16, 13, 7, 5, 80, num_payloads=4, per_payload=3, spare=8),
]


def check_gather(case: Case, device: str) -> None:
    pool = pool_of(case, device)
    pool_blocks = pool_blocks_of(case, device)
    expected, found = _payloads(case, device), _payloads(case, device)
    reference.gather(pool, pool_blocks, expected)
    gather(pool, pool_blocks, found)
    assert torch.equal(found, expected)
    assert int((_everything(found) == _POISON).sum()) >= case.spare * case.num_payloads


def check_scatter(case: Case, device: str) -> None:
    pool_blocks = pool_blocks_of(case, device)
    payloads = _payloads(case, device)
    payloads.copy_(_random(payloads.shape, case.dtype, device, seed=2))
    expected, found = pool_of(case, device), pool_of(case, device)
    assert torch.equal(_everything(expected), _everything(found))
    reference.scatter(payloads, pool_blocks, expected)
    scatter(payloads, pool_blocks, found)
    assert torch.equal(_everything(found), _everything(expected))


def check_nothing_to_do(device: str) -> None:
    case = SMALL_CASES[0]
    pool, payloads = pool_of(case, device), _payloads(case, device)
    nothing = torch.empty(0, case.per_payload, dtype=torch.int64, device=device)
    gather(pool, nothing, payloads[:0])
    scatter(payloads[:0], nothing, pool)
    assert torch.equal(pool, pool_of(case, device))


def pool_of(case: Case, device: str) -> torch.Tensor:
    shape = (_num_blocks(case), case.num_layers, 2, case.tokens, case.heads, case.head_dim)
    stored = [shape[dimension] for dimension in case.order]
    count = torch.Size(shape).numel()
    storage = _random((count + case.spare,), case.dtype, device, seed=1)
    back = [case.order.index(dimension) for dimension in range(6)]
    return storage[case.spare :].view(stored).permute(back)


def pool_blocks_of(case: Case, device: str) -> torch.Tensor:
    order = torch.randperm(_num_blocks(case), generator=torch.Generator().manual_seed(3))
    chosen = order[: case.num_payloads * case.per_payload]
    return chosen.view(case.num_payloads, case.per_payload).contiguous().to(device)


def _payloads(case: Case, device: str) -> torch.Tensor:
    numbers = case.per_payload * case.num_layers * 2 * case.tokens * case.heads * case.head_dim
    storage = torch.full((case.num_payloads, numbers + case.spare), _POISON, dtype=case.dtype, device=device)
    return storage[:, :numbers]


def _num_blocks(case: Case) -> int:
    return case.num_payloads * case.per_payload + 2


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    # Whole numbers that every dtype holds exactly, the poison not among them.
    values = torch.randint(-90, 91, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).to(device)


def _everything(view: torch.Tensor) -> torch.Tensor:
    """The whole storage under a view, what lies between its rows included."""
    whole = torch.empty(0, dtype=view.dtype, device=view.device)
    return whole.set_(view.untyped_storage())
