"""One direction of a link: what its bandwidth and delay let through, by a clock of the test's own."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.bench.plan.lane import Lane


def sent_within(lane: Lane[int], seconds: float, step_s: float = 0.0005) -> int:
    """Bytes that arrive when a sender always has more, of a reader that looks every `step_s`."""
    arrived, now = 0, 0.0
    for number in range(round(seconds / step_s) + 1):
        now = number * step_s
        while lane.free_at_s() <= now:
            lane.take(now, lane.piece_bytes, lane.piece_bytes)
        arrived += sum(lane.arrived(now))
    return arrived


@pytest.mark.parametrize("bytes_per_s", [5e6, 12e6, 60e6, 300e6])
def test_no_more_arrives_than_the_bandwidth_and_almost_as_much(bytes_per_s: float) -> None:
    arrived = sent_within(Lane(bytes_per_s), 2.0)
    assert 0.99 * 2 * bytes_per_s < arrived < 1.01 * 2 * bytes_per_s


def test_what_was_read_arrives_after_it_was_sent_and_then_the_delay() -> None:
    lane: Lane[str] = Lane(1000.0, delay_s=0.5)
    now = 10.0
    assert lane.take(now, 100, "first") == pytest.approx(10.5 + 0.1, abs=0.005)
    assert lane.take(now, 100, "second") == pytest.approx(10.5 + 0.2, abs=0.005)
    assert lane.next_due_s() == pytest.approx(10.6, abs=0.005)
    assert not lane.arrived(10.59)
    assert list(lane.arrived(10.65)) == ["first"]
    assert list(lane.arrived(math.inf)) == ["second"]
    assert lane.next_due_s() is None


def test_without_a_limit_only_the_delay_counts() -> None:
    lane: Lane[int] = Lane(0.0, delay_s=0.25)
    assert lane.free_at_s() == 0.0
    assert lane.take(3.0, 1 << 30, 1) == 3.25


def test_a_connection_that_is_being_opened_waits_longer_than_the_others() -> None:
    lane: Lane[str] = Lane(0.0, delay_s=0.1)
    lane.take(0.0, 1, "new", not_before_s=0.3)
    lane.take(0.0, 1, "old")
    assert list(lane.arrived(0.1)) == ["old"]
    assert list(lane.arrived(0.3)) == ["new"]


def test_a_shorter_delay_holds_for_what_is_on_the_way() -> None:
    lane: Lane[int] = Lane(1000.0, delay_s=10.0)
    lane.take(0.0, 5000, 1)
    lane.change(1.0, 0.0, 0.0)
    assert list(lane.arrived(1.0)) == [1]


def test_a_pause_is_not_made_up_for_beyond_some_milliseconds() -> None:
    lane: Lane[int] = Lane(1e6)
    lane.take(0.0, 1000, 1)
    # Idle for a second: the next megabyte takes a second all the same.
    assert lane.take(1.0, 1_000_000, 1) > 1.99


@given(st.lists(st.tuples(st.floats(0, 0.1), st.integers(1, 1 << 18)), max_size=40), st.floats(1e6, 1e9))
def test_pieces_arrive_in_the_order_in_which_they_were_read(
    pieces: list[tuple[float, int]], bytes_per_s: float
) -> None:
    lane: Lane[int] = Lane(bytes_per_s, delay_s=0.01)
    now = 0.0
    for number, (pause_s, num_bytes) in enumerate(pieces):
        now += pause_s
        lane.take(now, num_bytes, number)
    assert list(lane.arrived(math.inf)) == list(range(len(pieces)))
