"""What is expected of a load follows what it has brought, and its silence."""

import pytest

from policies.arrival import BURST_BLOCKS, Arrival
from policies.cost import LoadCost

# 10 ms a block after 100 ms.
COST = LoadCost(0.1, 1e-5)


def arrival(blocks: int = 40) -> Arrival:
    return Arrival(COST, 1000, blocks, 50.0)


def test_before_anything_has_come_the_prediction_holds() -> None:
    assert arrival().remaining_s(40, 50.0) == pytest.approx(0.5)
    assert arrival().remaining_s(40, 50.05) == pytest.approx(0.45)
    assert arrival().remaining_s(0, 50.0) == 0.0


def test_a_queue_in_front_delays_the_first_block() -> None:
    queued = Arrival(LoadCost(0.1, 1e-5, queue_s=2.0), 1000, 40, 50.0)
    assert queued.remaining_s(1, 50.0) == pytest.approx(2.11)


def test_its_own_rate_replaces_the_predicted_one() -> None:
    load = arrival(200)
    for number in range(100):
        load.landed(50.1 + 0.03 * (number + 1))
    assert load.remaining_s(50, 53.1) == pytest.approx(50 * 0.03, rel=0.05)
    assert load.landed_blocks == 100


def test_a_burst_of_blocks_that_shared_a_link_is_no_infinite_rate() -> None:
    load = arrival()
    for _ in range(BURST_BLOCKS):
        load.landed(50.1 + BURST_BLOCKS * 0.02)
    assert 0.01 <= load.per_block_s <= 0.02
    assert load.overdue_s(50.1 + 1.9 * BURST_BLOCKS * 0.01) == 0.0, "the next burst takes as long"


def test_silence_lasts_as_long_again_as_it_has_lasted() -> None:
    load = arrival()
    due_s = 50.1 + BURST_BLOCKS * 0.01
    assert load.overdue_s(due_s) == pytest.approx(0.0)
    assert load.overdue_s(due_s + 0.3) == pytest.approx(0.3)
    assert load.remaining_s(40, due_s + 0.3) == pytest.approx(load.remaining_s(40, due_s) + 0.3)
    load.landed(due_s + 0.3)
    assert load.overdue_s(due_s + 0.3) == 0.0


def test_a_latency_shorter_than_predicted_does_no_harm() -> None:
    load = arrival()
    load.landed(50.01)
    assert 0.0 < load.per_block_s <= 0.01
    assert load.remaining_s(39, 50.01) > 0.0
