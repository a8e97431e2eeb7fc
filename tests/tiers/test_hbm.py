"""The HBM tier over a pool on the CPU: which bytes go where, and which pool blocks belong to whom.

What every tier must do is in tests/contracts; the GPU's copies are in tests/gpu and, interpreted, in tests/kernels.
"""

import threading
from pathlib import Path

import pytest
import torch

from kernels import reference
from kernels.quantized import QUANTIZED_DTYPES, QuantizedDtype
from kvstore.core.block import BlockMeta
from kvstore.core.errors import ConfigError
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome
from tiers.hbm import HbmTier
from tiers.region import Region

_LAYERS, _TOKENS, _HEADS, _DIM = 3, 4, 2, 5
_NUM_POOL_BLOCKS = 8


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def pool(request: pytest.FixtureRequest) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (_NUM_POOL_BLOCKS, _LAYERS, 2, _TOKENS, _HEADS, _DIM)
    return torch.randn(shape, generator=generator).to(request.param)


@pytest.mark.parametrize("groups", [[[5]], [[6, 1]], [[7, 0, 3, 4]]], ids=["one", "two", "four"])
def test_a_payload_is_layer_part_token_head_number_whatever_the_pool_blocks(
    pool: torch.Tensor, groups: list[list[int]]
) -> None:
    tier = HbmTier(pool, _TOKENS * len(groups[0]))
    expected = torch.empty(1, pool[0].numel() * len(groups[0]), dtype=pool.dtype)
    reference.gather(pool, torch.tensor(groups), expected)
    out = bytearray(tier.payload_bytes)
    tier.gather(groups[0], memoryview(out))
    assert out == expected.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("blocks", [[2], [2, 6]], ids=["one", "two"])
def test_scatter_undoes_gather_and_touches_nothing_else(pool: torch.Tensor, blocks: list[int]) -> None:
    tier = HbmTier(pool, _TOKENS * len(blocks))
    payload = memoryview(bytearray(tier.payload_bytes))
    tier.gather(blocks, payload)
    before = pool.clone()
    pool[blocks] = 7
    tier.scatter(payload.toreadonly(), blocks)
    assert torch.equal(pool, before)


@pytest.mark.parametrize("groups", [[[2], [5]], [[2, 6], [7, 0]]], ids=["one", "two"])
def test_layers_of_blocks_are_scattered_in_turns(pool: torch.Tensor, groups: list[list[int]]) -> None:
    tier = HbmTier(pool, _TOKENS * len(groups[0]))
    payloads = [memoryview(bytearray(tier.payload_bytes)) for _ in groups]
    for group, payload in zip(groups, payloads, strict=True):
        tier.gather(group, payload)
    before = pool.clone()
    taken = [block for group in groups for block in group]
    pool[taken] = 7
    tier.scatter_layers(payloads, groups, 0, 2)
    assert torch.equal(pool[:, :2], before[:, :2])
    assert bool((pool[taken, 2] == 7).all())
    tier.scatter_layers(payloads, groups, 2, 3)
    assert torch.equal(pool, before)


def test_layers_that_are_not_there_or_were_quantised_are_refused(pool: torch.Tensor) -> None:
    tier = HbmTier(pool, _TOKENS)
    payload = memoryview(bytearray(tier.payload_bytes))
    before = pool.clone()
    for first, end in [(0, 4), (2, 2), (-1, 1)]:
        with pytest.raises(ValueError, match="layers"):
            tier.scatter_layers([payload], [[1]], first, end)
    with pytest.raises(ValueError, match="outside"):
        tier.scatter_layers([payload, payload], [[1], [8]], 0, 1)
    quantised = HbmTier(pool, _TOKENS, "int8")
    with pytest.raises(ValueError, match="quantised"):
        quantised.scatter_layers([memoryview(bytearray(quantised.payload_bytes))], [[1]], 0, 1)
    assert torch.equal(pool, before)


@pytest.mark.parametrize("blocks", [[2], [2, 6]], ids=["one", "two"])
@pytest.mark.parametrize("store_dtype", QUANTIZED_DTYPES)
def test_a_quantised_block_is_smaller_and_comes_back_nearly_as_it_was(
    pool: torch.Tensor, blocks: list[int], store_dtype: QuantizedDtype
) -> None:
    tier = HbmTier(pool, _TOKENS * len(blocks), store_dtype)
    assert tier.payload_bytes == len(blocks) * _LAYERS * 2 * _TOKENS * _HEADS * (_DIM + 2)
    assert tier.usage().capacity_bytes == pool.nbytes
    payload = memoryview(bytearray(tier.payload_bytes))
    tier.gather(blocks, payload)
    before = pool.clone()
    pool[blocks] = 7
    tier.scatter(payload.toreadonly(), blocks)
    others = [block for block in range(_NUM_POOL_BLOCKS) if block not in blocks]
    assert torch.equal(pool[others], before[others])
    assert bool(((pool - before).float().norm() < 0.04 * before[blocks].float().norm()).all())
    with pytest.raises(ValueError, match=f"{tier.payload_bytes} bytes"):
        tier.scatter(memoryview(bytes(len(payload) + 1)), blocks)


