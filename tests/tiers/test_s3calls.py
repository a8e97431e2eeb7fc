"""Deadlines and retries, without a server."""

import random
from collections.abc import Iterator

import pytest

from kvstore.core.errors import TierUnavailable
from tiers.breaker import CircuitBreaker
from tiers.faults import FaultCounter
from tiers.objects import ObjectFault
from tiers.s3calls import S3Calls


class Bench:
    """S3Calls with a clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []
        self.faults = FaultCounter("s3", clock=lambda: self.now_s)
        self.breaker = CircuitBreaker(clock=lambda: self.now_s)
        self.calls = S3Calls(
            10.0, self.faults, self.breaker, clock=lambda: self.now_s, sleep=self.sleep, jitter=random.Random(1)
        )

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds


@pytest.fixture
def bench() -> Bench:
    return Bench()


def raising(*errors: Exception | None) -> "Iterator[Exception | None]":
    return iter(errors)


def run(bench: Bench, errors: "Iterator[Exception | None]", takes_s: float = 0.0) -> int:
    def action(deadline: float, attempt: int) -> int:
        assert deadline == 10.0
        bench.now_s += takes_s
        error = next(errors)
        if error is not None:
            raise error
        return attempt

    return bench.calls.run(action)


def test_a_passing_fault_is_tried_again_after_a_growing_pause(bench: Bench) -> None:
    errors = raising(ObjectFault("connection", ""), ObjectFault("throttled", ""), None)
    assert run(bench, errors) == 2
    assert 0.02 < bench.pauses[0] < 0.08 < bench.pauses[1] < 0.31
    assert bench.faults.counts() == {}


def test_a_fault_that_stays_is_counted_once_as_unavailable(bench: Bench) -> None:
    with pytest.raises(TierUnavailable, match="throttled"):
        run(bench, raising(*[ObjectFault("throttled", "")] * 3))
    assert bench.faults.counts() == {"throttled": 1}


def test_a_fault_that_will_not_pass_is_not_tried_again(bench: Bench) -> None:
    with pytest.raises(TierUnavailable, match="forbidden"):
        run(bench, raising(ObjectFault("forbidden", "")))
    assert bench.pauses == []


def test_the_last_fault_is_known_until_the_bucket_answers(bench: Bench) -> None:
    assert bench.calls.last_fault == ""
    with pytest.raises(TierUnavailable):
        run(bench, raising(ObjectFault("no_bucket", "")))
    assert bench.calls.last_fault == "no_bucket"
    run(bench, raising(None))
    assert bench.calls.last_fault == ""


def test_no_try_begins_after_the_deadline(bench: Bench) -> None:
    with pytest.raises(TierUnavailable, match="timeout"):
        run(bench, raising(ObjectFault("timeout", ""), ObjectFault("timeout", "")), takes_s=5.0)
    assert len(bench.pauses) == 1


def test_while_the_breaker_is_open_nothing_is_asked(bench: Bench) -> None:
    for _ in range(5):
        with pytest.raises(TierUnavailable):
            run(bench, raising(ObjectFault("no_bucket", "")))
    with pytest.raises(TierUnavailable, match="left alone"):
        bench.calls.run(lambda _deadline, _attempt: pytest.fail("asked"))


def test_a_fault_of_ours_is_raised_as_it_is_and_frees_the_probe(bench: Bench) -> None:
    def broken(_deadline: float, _attempt: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bench.calls.run(broken)
    assert bench.calls.run(lambda _deadline, _attempt: 1) == 1
