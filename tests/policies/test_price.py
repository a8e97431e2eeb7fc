"""The price of a GPU second is how many others it delays."""

import pytest

from policies.price import GpuPrice


def loaded(num_gpus: int, arrivals_per_s: int, busy: float, seconds: int = 3000) -> GpuPrice:
    price = GpuPrice(num_gpus, 0.0)
    for second in range(1, seconds + 1):
        for _ in range(arrivals_per_s):
            price.arrived(float(second))
        price.computed(busy * num_gpus, float(second))
    return price


def test_it_is_the_number_of_requests_that_come_before_the_queue_is_empty() -> None:
    """Two arrivals at every full second, half of the time busy: 3.2 s of work are gone after 6.4 s. After the first of
    two 13 others have come by then, after the second one 12."""
    assert loaded(1, 2, 0.5).ask(3.2, 3000.0) == pytest.approx(12.5, rel=0.02)


def test_those_who_come_at_the_same_moment_wait_too() -> None:
    assert loaded(1, 5, 0.1).ask(0.1, 3000.0) == pytest.approx(2.0, rel=0.02)


def test_gpus_share_the_arrivals() -> None:
    assert loaded(4, 8, 0.5).ask(3.2, 3000.0) == pytest.approx((6 * 8 + 3.5) / 4, rel=0.02)


def test_a_gpu_that_nobody_else_wants_costs_nothing() -> None:
    price = GpuPrice(2, 50.0)
    assert price.ask(10.0, 50.0) == 0.0
    assert loaded(1, 1, 0.1).ask(0.5, 3000.0) == 0.0


def test_it_rises_with_the_queue_and_has_a_bound_at_full_load() -> None:
    price = loaded(1, 2, 1.0)
    assert price.ask(1.0, 3000.0) < price.ask(2.0, 3000.0) < 60.0


def test_the_first_requests_are_not_taken_for_a_quiet_time() -> None:
    assert loaded(1, 2, 0.5, seconds=10).ask(3.2, 10.0) == pytest.approx(12.5, rel=0.1)
