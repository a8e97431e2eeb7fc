"""The key index against a dict, and against keys that were chosen to collide."""

import random
import struct
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.index import KeyIndex, as_words
from kvstore.core.key import BlockKey, join_keys


def key(number: int) -> BlockKey:
    return BlockKey(random.Random(number).randbytes(32))


@given(
    st.lists(st.tuples(st.sampled_from(["add", "add", "many", "remove", "remove"]), st.integers(0, 60)), max_size=300)
)
def test_it_is_a_dict_with_small_reused_ids(steps: list[tuple[str, int]]) -> None:
    index = KeyIndex(capacity=4)
    model: dict[BlockKey, int] = {}
    most = 0
    for verb, number in steps:
        if verb == "add" and key(number) not in model:
            model[key(number)] = index.add(key(number))
        elif verb == "remove" and key(number) in model:
            index.remove(model.pop(key(number)))
        elif verb == "many":
            new = [key(other) for other in range(number, number + 9) if key(other) not in model]
            model.update(zip(new, index.add_many(as_words(join_keys(new))).tolist(), strict=True))
        most = max(most, len(model))
        assert len(index) == len(model) == len(set(model.values()))
    assert all(found < most for found in model.values())
    wanted = [model.get(key(number), -1) for number in range(70)]
    assert [index.find(key(number)) for number in range(70)] == wanted
    assert index.find_joined(join_keys([key(number) for number in range(70)])).tolist() == wanted
    assert all(index.key(found) == known for known, found in model.items())


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 39), st.integers(1, 40)), max_size=8),
    st.lists(st.integers(0, 239), max_size=120),
)
def test_pieces_of_prompts_that_were_added_together_are_found_in_any_order(
    pieces: list[tuple[int, int, int]], removed: list[int]
) -> None:
    index = KeyIndex(capacity=4)
    prompts = [[key(1000 * prompt + at) for at in range(40)] for prompt in range(6)]
    model: dict[BlockKey, int] = {}
    for prompt in prompts:
        model.update(zip(prompt, index.add_many(as_words(join_keys(prompt))).tolist(), strict=True))
    for number in removed:
        gone = prompts[number // 40][number % 40]
        if gone in model:
            index.remove(model.pop(gone))
    # Rows that are free and keys of zeros look alike to nobody.
    asked = [one for prompt, at, count in pieces for one in [*prompts[prompt][at : at + count], BlockKey(bytes(32))]]
    assert index.find_joined(join_keys(asked)).tolist() == [model.get(one, -1) for one in asked]


@pytest.mark.parametrize("given_back", [(9, 8, 7, 6), (6, 7, 8, 9), (7, 9, 6, 8)])
@pytest.mark.parametrize("at_once", [True, False])
def test_ids_that_were_given_back_in_any_order_are_given_out_in_a_row(
    given_back: tuple[int, ...], at_once: bool
) -> None:
    """Given back head first they were given out tail first, and after a daemon had been emptied every prompt was
    looked up key by key, 0.62 instead of 0.52 ms in all."""
    index = KeyIndex()
    index.add_many(as_words(join_keys([key(number) for number in range(20)])))
    for old_id in given_back:
        index.remove(old_id)
    new = [key(number) for number in range(100, 106)]
    again = index.add_many(as_words(join_keys(new))).tolist() if at_once else [index.add(one) for one in new]
    assert again == [6, 7, 8, 9, 20, 21]


def test_ids_go_round_from_the_last_that_was_given_out() -> None:
    index = KeyIndex()
    kept = [index.add(key(number)) for number in range(8)]
    for old_id in (2, 6):
        index.remove(old_id)
    assert index.add(key(20)) == 2
    index.remove(kept[1])
    assert [index.add(key(number)) for number in range(21, 24)] == [6, 1, 8]


def with_one_home(capacity: int = 1024) -> KeyIndex:
    """An index in which all keys have one home, so that they fill a row of places."""
    index = KeyIndex(capacity)
    index.mixed = lambda words: np.zeros(len(words), dtype=np.uint64)  # type: ignore[method-assign]
    index._home_of = lambda _: 0  # type: ignore[method-assign]
    return index


# The last one is asked for place by place.
@pytest.mark.parametrize("count", [1, 9, 30, 200, 600])
def test_keys_far_from_home_are_found_and_strangers_among_them_are_not(count: int) -> None:
    """The row is longer than what is looked at in one step."""
    index = with_one_home()
    # Alike in their first word, by which they are looked for.
    keys = [BlockKey(b"alike..." + number.to_bytes(24, "little")) for number in range(2 * count)]
    known = {one: index.add(one) for one in random.Random(1).sample(keys[:count], count)}
    asked = random.Random(2).sample(keys, len(keys))
    assert index.find_many(as_words(join_keys(asked))).tolist() == [known.get(one, -1) for one in asked]


def test_the_last_row_is_not_found_at_a_place_that_is_empty() -> None:
    """An empty place reads as the row before the first, which is the last one."""
    index = with_one_home(capacity=8)
    keys = [BlockKey(b"alike..." + number.to_bytes(24, "little")) for number in range(8)]
    for one in keys:
        index.add(one)
    assert index.capacity == 8, "every row is in use"
    asked = [keys[7], keys[7], *keys[1:7]]
    assert index.find_many(as_words(join_keys(asked))).tolist() == [7, 7, 1, 2, 3, 4, 5, 6]


def test_keys_that_share_all_but_a_few_bits_cost_no_more_than_others() -> None:
    """Where a key lands came from its first eight bytes alone, so keys that share them made one long chain."""
    high_bits = [BlockKey(b"\7" * 24 + struct.pack("<Q", number << 48)) for number in range(4000)]
    low_bits = [BlockKey(struct.pack("<Q", number) + b"\7" * 24) for number in range(4000)]
    for keys in (high_bits, low_bits):
        # Each index draws factors of its own, and to keys that are so regular one in a hundred is unkind.
        assert sorted(longest_run(keys) for _ in range(5))[2] < 200


def longest_run(keys: list[BlockKey]) -> int:
    """Return how many places next to each other are taken in a new index of these keys."""
    index = KeyIndex()
    for chosen in keys:
        index.add(chosen)
    runs = "".join("x" if entry else " " for entry in index._table.tolist()).split()
    return max(map(len, runs))


def test_keys_that_come_and_go_leave_nothing_behind_and_never_need_a_new_table() -> None:
    """Marks of removed keys filled the table until it was made anew, which at a million keys took a fifth of a second,
    again and again."""
    index = KeyIndex()
    kept = {key(number): index.add(key(number)) for number in range(3000)}
    before = index._table
    for number in range(10_000, 40_000):
        index.remove(index.add(key(number)))
    assert index._table is before and np.count_nonzero(before) == 3000
    assert all(index.find(known) == found for known, found in kept.items())
    assert index.capacity <= 4096


def test_making_the_table_anew_does_not_hold_up_the_control_thread() -> None:
    """Key by key it took a second for a million blocks."""
    index = KeyIndex()
    choice = random.Random(1)
    keys = [BlockKey(choice.randbytes(32)) for _ in range(60_000)]
    for one in keys:
        index.add(one)
    started = time.process_time()
    for one in keys:
        index.find(one)
    key_by_key_s = time.process_time() - started
    started = time.process_time()
    index._rebuild(2 * len(index))
    assert time.process_time() - started < key_by_key_s / 3, "a twelfth of it, where it is done in columns"
