"""The circuit breaker, step by step."""

import pytest

from tests.support.clock import Clock
from tiers.breaker import CircuitBreaker


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(faults_to_open=3, first_wait_s=2.0, longest_wait_s=6.0, clock=clock)


def test_it_opens_after_faults_in_a_row(breaker: CircuitBreaker) -> None:
    assert [breaker.failed() for _ in range(3)] == [False, False, True]
    assert breaker.is_open
    assert not breaker.admits()


def test_a_success_between_faults_keeps_it_closed(breaker: CircuitBreaker) -> None:
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        assert breaker.succeeded() is False
    assert breaker.admits()


def test_after_the_wait_one_probe_at_a_time_is_admitted(breaker: CircuitBreaker, clock: Clock) -> None:
    for _ in range(3):
        breaker.failed()
    clock.now = 1.9
    assert not breaker.admits()
    clock.now = 2.0
    assert breaker.admits()
    assert not breaker.admits()
    assert breaker.succeeded() is True
    assert breaker.admits()
    assert breaker.admits()


def test_each_probe_that_fails_doubles_the_wait_up_to_a_limit(breaker: CircuitBreaker, clock: Clock) -> None:
    for _ in range(3):
        breaker.failed()
    for wait_s in (2.0, 4.0, 6.0, 6.0):
        clock.now += wait_s - 0.1
        assert not breaker.admits()
        clock.now += 0.1
        assert breaker.admits()
        assert breaker.failed() is False
    clock.now += 6.0
    assert breaker.admits()
    breaker.succeeded()
    for _ in range(3):
        breaker.failed()
    clock.now += 2.0
    assert breaker.admits()


def test_late_faults_of_calls_from_before_do_not_lengthen_the_wait(breaker: CircuitBreaker, clock: Clock) -> None:
    for _ in range(6):
        breaker.failed()
    clock.now = 2.0
    assert breaker.admits()
