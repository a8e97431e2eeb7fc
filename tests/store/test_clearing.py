"""Room for blocks of another size: exact examples, and with hypothesis what holds in any mixture of sizes."""

from collections.abc import Sequence
from itertools import count, groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.block import BlockMeta
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome, TierKind
from kvstore.store.catalog import Catalog
from kvstore.store.clearing import cheapest_run
from kvstore.store.room import Room
from tiers.ram import RamTier
from tiers.slots import PAGE_BYTES, Cells, slot_size

KIB, MIB = 1 << 10, 1 << 20


class Generations:
    """What the RAM tier needs of a region, without its memory."""

    def __init__(self, data_bytes: int) -> None:
        self.data_bytes = data_bytes
        self.generations: dict[int, int] = {}

    def bump(self, offset: int) -> int:
        self.generations[offset] = self.generation(offset) + 1
        return self.generations[offset]

    def generation(self, offset: int) -> int:
        return self.generations.get(offset, 0)


class Memory:
    """A room over RAM alone, and blocks of any size in it, each the only one of its prefix."""

    def __init__(self, data_bytes: int) -> None:
        region: Any = Generations(data_bytes)
        self.now = 10.0
        self.catalog = Catalog()
        self.ram = RamTier(region)
        self.room = Room(self.catalog, self.ram, {}, lambda _: False, lambda: self.now)
        self.numbers = count(1)
        self.pinned: list[int] = []
        self.writing: list[int] = []

    @property
    def evicted(self) -> int:
        return self.room.evicted[TierKind.RAM]

    def begin(self, num_bytes: int) -> int | None:
        """Reserve a slot for a new block and return its id."""
        self.now += 2.0
        digest = num_bytes.to_bytes(32, "little")
        key = BlockKey(next(self.numbers).to_bytes(32, "little"))
        block = self.catalog.ensure(BlockMeta(key, BlockKey(digest), digest, 0, num_bytes))
        self.catalog.begin_write(block)
        if self.room.reserve(block) is None:
            self.catalog.abort_write(block)
            return None
        self.writing.append(block)
        return block

    def finish(self, block: int) -> int:
        self.writing.remove(block)
        self.ram.publish(self.catalog.key(block))
        self.catalog.finish_write(block)
        self.room.policies[TierKind.RAM].on_insert([block])
        return block

    def store(self, num_bytes: int) -> int | None:
        block = self.begin(num_bytes)
        return None if block is None else self.finish(block)

    def fill(self, num_bytes: int) -> list[BlockKey]:
        """Store blocks until the first would have to be evicted for another. (An id may become another block's.)"""
        blocks = []
        while self.ram.usage().used_bytes + slot_size(num_bytes) <= (self.ram.usage().capacity_bytes or 0):
            block = self.store(num_bytes)
            assert block is not None
            blocks.append(self.catalog.key(block))
        assert self.evicted == 0
        return blocks

    def pin(self, block: int) -> None:
        self.catalog.pin(block)
        self.pinned.append(block)

    def resident(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        return [key for key in keys if self.ram.contains([key]) == [Outcome.OK]]

    def longest_run_that_may_go(self) -> int:
        """By looking at every cell."""
        cells = self.ram.cells(None, 0)
        longest = 0
        for stays, run in groupby(zip(cells.starts, cells.ends, cells.is_used, strict=True), key=self._stays):
            if not stays:
                run_cells = list(run)
                longest = max(longest, int(run_cells[-1][1] - run_cells[0][0]))
        return longest

    def check_integrity(self) -> None:
        self.ram.check_integrity()
        self.catalog.check_integrity()
        for block in self.pinned:
            assert self.catalog.resident(block, TierKind.RAM), "a pinned block was evicted"
        assert self.ram.usage().blocks == self.catalog.blocks_in(TierKind.RAM) + len(self.writing)

    def _stays(self, cell: tuple[Any, Any, Any]) -> bool:
        start, _, is_used = cell
        if not is_used:
            return False
        key = self.ram.block_at(int(start))
        return key is None or self.catalog.pinned(self.catalog.find(key))


def test_a_burst_of_a_new_size_evicts_about_what_it_needs() -> None:
    """It took room slot by slot all over the region until by chance a whole slab was empty: half of all blocks went."""
    memory = Memory(512 * MIB)
    small = memory.fill(40 * KIB)
    large = [memory.store(2 * MIB) for _ in range(32)]
    assert None not in large
    assert 32 * 2 * MIB <= memory.evicted * 40 * KIB <= 1.3 * 32 * 2 * MIB
    # They came in this order, so the coldest are the first.
    assert len(memory.resident(small[: len(small) // 10])) < len(small) // 100
    memory.check_integrity()


def test_a_small_block_takes_one_large_one_whose_room_serves_the_next_small_ones_too() -> None:
    memory = Memory(64 * MIB)
    large = memory.fill(2 * MIB)
    for _ in range(2 * MIB // (40 * KIB)):
        assert memory.store(40 * KIB) is not None
    assert memory.evicted == 1
    assert memory.resident(large) == large[1:]


def test_the_coldest_neighbours_go_though_others_lie_in_front() -> None:
    memory = Memory(16 * MIB)
    small = memory.fill(64 * KIB)
    cold = small[100:132]
    memory.room.policies[TierKind.RAM].on_access([memory.catalog.find(key) for key in small if key not in cold])
    assert memory.store(2 * MIB) is not None
    assert memory.resident(cold) == []
    assert memory.evicted == len(cold)


def test_pinned_and_half_written_blocks_stay_and_the_run_goes_around_them() -> None:
    memory = Memory(4 * MIB)
    half_written = memory.begin(64 * KIB)
    assert half_written is not None
    small = memory.fill(64 * KIB)
    for key in small[9::10]:
        memory.pin(memory.catalog.find(key))
    assert memory.store(9 * 64 * KIB) is not None
    assert memory.store(11 * 64 * KIB) is None, "there is no run of so many that may go"
    assert memory.evicted == 9, "a run that cannot be is not begun"
    memory.finish(half_written)
    memory.check_integrity()


def test_a_block_larger_than_a_slab_gets_a_run_over_several() -> None:
    memory = Memory(64 * MIB)
    memory.fill(64 * KIB)
    assert memory.store(16 * MIB) is not None
    assert memory.evicted == 256
    memory.check_integrity()


def test_blocks_of_the_own_size_go_where_they_are_the_coldest() -> None:
    memory = Memory(8 * MIB)
    blocks = memory.fill(MIB)
    memory.store(MIB)
    assert memory.resident(blocks) == blocks[1:]


def test_what_cannot_be_cleared_is_not_looked_for_all_the_time() -> None:
    memory = Memory(MIB)
    for key in memory.fill(64 * KIB):
        memory.pin(memory.catalog.find(key))
    looks: list[int | None] = []
    cells = memory.ram.cells
    memory.ram.cells = lambda *args: looks.append(args[0]) or cells(*args)  # type: ignore[method-assign, func-returns-value]
    for _ in range(10):
        assert memory.store(128 * KIB) is None
        memory.now -= 2.0
    assert looks == [None]
    memory.catalog.unpin(memory.pinned.pop())
    memory.catalog.unpin(memory.pinned.pop())
    memory.now += 2.0
    assert memory.store(128 * KIB) is not None, "it is looked for again after a while"


_SIZES = st.sampled_from([PAGE_BYTES, 3 * PAGE_BYTES, 3 * PAGE_BYTES - 7, 16 * PAGE_BYTES, 41 * PAGE_BYTES])
_STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "store", "store", "begin", "pin", "let go"]), _SIZES), max_size=80
)


@settings(max_examples=150, deadline=None)
@given(pages=st.integers(41, 300), steps=_STEPS)
def test_a_slot_is_found_exactly_where_there_is_a_run_that_may_go(pages: int, steps: list[tuple[str, int]]) -> None:
    memory = Memory(pages * PAGE_BYTES)
    for action, num_bytes in steps:
        if action == "let go":
            while memory.writing:
                memory.finish(memory.writing[-1])
            while memory.pinned:
                memory.catalog.unpin(memory.pinned.pop())
            continue
        possible = memory.longest_run_that_may_go() >= slot_size(num_bytes)
        block = memory.begin(num_bytes) if len(memory.writing) < 3 else memory.store(num_bytes)
        if block is not None and action != "begin" and block in memory.writing:
            memory.finish(block)
            if action == "pin" and len(memory.pinned) < 4:
                memory.pin(block)
        assert (block is not None) == possible
        memory.check_integrity()


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(_SIZES, min_size=1, max_size=60), pages=st.integers(41, 500))
def test_without_pins_every_size_always_finds_room(sizes: list[int], pages: int) -> None:
    memory = Memory(pages * PAGE_BYTES)
    for num_bytes in sizes * 3:
        before = memory.evicted
        assert memory.store(num_bytes) is not None
        assert (memory.evicted - before) * PAGE_BYTES <= 8 * slot_size(num_bytes) + 41 * PAGE_BYTES
    memory.check_integrity()


# ---------------------------------------------------------------- the cheapest run


@pytest.fixture
def cells() -> Cells:
    ends = np.cumsum([4, 4, 4, 10, 4, 4])
    return Cells(np.concatenate(([0], ends[:-1])), ends, np.ones(6, dtype=np.bool_))


def test_the_cheapest_run_is_taken_and_of_equals_the_shortest(cells: Cells) -> None:
    costs = np.array([1.0, 5.0, 1.0, 2.0, 1.0, 1.0])
    assert cheapest_run(cells, costs, 4) == (0, 1)
    assert cheapest_run(cells, costs, 8) == (4, 6)
    assert cheapest_run(cells, np.zeros(6), 8) == (0, 2)
    assert cheapest_run(cells, costs, 30) == (0, 6)


def test_no_run_crosses_what_must_stay(cells: Cells) -> None:
    costs = np.array([1.0, 1.0, np.inf, 9.0, 1.0, np.inf])
    assert cheapest_run(cells, costs, 8) == (0, 2)
    assert cheapest_run(cells, costs, 9) == (3, 4)
    assert cheapest_run(cells, costs, 15) is None
    assert cheapest_run(cells, costs, 31) is None
