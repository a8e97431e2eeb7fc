"""The smallest size that is enough."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.sizing import smallest


@given(needed=st.integers(1, 100_000))
def test_the_smallest_size_is_found_to_within_two_percent(needed: int) -> None:
    found = smallest(lambda blocks: float(blocks >= needed), 1.0, 100_000)
    assert needed <= found.blocks <= needed * 1.02 + 1
    assert found.token_hit_ratio == 1.0


@given(needed=st.integers(1, 1_000_000))
def test_few_replays_are_needed(needed: int) -> None:
    calls = []
    smallest(lambda blocks: calls.append(blocks) or float(blocks >= needed), 1.0, 1_000_000)  # type: ignore[func-returns-value]
    assert len(calls) <= 24


@pytest.mark.parametrize("most", [0, 1, 50])
def test_where_nothing_is_enough_it_is_the_largest(most: int) -> None:
    assert smallest(lambda blocks: 0.2, 0.5, most).blocks == most
