"""Requests to a bucket over links that are simulated: all share one, or each has its own limit."""

from dataclasses import dataclass, field

import pytest

from kvstore.store.read_pace import ReadPace

BLOCK = 720 << 10
MB = 1e6


@dataclass(slots=True)
class SimulatedLink:
    """A request is silent for `latency_s`, then gets an equal part of `shared`, at most `each` (bytes per second)."""

    latency_s: float
    shared: float
    each: float = float("inf")
    now: float = 0.0
    under_way: dict[int, list[float]] = field(default_factory=dict)

    def begin(self, op: int, num_bytes: int) -> None:
        # When its bytes begin to come, and how many are still to come.
        self.under_way[op] = [self.now + self.latency_s, float(num_bytes)]

    def advance(self, until: float) -> list[int]:
        """Go on to the next answer, or to `until`; return what was answered."""
        while self.now < until:
            flowing = [state for state in self.under_way.values() if state[0] <= self.now + 1e-12]
            rate = min(self.shared / len(flowing), self.each) if flowing else 0.0
            ends = [self.now + state[1] / rate for state in flowing]
            begins = [state[0] for state in self.under_way.values() if state[0] > self.now + 1e-12]
            step_to = min([until, *ends, *begins])
            for state in flowing:
                state[1] -= rate * (step_to - self.now)
            self.now = step_to
            done = [op for op, state in self.under_way.items() if state[1] <= 1e-3]
            for op in done:
                del self.under_way[op]
            if done:
                return done
        return []


@dataclass(frozen=True, slots=True)
class Load:
    """What bringing some blocks was like: when each landed, and how many were under way at most."""

    seconds: float
    landed_s: list[float]
    most_under_way: int

    @property
    def longest_gap_s(self) -> float:
        return max(after - before for before, after in zip(self.landed_s, self.landed_s[1:], strict=False))


def load(pace: ReadPace, link: SimulatedLink, num_blocks: int, num_bytes: int = BLOCK) -> Load:
    began, first = link.now, int(link.now * 1e6) + 1
    waiting = list(range(first, first + num_blocks))
    landed: list[float] = []
    most = 0
    while waiting or link.under_way:
        while waiting and pace.may_send(num_bytes, link.now):
            pace.sent(waiting[0], num_bytes, link.now)
            link.begin(waiting.pop(0), num_bytes)
        most = max(most, len(link.under_way))
        until = pace.next_at_s if waiting and pace.next_at_s > link.now else link.now + 10.0
        for op in link.advance(until):
            pace.settled(op, True, link.now)
            landed.append(link.now)
    return Load(link.now - began, landed, most)


@pytest.mark.parametrize(("latency_s", "rate"), [(0.005, 60 * MB), (0.02, 30 * MB), (0.05, 12 * MB), (0.2, 5 * MB)])
def test_a_slow_link_is_filled_by_few_requests_and_blocks_land_one_by_one(latency_s: float, rate: float) -> None:
    """Eight at a time landed together, so a load that met an engine in the middle had read up to eight for nobody."""
    link, pace = SimulatedLink(latency_s, rate), ReadPace(16)
    for _ in range(3):
        load(pace, link, 32)
    found = load(pace, link, 48)
    block_s = BLOCK / rate
    assert found.seconds <= 1.06 * (latency_s + 48 * block_s)
    assert found.most_under_way <= latency_s / block_s + 4
    assert found.longest_gap_s <= 1.6 * block_s + latency_s / 4


def test_connections_that_are_slow_each_for_itself_are_many() -> None:
    link, pace = SimulatedLink(0.03, 1e12, each=80 * MB), ReadPace(16)
    for _ in range(5):
        found = load(pace, link, 64, 16 << 20)
    alone_s = 0.03 + (16 << 20) / (80 * MB)
    assert found.most_under_way == 16
    assert found.seconds <= 1.3 * 64 / 16 * alone_s


def test_on_a_fast_link_nothing_waits() -> None:
    link, pace = SimulatedLink(0.001, 3000 * MB), ReadPace(16)
    for _ in range(3):
        found = load(pace, link, 64)
    assert found.most_under_way == 16


def test_a_link_that_becomes_faster_is_filled_again() -> None:
    link, pace = SimulatedLink(0.05, 12 * MB), ReadPace(16)
    for _ in range(3):
        load(pace, link, 48)
    link.shared = 60 * MB
    load(pace, link, 48)
    assert load(pace, link, 48).seconds <= 1.1 * (0.05 + 48 * BLOCK / link.shared)


def test_a_link_that_becomes_slower_and_farther_is_followed() -> None:
    link, pace = SimulatedLink(0.001, 3000 * MB), ReadPace(16)
    load(pace, link, 64)
    link.shared, link.latency_s = 12 * MB, 0.1
    load(pace, link, 32)
    found = load(pace, link, 48)
    assert found.seconds <= 1.1 * (0.1 + 48 * BLOCK / link.shared)
    assert found.most_under_way <= 6


def test_what_was_learned_is_forgotten_after_a_while() -> None:
    link, pace = SimulatedLink(0.05, 12 * MB), ReadPace(16)
    for _ in range(3):
        load(pace, link, 48)
    link.now += 1000.0
    assert load(pace, link, 48).most_under_way == 16


def test_failed_requests_teach_nothing_and_free_their_place() -> None:
    pace = ReadPace(2)
    for op in (1, 2):
        assert pace.may_send(BLOCK, 0.0)
        pace.sent(op, BLOCK, 0.0)
    assert not pace.may_send(BLOCK, 0.0)
    pace.settled(1, False, 5.0)
    assert pace.may_send(BLOCK, 5.0)
    pace.sent(3, BLOCK, 5.0)
    pace.clear()
    assert pace.may_send(BLOCK, 5.0)