def test_one_pool_block_per_block_is_byte_for_byte_the_pool_block(pool: torch.Tensor) -> None:
    tier = HbmTier(pool, _TOKENS)
    out = bytearray(tier.payload_bytes)
    tier.gather([3], memoryview(out))
    assert out == pool[3].contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("pool_blocks", "num_bytes", "reason"),
    [
        ([1], 10, "a block has 2 pool blocks and"),
        ([1, 2], 10, "a block has 2 pool blocks and"),
        ([1, 8], None, "lies outside of the pool's 8"),
        ([-1, 2], None, "lies outside of the pool's 8"),
    ],
)
def test_what_does_not_fit_is_refused_and_copies_nothing(
    pool: torch.Tensor, pool_blocks: list[int], num_bytes: int | None, reason: str
) -> None:
    tier = HbmTier(pool, 2 * _TOKENS)
    view = memoryview(bytearray(tier.payload_bytes if num_bytes is None else num_bytes))
    before = pool.clone()
    with pytest.raises(ValueError, match=reason):
        tier.gather(pool_blocks, view)
    with pytest.raises(ValueError, match=reason):
        tier.scatter(view, pool_blocks)
    assert not any(view)
    assert torch.equal(pool, before)


def test_a_pool_or_block_size_that_cannot_work_is_refused() -> None:
    pool = torch.zeros(4, 1, 2, 4, 1, 4)
    with pytest.raises(ConfigError, match="not a whole number of pool blocks"):
        HbmTier(pool, 6)
    with pytest.raises(ConfigError, match="no contiguous pool"):
        HbmTier(pool.transpose(3, 5), 4)
    with pytest.raises(ConfigError, match="no contiguous pool"):
        HbmTier(torch.zeros(4, 2, 4, 1, 4), 4)
    with pytest.raises(ConfigError, match="int8 cannot be quantised"):
        HbmTier(pool.to(torch.int8), 4, "int8")


def test_a_resident_block_is_read_from_the_pool_blocks_it_was_computed_in(pool: torch.Tensor) -> None:
    tier = HbmTier(pool, 2 * _TOKENS)
    tier.put_resident(_meta(1, tier), [6, 2])
    direct, read = bytearray(tier.payload_bytes), bytearray(tier.payload_bytes)
    tier.gather([6, 2], memoryview(direct))
    assert tier.read([_meta(1, tier)], [memoryview(read)]) == [Outcome.OK]
    assert read == direct
    assert tier.usage().used_bytes == tier.payload_bytes


def test_pool_blocks_of_a_resident_block_are_not_given_to_another_before_it_is_deleted(pool: torch.Tensor) -> None:
    tier = HbmTier(pool, 4 * _TOKENS)
    payload = memoryview(bytearray(tier.payload_bytes))
    tier.put_resident(_meta(1, tier), [0, 1, 2, 3])
    kept = pool[:4].clone()
    assert tier.write([_meta(2, tier), _meta(3, tier)], [payload, payload]) == [Outcome.OK, Outcome.FULL]
    assert torch.equal(pool[:4], kept)
    assert tier.delete([_meta(1, tier).key]) == [Outcome.OK]
    assert tier.write([_meta(3, tier)], [payload]) == [Outcome.OK]
    assert not pool.any()


@pytest.mark.parametrize(
    ("number", "pool_blocks", "reason"),
    [(1, [4, 5], "is there"), (2, [1, 4], "not free"), (2, [4, 4], "has 1 pool blocks"), (2, [4, 8], "not free")],
)
def test_a_resident_block_that_contradicts_what_is_there_is_refused(
    pool: torch.Tensor, number: int, pool_blocks: list[int], reason: str
) -> None:
    tier = HbmTier(pool, 2 * _TOKENS)
    tier.put_resident(_meta(1, tier), [0, 1])
    with pytest.raises(ValueError, match=reason):
        tier.put_resident(_meta(number, tier), pool_blocks)
    assert tier.usage().blocks == 1


def test_there_is_no_place_for_a_block_of_another_size(pool: torch.Tensor) -> None:
    tier = HbmTier(pool, _TOKENS)
    meta = BlockMeta(BlockKey(bytes(32)), BlockKey(bytes(32)), bytes(32), 0, tier.payload_bytes + 1)
    assert tier.write([meta], [memoryview(bytes(meta.payload_bytes))]) == [Outcome.FULL]
    assert tier.usage().used_bytes == 0


def test_movers_copy_different_blocks_at_the_same_time(pool: torch.Tensor) -> None:
    tier = HbmTier(pool, _TOKENS)
    before = pool.clone()

    def move(block: int) -> None:
        payload = memoryview(bytearray(tier.payload_bytes))
        for _ in range(50):
            tier.gather([block], payload)
            tier.scatter(payload, [block])

    threads = [threading.Thread(target=move, args=(block,)) for block in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(pool, before)


def test_pinning_what_cannot_be_touched_harms_nobody_on_the_cpu(pool: torch.Tensor) -> None:
    tier = HbmTier(pool, _TOKENS)
    tier.pin(4096, 1 << 40)
    tier.unpin(4096)


def test_pinning_enters_a_region_into_the_page_table_on_the_cpu(pool: torch.Tensor, shm_dir: Path) -> None:
    """The first copy to each slot of a region that was just mapped took eight times as long as the others."""
    made = Region.create(shm_dir / "region", 1 << 20, 1)
    region = Region.attach(made.path, 1)
    tier = HbmTier(pool, _TOKENS)
    tier.pin(region.address, region.data_bytes)
    try:
        resident = [
            int(line.split()[1])
            for mapping in Path("/proc/self/smaps").read_text().split("VmFlags:")
            if str(made.path) in mapping
            for line in mapping.splitlines()
            if line.startswith("Rss:")
        ]
        assert max(resident) * 1024 >= region.data_bytes
    finally:
        tier.unpin(region.address)
        for mapped in (region, made):
            mapped.close()
        made.unlink()


def _meta(number: int, tier: HbmTier) -> BlockMeta:
    return BlockMeta(BlockKey(bytes([number]) * 32), BlockKey(bytes(32)), bytes(32), number, tier.payload_bytes)
