"""Where both ends meet is found as exactly as by trying every end, and where loads do not come nothing waits."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cost import PrefillCost
from policies.meeting import Meeting, Rest, between_s, meet, through_s

PREFILL = PrefillCost(64, 0.02, 1e-3, 1e-6)


def loader(rest: Rest, first_s: float, block_s: float) -> Callable[[int, int], float]:
    """All blocks lie in one tier."""

    def loaded_s(start: int, end: int) -> float:
        count = (start - rest.front) + (rest.cached - end)
        return first_s + block_s * count if count else 0.0

    return loaded_s


def by_trying(rest: Rest, loaded_s: Callable[[int, int], float]) -> float:
    best = math.inf
    for start in {rest.front, max(rest.front, rest.head_end)}:
        begin_s = max(rest.gpu_queue_s, loaded_s(start, rest.cached))
        for end in range(start, rest.cached):
            ready_s = max(begin_s + between_s(rest, PREFILL, start, end), loaded_s(start, end))
            best = min(best, ready_s + through_s(rest, PREFILL, rest.cached))
        best = min(best, begin_s + through_s(rest, PREFILL, start))
    return best


@given(
    st.integers(0, 20),
    st.integers(0, 8),
    st.integers(0, 40),
    st.integers(1, 200),
    st.floats(0, 0.5),
    st.floats(0, 0.1),
    st.floats(0, 1.0),
)
def test_no_other_end_is_better(
    front: int, head: int, blocks: int, rest_tokens: int, first_s: float, block_s: float, queue_s: float
) -> None:
    cached = front + blocks
    rest = Rest(cached * 16 + rest_tokens, 16, front, min(front + head, cached), cached, queue_s)
    loaded_s = loader(rest, first_s, block_s)
    meeting = meet(rest, PREFILL, loaded_s)
    assert rest.front <= meeting.start <= meeting.end <= cached
    # Chunks make computing a staircase, of which the bisection sees one step.
    assert meeting.seconds * (1 - 0.06) <= by_trying(rest, loaded_s) + PREFILL.per_step_s + 1e-9


def test_what_never_comes_is_computed_in_one_go() -> None:
    rest = Rest(650, 16, 0, 0, 40)
    meeting = meet(rest, PREFILL, lambda start, end: math.inf if end < 40 else 0.0)
    assert (meeting.start, meeting.end) == (0, 40)


def test_a_chunk_that_takes_longer_than_the_rest_of_the_load_is_not_begun() -> None:
    rest = Rest(650, 16, 0, 0, 40)
    assert meet(rest, PREFILL, loader(rest, 0.01, 0.0)).end == 0


def test_both_ends_arrive_together() -> None:
    rest = Rest(650, 16, 0, 0, 40)
    meeting: Meeting = meet(rest, PREFILL, loader(rest, 0.0, 0.02))
    computed_s = between_s(rest, PREFILL, 0, meeting.end)
    assert computed_s == pytest.approx(0.02 * (40 - meeting.end), abs=0.03)


def test_a_queue_in_front_of_the_gpu_leaves_more_to_the_load() -> None:
    rest, busy = Rest(650, 16, 0, 0, 40), Rest(650, 16, 0, 0, 40, gpu_queue_s=0.4)
    assert meet(busy, PREFILL, loader(busy, 0.0, 0.02)).end < meet(rest, PREFILL, loader(rest, 0.0, 0.02)).end


def test_the_head_that_is_nearly_there_is_waited_for() -> None:
    rest = Rest(650, 16, 0, 20, 40)

    def loaded_s(start: int, end: int) -> float:
        return max(0.02 if start or end < 20 else 0.0, 1.0 * (40 - max(end, 20)))

    meeting = meet(rest, PREFILL, loaded_s)
    assert (meeting.start, meeting.end) == (20, 40)


def test_a_price_on_gpu_seconds_waits_rather_than_computes() -> None:
    rest = Rest(650, 16, 0, 0, 40)
    loaded_s = loader(rest, 0.0, 0.02)
    assert meet(rest, PREFILL, loaded_s, gpu_price=5.0).end < meet(rest, PREFILL, loaded_s).end


def test_a_front_that_was_not_planned_is_computed_only_for_a_large_gain() -> None:
    """Every estimate of a gain of 5 to 10% over loading everything came out as a loss of 50% on a fast link."""
    rest = Rest(129 * 16, 16, 0, 0, 128)
    fast, slow = loader(rest, 0.01, 0.003), loader(rest, 0.01, 0.02)
    planned = meet(rest, PREFILL, fast)
    assert planned.end > planned.start
    unplanned = meet(rest, PREFILL, fast, is_planned=False)
    assert unplanned.start == unplanned.end
    assert planned.seconds < unplanned.seconds < planned.seconds / 0.75
    # A load that is slower than it was thought to be is another matter.
    late = meet(rest, PREFILL, slow, is_planned=False)
    assert late.end > late.start
