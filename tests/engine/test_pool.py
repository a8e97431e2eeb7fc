"""The bookkeeping of HBM pool blocks: exact small cases, and a state machine against a plain model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.pool import BlockPool
from kvstore.core.key import BlockKey, Namespace, chain_keys

NAMESPACE = Namespace("m", "d", "float32", "LKTHD-1", 1, 64, 1, 1, 1)


def keys_of(*tokens: int) -> list[BlockKey]:
    return chain_keys(NAMESPACE, tokens)


def cache(pool: BlockPool, keys: list[BlockKey]) -> list[int]:
    """Compute `keys` as one finished request would: what was there is shared, the rest is new."""
    table = pool.acquire_prefix(keys)
    k = pool.pool_blocks_per_block
    while len(table) < len(keys) * k:
        fresh = pool.allocate(k)
        assert fresh is not None
        depth = len(table) // k
        pool.index(keys[depth], keys[depth - 1] if depth else NAMESPACE.root(), fresh)
        table += fresh
    pool.release(table)
    return table


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    taken = pool.allocate(4)
    assert taken is not None
    assert sorted(taken) == [0, 1, 2, 3]
    assert pool.allocate(1) is None
    pool.release(taken)
    assert pool.num_free == 4
    pool.check_integrity()


def test_a_finished_prefix_is_found_again_and_shared() -> None:
    pool = BlockPool(8)
    keys = keys_of(1, 2, 3)
    table = cache(pool, keys)
    assert pool.num_cached == 3
    assert pool.num_free == 5
    first = pool.acquire_prefix(keys_of(1, 2, 9))
    second = pool.acquire_prefix(keys)
    assert first == table[:2]
    assert second == table
    pool.release(first)
    assert pool.num_cached == 0, "the second reference still counts"
    pool.release(second)
    assert pool.num_cached == 3
    pool.check_integrity()


def test_the_least_recently_used_leaf_is_reused_first() -> None:
    pool = BlockPool(5)
    old, new = keys_of(1, 2, 3), keys_of(1, 7, 8)
    cache(pool, old)
    cache(pool, new)
    assert pool.num_free == 0
    pool.allocate(1)
    assert (pool.num_resident(old), pool.num_resident(new)) == (2, 3)
    pool.allocate(1)
    assert (pool.num_resident(old), pool.num_resident(new)) == (1, 3)
    pool.allocate(1)
    assert (pool.num_resident(old), pool.num_resident(new)) == (1, 2), "the shared head outlives both tails"
    pool.check_integrity()


def test_a_held_block_is_not_reused_before_its_store_is_acknowledged() -> None:
    pool = BlockPool(2)
    taken = pool.allocate(2)
    assert taken is not None
    pool.hold(taken[:1])
    pool.release(taken)
    assert (pool.num_available, pool.num_held_only) == (1, 1)
    assert pool.allocate(2) is None
    pool.unhold(taken[:1])
    assert (pool.num_available, pool.num_held_only) == (2, 0)
    pool.check_integrity()


def test_a_held_cached_block_can_be_acquired_and_stays_when_the_hold_ends() -> None:
    pool = BlockPool(2)
    keys = keys_of(1)
    table = pool.allocate(1)
    assert table is not None
    pool.index(keys[0], NAMESPACE.root(), table)
    pool.hold(table)
    pool.release(table)
    assert pool.acquire_prefix(keys) == table
    pool.unhold(table)
    pool.check_integrity()
    assert pool.allocate(2) is None
    pool.release(table)
    assert pool.num_cached == 1


def test_a_second_copy_of_a_block_is_not_indexed_and_its_child_still_is() -> None:
    pool = BlockPool(8)
    keys = keys_of(1, 2)
    cache(pool, keys[:1])
    own = pool.allocate(2)
    assert own is not None
    assert not pool.index(keys[0], NAMESPACE.root(), own[:1])
    assert pool.index(keys[1], keys[0], own[1:])
    pool.release(own)
    assert pool.num_resident(keys) == 2
    pool.check_integrity()


def test_an_inner_block_is_reused_where_its_only_children_are_in_use() -> None:
    """Two equal prompts at once: the first one's head is idle while the second one's tail, which continues that
    head by key, still runs. Counting the head as available but never giving it would hang the scheduler."""
    pool = BlockPool(3)
    keys = keys_of(1, 2)
    cache(pool, keys[:1])
    own = pool.allocate(2)
    assert own is not None
    pool.index(keys[1], keys[0], own[1:])
    assert pool.num_available == 1
    assert pool.allocate(1) is not None
    assert pool.num_resident(keys) == 0
    pool.check_integrity()


def test_dropping_forgets_idle_blocks_only() -> None:
    pool = BlockPool(6)
    keys = keys_of(1, 2, 3)
    cache(pool, keys)
    used = pool.acquire_prefix(keys[:1])
    assert pool.drop() == 2
    assert pool.num_resident(keys) == 1
    pool.release(used)
    pool.check_integrity()


def test_blocks_of_several_pool_blocks_are_kept_and_reused_whole() -> None:
    pool = BlockPool(6, pool_blocks_per_block=3)
    keys = keys_of(1, 2)
    table = cache(pool, keys)
    assert pool.acquire_prefix(keys) == table
    pool.release(table)
    assert pool.allocate(1) is not None
    assert pool.num_resident(keys) == 1
    assert pool.num_free == 2
    pool.check_integrity()


def test_misuse_is_refused() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="no reference"):
        pool.release([0])
    with pytest.raises(ValueError, match="not in use"):
        pool.hold([0])
    with pytest.raises(ValueError, match="not held"):
        pool.unhold([0])
    with pytest.raises(ValueError, match="pool blocks"):
        pool.index(keys_of(1)[0], NAMESPACE.root(), [0, 1])


def test_a_prefix_used_over_and_over_does_not_grow_the_bookkeeping() -> None:
    pool = BlockPool(4)
    keys = keys_of(1, 2, 3)
    for _ in range(1000):
        cache(pool, keys)
    assert len(pool._idle_leaves) < 200
    pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Requests over a small alphabet of prefixes; the model is who holds what, and which key had which blocks."""

    @initialize(blocks=st.integers(2, 12), k=st.integers(1, 3))
    def start(self, blocks: int, k: int) -> None:
        self.k = k
        self.pool = BlockPool(blocks * k, k)
        self.tables: list[list[int]] = []
        self.held: list[list[int]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5), tail=st.integers(0, 2))
    def run_request(self, tokens: list[int], tail: int) -> None:
        keys = keys_of(*tokens)
        before = self.pool.num_resident(keys)
        table = self.pool.acquire_prefix(keys)
        assert len(table) == before * self.k
        needed = (len(keys) - before) * self.k + tail
        available = self.pool.num_available
        fresh = self.pool.allocate(needed)
        assert (fresh is None) == (needed > available)
        if fresh is None:
            self.pool.release(table)
            return
        for table_before in self.tables + self.held:
            assert not set(fresh) & set(table_before), "a block in use or held was handed out again"
        table += fresh
        for depth in range(before, len(keys)):
            parent = keys[depth - 1] if depth else NAMESPACE.root()
            self.pool.index(keys[depth], parent, table[depth * self.k : (depth + 1) * self.k])
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        # Stores hold whole blocks.
        part = table[: data.draw(st.integers(0, len(table) // self.k)) * self.k]
        self.pool.hold(part)
        self.held.append(part)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        self.pool.unhold(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @rule()
    def drop(self) -> None:
        self.pool.drop()
        assert self.pool.num_cached == 0

    @invariant()
    def is_intact(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            in_use = {block for table in self.tables for block in table}
            held = {block for part in self.held for block in part} - in_use
            assert self.pool.num_held_only == len(held)
            assert self.pool.num_available == self.pool.num_pool_blocks - len(in_use | held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
