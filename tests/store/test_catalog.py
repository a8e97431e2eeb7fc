"""The catalog: what is visible, what an entry lives by, and who is believed about a block's identity."""

import pytest

from kvstore.core.block import BlockMeta
from kvstore.core.key import BlockKey, join_keys
from kvstore.core.outcome import Outcome, TierKind
from kvstore.store.catalog import Catalog
from tests.support.chats import Prefix, namespace

NAMESPACE = namespace()
DIGEST, ROOT, BYTES = NAMESPACE.digest(), NAMESPACE.root(), NAMESPACE.block_bytes


def metas(prefix: Prefix) -> list[BlockMeta]:
    parents = [ROOT, *prefix.keys[:-1]]
    return [
        BlockMeta(key, parent, DIGEST, depth, BYTES)
        for depth, (key, parent) in enumerate(zip(prefix.keys, parents, strict=True))
    ]


@pytest.fixture
def catalog() -> Catalog:
    made = Catalog()
    assert made.namespaces.id_of(DIGEST, BYTES, ROOT) == 0
    return made


def store(catalog: Catalog, prefix: Prefix, tier: TierKind = TierKind.RAM) -> list[int]:
    blocks = [catalog.ensure(meta) for meta in metas(prefix)]
    for block in blocks:
        catalog.set_resident(block, tier)
    return blocks


def test_a_lookup_says_the_fastest_tier_of_each_leading_block_and_what_stopped_it(catalog: Catalog) -> None:
    prefix = Prefix(NAMESPACE, 1, 5)
    keys = join_keys(prefix.keys)
    assert catalog.lookup(keys, 0) == (b"", Outcome.MISS)
    blocks = store(catalog, Prefix(NAMESPACE, 1, 3), TierKind.SSD)
    catalog.set_resident(blocks[0], TierKind.RAM)
    catalog.set_resident(blocks[2], TierKind.S3)
    assert catalog.lookup(keys, 0) == (bytes([TierKind.RAM, TierKind.SSD, TierKind.SSD]), Outcome.MISS)
    fourth = catalog.ensure(metas(prefix)[3])
    catalog.begin_write(fourth)
    assert catalog.lookup(keys, 0)[1] == Outcome.PENDING
    catalog.finish_write(fourth)
    assert catalog.lookup(join_keys(prefix.keys[:4]), 0) == (bytes([1, 2, 2, 1]), Outcome.OK)
    catalog.check_integrity()


def test_blocks_of_another_namespace_are_not_there(catalog: Catalog) -> None:
    other = namespace(tenant="other")
    store(catalog, Prefix(NAMESPACE, 1, 2))
    assert catalog.namespaces.id_of(other.digest(), BYTES, other.root()) == 1
    assert catalog.lookup(join_keys(Prefix(NAMESPACE, 1, 2).keys), 1) == (b"", Outcome.MISS)


def test_an_entry_lives_as_long_as_something_keeps_it_and_so_do_its_parents(catalog: Catalog) -> None:
    blocks = store(catalog, Prefix(NAMESPACE, 1, 3))
    for block in blocks:
        catalog.set_absent(block, TierKind.RAM, "evicted")
        catalog.check_integrity()
    assert len(catalog) == 0
    assert catalog.why_missing(Prefix(NAMESPACE, 1, 3).keys[1]) == "evicted"
    blocks = store(catalog, Prefix(NAMESPACE, 1, 3))
    catalog.pin(blocks[2])
    for block in blocks:
        catalog.set_absent(block, TierKind.RAM, "evicted")
    assert len(catalog) == 3
    catalog.unpin(blocks[2])
    assert len(catalog) == 0


def test_ids_that_end_are_told_before_they_are_given_out_again() -> None:
    ended: list[int] = []
    catalog = Catalog(ended.append)
    blocks = store(catalog, Prefix(NAMESPACE, 1, 3))
    for block in reversed(blocks):
        catalog.set_absent(block, TierKind.RAM, "evicted")
    assert sorted(ended) == sorted(blocks)
    assert set(store(catalog, Prefix(NAMESPACE, 2, 3))) == set(blocks)


