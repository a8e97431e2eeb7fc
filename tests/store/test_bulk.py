"""Batches that enter the catalog at once, against the same blocks that enter it one by one."""

import random

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.block import BlockMeta
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome, TierKind
from kvstore.store.catalog import Catalog
from tests.support.batches import batches_of
from tiers.base import RecoveredBatch

DIGEST, OTHER, ROOT = b"d" * 32, b"o" * 32, b"r" * 32
BYTES = 4096


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(4, "little") * 8)


def honest(number: int) -> BlockMeta:
    """Block `number` of one forest: 3n and 3n + 1 have the parent n, 3n + 2 begins a prefix of its own."""
    if number < 3 or number % 3 == 2:
        return BlockMeta(key(number), BlockKey(ROOT), DIGEST, 0, BYTES)
    parent = honest(number // 3)
    return BlockMeta(key(number), parent.key, DIGEST, parent.depth + 1, BYTES)


def mistaken(number: int, noise: random.Random) -> BlockMeta:
    meta = honest(number)
    parent = noise.choice([meta.parent, key(noise.randrange(60)), meta.key, BlockKey(ROOT)])
    depth = noise.choice([meta.depth, meta.depth + 1, 0, 7, 2**31 - 1])
    return BlockMeta(meta.key, parent, meta.namespace, depth, meta.payload_bytes)


@st.composite
def blocks(draw: st.DrawFn) -> list[BlockMeta]:
    numbers = draw(st.lists(st.integers(0, 59), max_size=40, unique=draw(st.booleans())))
    noise = draw(st.randoms(use_true_random=False))
    rate = draw(st.sampled_from([0.0, 0.0, 0.1, 0.5]))
    return [mistaken(number, noise) if noise.random() < rate else honest(number) for number in numbers]


def one_by_one(catalog: Catalog, batch: RecoveredBatch) -> list[int]:
    return [catalog.ensure(meta) for meta in batch.metas()]


def known(catalog: Catalog) -> set[object]:
    """All that the catalog knows, whatever the ids."""
    return {
        (
            catalog.key(block),
            None if catalog.parent(block) < 0 else catalog.key(catalog.parent(block)),
            int(catalog._columns.depth[block]),
            int(catalog._columns.links[block]),
            catalog.residency(block),
            catalog.children_in(block, TierKind.SSD),
            catalog.children_in(block, TierKind.RAM),
        )
        for block in map(catalog.find, map(key, range(60)))
        if block >= 0
    }


@given(st.lists(blocks(), max_size=4), st.lists(st.integers(0, 59), max_size=5))
def test_a_batch_does_what_its_blocks_one_by_one_would_do(batches: list[list[BlockMeta]], in_ram: list[int]) -> None:
    bulk, single = Catalog(), Catalog()
    for catalog in (bulk, single):
        for number in in_ram:
            catalog.set_resident(catalog.ensure(honest(number)), TierKind.RAM)
    for batch in (batch for metas in batches for batch in batches_of(metas)):
        found, expected = bulk.ensure_many(batch).tolist(), one_by_one(single, batch)
        assert [block >= 0 for block in found] == [block >= 0 for block in expected]
        for block, meta in zip(found, batch.metas(), strict=True):
            assert block < 0 or bulk.meta(block) == meta
        entered = bulk.ensure_many(batch)
        entered = entered[entered >= 0]
        if len(set(entered.tolist())) == len(entered):
            fresh = bulk.set_resident_many(entered, TierKind.SSD)
            assert set(fresh.tolist()) <= set(entered.tolist())
            one_by_one(single, batch)
            for block in expected:
                if block >= 0:
                    single.set_resident(block, TierKind.SSD)
        assert known(bulk) == known(single)
    for catalog in (bulk, single):
        for number in range(60):
            block = catalog.find(key(number))
            if block >= 0:
                catalog.pin(block)
                catalog.unpin(block)
        catalog.check_integrity()
    assert len(bulk) == len(single) and list(bulk.namespaces) == list(single.namespaces)


def test_a_batch_of_a_namespace_that_is_known_with_another_size_or_root_is_refused() -> None:
    catalog = Catalog()
    (batch,) = batches_of([honest(number) for number in range(9)])
    assert catalog.namespaces.id_of(DIGEST, BYTES + 1, ROOT) == 0
    assert set(catalog.ensure_many(batch).tolist()) == {-1}
    other = RecoveredBatch(OTHER, BYTES, batch.keys, batch.parents, batch.depths)
    assert catalog.namespaces.id_of(OTHER, BYTES, b"x" * 32) == 1
    assert -1 in catalog.ensure_many(other).tolist()
    assert catalog.namespaces[1].root == b"x" * 32


def test_what_is_said_of_a_block_that_went_is_forgotten_when_it_is_back() -> None:
    catalog = Catalog()
    (batch,) = batches_of([honest(number) for number in range(30)])
    blocks = catalog.set_resident_many(catalog.ensure_many(batch), TierKind.SSD)
    for block in blocks[::-1].tolist():
        catalog.set_absent(block, TierKind.SSD, "evicted")
    assert catalog.lookup(key(1), 0) == (b"", Outcome.MISS) and catalog.why_missing(key(1)) == "evicted"
    catalog.set_resident_many(catalog.ensure_many(batch), TierKind.SSD)
    assert catalog.why_missing(key(1)) == "never_stored"
    catalog.check_integrity()


def test_the_columns_grow_under_a_batch() -> None:
    catalog = Catalog(capacity=16)
    (batch,) = batches_of([honest(number) for number in range(5000)])
    assert len(catalog.set_resident_many(catalog.ensure_many(batch), TierKind.SSD)) == 5000
    assert catalog.blocks_in(TierKind.SSD) == 5000
    catalog.check_integrity()
