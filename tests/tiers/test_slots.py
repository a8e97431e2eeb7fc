"""The slab allocator: exact examples and, with hypothesis, its invariants under any sequence of calls."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiers.slots import PAGE_BYTES, SlotAllocator, slot_size


def test_one_size_fills_the_memory_to_the_last_whole_slot() -> None:
    slots = SlotAllocator(10 * 737_280 + PAGE_BYTES)
    offsets = [slots.allocate(737_280) for _ in range(10)]
    assert offsets == [i * 737_280 for i in range(10)]
    assert slots.allocate(737_280) is None
    assert slots.used_bytes == 10 * 737_280


def test_sizes_are_rounded_up_to_pages() -> None:
    slots = SlotAllocator(4 * PAGE_BYTES + 100)
    assert slots.total_bytes == 4 * PAGE_BYTES
    assert slots.allocate(PAGE_BYTES + 1) == 0
    assert slots.allocate(1) == 2 * PAGE_BYTES
    assert slots.used_bytes == 3 * PAGE_BYTES


def test_a_size_that_is_gone_leaves_no_fragments() -> None:
    slots = SlotAllocator(1 << 20)
    small = [slots.allocate(PAGE_BYTES) for _ in range(256)]
    assert slots.allocate(PAGE_BYTES) is None
    for offset in small:
        assert offset is not None
        slots.free(offset)
    slots.check_integrity()
    assert slots.allocate(1 << 20) == 0


def test_a_freed_slot_serves_its_own_size_first() -> None:
    slots = SlotAllocator(64 * PAGE_BYTES)
    first, second = slots.allocate(3 * PAGE_BYTES), slots.allocate(3 * PAGE_BYTES)
    assert first is not None
    assert second is not None
    slots.free(first)
    assert slots.allocate(3 * PAGE_BYTES) == first


def test_a_slot_that_is_not_handed_out_cannot_be_freed() -> None:
    slots = SlotAllocator(64 * PAGE_BYTES)
    with pytest.raises(KeyError):
        slots.free(0)


def test_memory_smaller_than_a_slot_has_no_room() -> None:
    assert SlotAllocator(100).allocate(1) is None
    assert SlotAllocator(4 * PAGE_BYTES).allocate(5 * PAGE_BYTES) is None


def test_a_slot_has_at_least_one_byte() -> None:
    with pytest.raises(ValueError):
        SlotAllocator(PAGE_BYTES).allocate(0)


_SIZES = st.sampled_from([1, PAGE_BYTES, 3 * PAGE_BYTES, 3 * PAGE_BYTES - 7, 16 * PAGE_BYTES, 41 * PAGE_BYTES])


@settings(max_examples=150, deadline=None)
@given(
    total_pages=st.integers(0, 400),
    steps=st.lists(st.one_of(_SIZES, st.integers(-50, -1)), max_size=120),
)
def test_slots_never_overlap_and_all_room_comes_back(total_pages: int, steps: list[int]) -> None:
    slots = SlotAllocator(total_pages * PAGE_BYTES)
    held: list[tuple[int, int]] = []
    for step in steps:
        if step > 0:
            offset = slots.allocate(step)
            if offset is not None:
                held.append((offset, slot_size(step)))
        elif held:
            slots.free(held.pop(-step % len(held))[0])
        slots.check_integrity()
        ordered = sorted(held)
        assert all(a + size <= b for (a, size), (b, _) in pairwise(ordered))
        assert all(offset + size <= slots.total_bytes for offset, size in held)
        assert slots.used_bytes == sum(size for _, size in held)
    for offset, _ in held:
        slots.free(offset)
    slots.check_integrity()
    if total_pages:
        assert slots.allocate(total_pages * PAGE_BYTES) == 0