def test_a_session_that_moves_on_lets_its_old_blocks_go_without_ending_an_entry_twice(catalog: Catalog) -> None:
    """Letting the tail go ended its parents too; the loop then came to those and ended them again, which killed the
    daemon: a session whose blocks were all evicted, and whose next turn had other ones."""
    blocks = catalog.ensure_prefix(DIGEST, ROOT, BYTES, join_keys(Prefix(NAMESPACE, 1, 4).keys))
    catalog.add_session_refs(blocks, 1)
    assert len(catalog) == 4
    catalog.add_session_refs(blocks, -1)
    assert len(catalog) == 0
    catalog.check_integrity()


def test_a_prefix_is_ensured_as_a_whole_as_it_is_block_by_block(catalog: Catalog) -> None:
    whole, half = Prefix(NAMESPACE, 1, 8), Prefix(NAMESPACE, 1, 4)
    one_by_one = [catalog.ensure(meta) for meta in metas(half)]
    for block in one_by_one:
        catalog.set_resident(block, TierKind.RAM)
    blocks = catalog.ensure_prefix(DIGEST, ROOT, BYTES, join_keys(whole.keys))
    assert blocks[:4].tolist() == one_by_one
    assert [catalog.meta(block) for block in blocks.tolist()] == metas(whole)
    assert catalog.ensure_prefix(DIGEST, ROOT, BYTES, join_keys(whole.keys)).tolist() == blocks.tolist()
    mixed = [*whole.keys[:5], Prefix(NAMESPACE, 2, 1).keys[0], *whole.keys[6:]]
    assert len(catalog.ensure_prefix(DIGEST, ROOT, BYTES, join_keys(mixed))) == 6
    assert len(catalog.ensure_prefix(DIGEST, ROOT, BYTES + 1, join_keys(whole.keys))) == 0


def test_who_tells_something_else_about_a_known_block_is_not_believed(catalog: Catalog) -> None:
    first, second, third = metas(Prefix(NAMESPACE, 1, 3))
    other = BlockKey(b"\1" * 32)
    store(catalog, Prefix(NAMESPACE, 1, 2))
    assert catalog.ensure(BlockMeta(second.key, first.key, DIGEST, 2, BYTES)) == -1
    assert catalog.ensure(BlockMeta(second.key, other, DIGEST, 1, BYTES)) == -1
    assert catalog.ensure(BlockMeta(second.key, first.key, DIGEST, 1, BYTES + 1)) == -1
    assert catalog.ensure(BlockMeta(third.key, second.key, DIGEST, 5, BYTES)) == -1
    assert catalog.ensure(BlockMeta(third.key, third.key, DIGEST, 2, BYTES)) == -1
    assert catalog.ensure(BlockMeta(first.key, other, DIGEST, 0, BYTES)) == -1
    assert catalog.ensure(BlockMeta(other, third.key, DIGEST, 1 << 31, BYTES)) == -1
    assert len(catalog) == 2
    catalog.check_integrity()


def test_blocks_cannot_be_each_others_parents(catalog: Catalog) -> None:
    """Two stores that named each other's block as the parent made a ring that nothing could ever free."""
    a, b = BlockKey(b"a" * 32), BlockKey(b"b" * 32)
    catalog.set_resident(catalog.ensure(BlockMeta(a, b, DIGEST, 4, BYTES)), TierKind.RAM)
    for depth in (1, 3, 5, 9):
        block = catalog.ensure(BlockMeta(b, a, DIGEST, depth, BYTES))
        assert block == -1, depth
    catalog.check_integrity()


def test_the_columns_grow_with_the_blocks(catalog: Catalog) -> None:
    prefix = Prefix(NAMESPACE, 3, 3000)
    blocks = store(catalog, prefix)
    assert catalog.lookup(join_keys(prefix.keys), 0) == (bytes([TierKind.RAM]) * 3000, Outcome.OK)
    assert catalog.blocks_in(TierKind.RAM) == 3000
    assert catalog.blocks_only_in_ram() == blocks
    catalog.check_integrity()
