"""Counting faults, and calls that run while a tier closes."""

import threading

import pytest

from tiers.calls import RunningCalls
from tiers.faults import FaultCounter


def test_every_fault_is_counted_and_few_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    faults = FaultCounter("ssd", clock=lambda: now[0])
    for _ in range(100):
        faults.count("corrupt", detail="block abc")
    faults.count("disk_full", 3)
    faults.count("nothing", 0)
    assert faults.counts() == {"corrupt": 100, "disk_full": 3}
    assert len(caplog.records) == 2
    now[0] = 10.0
    faults.count("corrupt")
    assert len(caplog.records) == 3


def test_closing_waits_for_running_calls_and_refuses_new_ones() -> None:
    calls = RunningCalls()
    is_inside, may_end = threading.Event(), threading.Event()

    def call() -> None:
        with calls.enter() as is_open:
            assert is_open
            is_inside.set()
            assert may_end.wait(30)

    thread = threading.Thread(target=call)
    thread.start()
    assert is_inside.wait(30)
    assert calls.close(wait_s=0.0) is False
    with calls.enter() as is_open:
        assert not is_open
    may_end.set()
    assert calls.close(wait_s=30.0) is True
    thread.join()
