"""The key index against a dict, and against keys that were chosen to collide."""

import random
import struct
import time

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.key import BlockKey, join_keys
from kvstore.store.index import KeyIndex


def key(number: int) -> BlockKey:
    return BlockKey(random.Random(number).randbytes(32))


@given(st.lists(st.tuples(st.sampled_from(["add", "add", "remove"]), st.integers(0, 60)), max_size=300))
def test_it_is_a_dict_with_small_reused_ids(steps: list[tuple[str, int]]) -> None:
    index = KeyIndex(capacity=4)
    model: dict[BlockKey, int] = {}
    most = 0
    for verb, number in steps:
        if verb == "add" and key(number) not in model:
            model[key(number)] = index.add(key(number))
        elif verb == "remove" and key(number) in model:
            index.remove(model.pop(key(number)))
        most = max(most, len(model))
        assert len(index) == len(model) == len(set(model.values()))
    assert all(found < most for found in model.values())
    wanted = [model.get(key(number), -1) for number in range(61)]
    assert [index.find(key(number)) for number in range(61)] == wanted
    assert index.find_joined(join_keys([key(number) for number in range(61)])).tolist() == wanted
    assert all(index.key(found) == known for known, found in model.items())


def test_keys_that_share_all_but_a_few_bits_cost_no_more_than_others() -> None:
    """Where a key lands came from its first eight bytes alone, so keys that share them made one long chain."""
    high_bits = [BlockKey(b"\7" * 24 + struct.pack("<Q", number << 48)) for number in range(4000)]
    low_bits = [BlockKey(struct.pack("<Q", number) + b"\7" * 24) for number in range(4000)]
    for keys in (high_bits, low_bits):
        index = KeyIndex()
        for chosen in keys:
            index.add(chosen)
        table = index._table
        runs = "".join("x" if entry != -1 else " " for entry in table.tolist()).split()
        assert max(map(len, runs)) < 200


def test_a_table_full_of_removed_keys_is_made_anew_and_forgets_nothing() -> None:
    index = KeyIndex()
    kept = {key(number): index.add(key(number)) for number in range(3000)}
    for number in range(10_000, 40_000):
        index.remove(index.add(key(number)))
    assert all(index.find(known) == found for known, found in kept.items())
    assert len(index._table) <= 32_768
    assert index.capacity <= 4096


def test_making_the_table_anew_does_not_hold_up_the_control_thread() -> None:
    """Key by key it took a second for a million blocks."""
    index = KeyIndex()
    choice = random.Random(1)
    for _ in range(60_000):
        index.add(BlockKey(choice.randbytes(32)))
    started = time.process_time()
    index._rebuild(len(index))
    assert time.process_time() - started < 0.1
