"""The HBM tier over a pool on a GPU copies the same bytes as over the same pool on the CPU."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.quantized import QUANTIZED_DTYPES, QuantizedDtype
from kvstore.core.block import BlockMeta
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome
from tiers.hbm import HbmTier
from tiers.region import Region

pytestmark = pytest.mark.gpu

_TOKENS = 16


@pytest.fixture
def pool() -> torch.Tensor:
    return torch.randn(24, 4, 2, _TOKENS, 2, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


@pytest.fixture
def region(shm_dir: Path) -> Iterator[Region]:
    region = Region.create(shm_dir / "region", 64 << 20, 1)
    yield region
    region.close()
    region.unlink()


@pytest.mark.parametrize("per_block", [1, 3])
@pytest.mark.parametrize("is_pinned", [False, True], ids=["pageable", "pinned"])
def test_blocks_travel_to_the_region_and_back(
    pool: torch.Tensor, region: Region, per_block: int, is_pinned: bool
) -> None:
    on_host, on_gpu = HbmTier(pool, per_block * _TOKENS), HbmTier(pool.cuda(), per_block * _TOKENS)
    groups = torch.randperm(24)[: 6 * per_block].view(6, per_block).tolist()
    slots = [region.view(i << 20, on_gpu.payload_bytes) for i in range(len(groups))]
    if is_pinned:
        on_gpu.pin(region.address, region.data_bytes)
    try:
        for group, slot in zip(groups, slots, strict=True):
            expected = bytearray(on_host.payload_bytes)
            on_host.gather(group, memoryview(expected))
            on_gpu.gather(group, slot)
            assert bytes(slot) == expected
        emptied = HbmTier(torch.zeros_like(pool).cuda(), per_block * _TOKENS)
        for group, slot in zip(groups, slots, strict=True):
            emptied.scatter(slot, group)
            again = bytearray(on_gpu.payload_bytes)
            emptied.gather(group, memoryview(again))
            assert again == bytes(slot)
    finally:
        on_gpu.unpin(region.address)
        for slot in slots:
            slot.release()


@pytest.mark.parametrize("per_block", [1, 3])
@pytest.mark.parametrize("store_dtype", QUANTIZED_DTYPES)
def test_quantised_blocks_are_those_of_the_cpu(pool: torch.Tensor, per_block: int, store_dtype: QuantizedDtype) -> None:
    back = pool.clone()
    on_host = HbmTier(back, per_block * _TOKENS, store_dtype)
    on_gpu = HbmTier(pool.cuda(), per_block * _TOKENS, store_dtype)
    emptied = torch.zeros_like(pool).cuda()
    into = HbmTier(emptied, per_block * _TOKENS, store_dtype)
    for group in torch.randperm(24).view(-1, per_block).tolist():
        expected, found = (memoryview(bytearray(on_host.payload_bytes)) for _ in range(2))
        on_host.gather(group, expected)
        on_gpu.gather(group, found)
        assert found == expected
        on_host.scatter(found, group)
        into.scatter(found, group)
    assert torch.equal(emptied.cpu(), back)


def test_a_batch_read_is_right_in_every_block(pool: torch.Tensor) -> None:
    tier, oracle = HbmTier(pool.cuda(), 2 * _TOKENS), HbmTier(pool, 2 * _TOKENS)
    metas = [
        BlockMeta(BlockKey(bytes([i]) * 32), BlockKey(bytes(32)), bytes(32), i, tier.payload_bytes) for i in range(12)
    ]
    for i, meta in enumerate(metas):
        tier.put_resident(meta, [i, 23 - i])
    into = [memoryview(bytearray(tier.payload_bytes)) for _ in metas]
    assert tier.read(metas, into) == [Outcome.OK] * len(metas)
    for i, view in enumerate(into):
        expected = bytearray(tier.payload_bytes)
        oracle.gather([i, 23 - i], memoryview(expected))
        assert bytes(view) == expected


def test_loads_stores_and_steps_overlap_without_mixing(pool: torch.Tensor) -> None:
    tier = HbmTier(pool.cuda(), _TOKENS)
    expected = [bytearray(tier.payload_bytes) for _ in range(24)]
    for block, view in enumerate(expected):
        tier.gather([block], memoryview(view))

    def move(first: int) -> None:
        payload = memoryview(bytearray(tier.payload_bytes))
        for i in range(60):
            block = first + i % 6
            tier.gather([block], payload)
            tier.scatter(payload, [block])

    threads = [threading.Thread(target=move, args=(first,)) for first in (0, 6, 12)]
    for thread in threads:
        thread.start()
    busy = torch.randn(1024, 1024, device="cuda")
    for _ in range(200):
        busy = busy @ busy / 32
    for thread in threads:
        thread.join()
    for block, view in enumerate(expected):
        found = bytearray(tier.payload_bytes)
        tier.gather([block], memoryview(found))
        assert found == view


@pytest.mark.parametrize("per_block", [1, 3])
def test_layers_travel_one_before_the_next(pool: torch.Tensor, region: Region, per_block: int) -> None:
    full = HbmTier(pool.cuda(), per_block * _TOKENS)
    groups = torch.randperm(24)[: 6 * per_block].view(6, per_block).tolist()
    taken = [block for group in groups for block in group]
    slots = [region.view(i << 20, full.payload_bytes) for i in range(len(groups))]
    full.pin(region.address, region.data_bytes)
    try:
        for group, slot in zip(groups, slots, strict=True):
            full.gather(group, slot)
        emptied = torch.zeros_like(pool).cuda()
        tier = HbmTier(emptied, per_block * _TOKENS)
        for first, end in [(0, 1), (1, 3), (3, 4)]:
            tier.scatter_layers(slots, groups, first, end)
            assert torch.equal(emptied[taken, :end].cpu(), pool[taken, :end])
            assert not bool(emptied[taken, end:].any())
    finally:
        full.unpin(region.address)
        for slot in slots:
            slot.release()
