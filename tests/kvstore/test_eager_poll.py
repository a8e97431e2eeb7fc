"""When the daemon looks for the next question before it sleeps, and when it leaves the CPU to others."""

import select
from typing import cast

import pytest

from kvstore.eager_poll import EagerPoll, Events

MESSAGE: Events = [(7, select.EPOLLIN)]


class Line:
    """A poll and a clock: the next message comes `after_s` after the poll begins; each look takes a microsecond.

    `on_our_cpu`: only once we sleep, until we move and stay away."""

    def __init__(self) -> None:
        self.now = 100.0
        self.after_s = 0.0
        self.on_our_cpu = False
        self.has_other_cpus = False
        self.stays_away = True
        self.moves = 0
        self.looks = 0
        self.sleeps = 0
        self._comes_at = 0.0

    def poll(self, timeout_s: float) -> Events:
        if timeout_s:
            self.sleeps += 1
            begins = self.now + self.after_s if self.on_our_cpu else max(self.now, self._comes_at)
            self.now = min(begins, self.now + timeout_s)
            return MESSAGE if begins <= self.now else []
        self.looks += 1
        self.now += 1e-6
        return MESSAGE if not self.on_our_cpu and self.now >= self._comes_at else []

    def move_away(self) -> bool:
        self.moves += 1
        self.on_our_cpu = not (self.has_other_cpus and self.stays_away)
        return self.has_other_cpus

    def wait(self, poll: EagerPoll, after_s: float, timeout_s: float = 1.0) -> bool:
        """Return whether it came, and count `looks` and `sleeps` of that wait."""
        self.after_s, self._comes_at = after_s, self.now + after_s
        self.looks = self.sleeps = 0
        return poll.poll(timeout_s) == MESSAGE


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def poll(line: Line) -> EagerPoll:
    return EagerPoll(cast("select.epoll", line), lambda: line.now, line.move_away)


def test_questions_in_a_row_are_found_without_sleeping(line: Line, poll: EagerPoll) -> None:
    assert line.wait(poll, 20e-6) and (line.looks, line.sleeps) == (0, 1)
    for _ in range(1000):
        assert line.wait(poll, 20e-6) and line.sleeps == 0


def test_a_row_that_ends_costs_one_look_and_one_that_begins_one_sleep(line: Line, poll: EagerPoll) -> None:
    for _ in range(5):
        assert line.wait(poll, 20e-6) and line.sleeps == 1
        assert line.wait(poll, 20e-6) and line.sleeps == 0
        began = line.now
        assert line.wait(poll, 0.5) and line.sleeps == 1
        assert 40 <= line.looks <= 51 and line.now == pytest.approx(began + 0.5)


def test_questions_now_and_then_are_not_looked_for(line: Line, poll: EagerPoll) -> None:
    for _ in range(10):
        assert line.wait(poll, 200e-6) and (line.looks, line.sleeps) == (0, 1)
        assert not line.wait(poll, 2.0) and (line.looks, line.sleeps) == (0, 1)


def test_who_asks_on_our_cpu_is_kept_from_it_once_in_many_times(line: Line, poll: EagerPoll) -> None:
    line.on_our_cpu = True
    waits_with_looks = 0
    for _ in range(660):
        assert line.wait(poll, 70e-6) and line.sleeps == 1
        waits_with_looks += line.looks > 0
    assert 9 <= waits_with_looks <= 11
    line.on_our_cpu = False
    slept = 0
    for _ in range(660):
        assert line.wait(poll, 20e-6)
        slept += line.sleeps
    assert slept <= 65


def test_who_asks_on_our_cpu_is_left_alone_there(line: Line, poll: EagerPoll) -> None:
    line.on_our_cpu = line.has_other_cpus = True
    for _ in range(2):
        assert line.wait(poll, 20e-6) and line.sleeps == 1 and line.moves == 0
    for _ in range(500):
        assert line.wait(poll, 20e-6) and line.sleeps == 0 and line.moves == 1


def test_moving_that_does_not_help_ends(line: Line, poll: EagerPoll) -> None:
    line.on_our_cpu = line.has_other_cpus = True
    line.stays_away = False
    for _ in range(2000):
        assert line.wait(poll, 200e-6)
    for _ in range(9):
        assert line.wait(poll, 20e-6) and line.sleeps == 1
    assert line.moves == 7, "the first few attempts may fail"
    for _ in range(6400):
        assert line.wait(poll, 20e-6) and line.sleeps == 1
    assert line.moves == 8
    before = line.now
    for _ in range(40):
        for _ in range(200):
            assert line.wait(poll, 20e-6)
        line.now += 0.1
    assert line.moves - 8 == pytest.approx(4 * (line.now - before), abs=2)


def test_who_comes_now_and_then_moves_nobody(line: Line, poll: EagerPoll) -> None:
    line.on_our_cpu = line.has_other_cpus = True
    for _ in range(100):
        assert line.wait(poll, 20e-6) and line.wait(poll, 200e-6)
    assert line.moves == 0


def test_no_wait_is_longer_than_was_asked_for(line: Line, poll: EagerPoll) -> None:
    assert not line.wait(poll, 1.0, timeout_s=10e-6)
    assert line.wait(poll, 20e-6) and line.looks == 0, "nothing came, however short the wait was"
    began = line.now
    assert not line.wait(poll, 1.0, timeout_s=10e-6)
    assert line.now - began <= 22e-6
    assert line.wait(poll, 20e-6)
    assert not line.wait(poll, 1.0, timeout_s=0.0) and (line.looks, line.sleeps) == (1, 0)
