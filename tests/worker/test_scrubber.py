"""A worker's walk: it rests, lets loads go first, can be ended, and is always answered."""

from collections.abc import Iterator

import pytest

from kvstore.core.errors import TierUnavailable
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome
from kvstore.worker import ops
from kvstore.worker.scrubber import MAX_YIELD_S, Scrubber
from tiers.scrub import Finding, Orders, Step, Verdict

KEY = BlockKey(b"k" * 32)
SCRUB = ops.Scrub(7, True, False)


class Walked:
    """A tier of so many steps; `during` is called in the middle of each."""

    def __init__(self, steps: list[Step], fault: Exception | None = None) -> None:
        self.steps = steps
        self.fault = fault
        self.orders: list[Orders] = []
        self.taken = 0

    def scrub(self, orders: Orders, parallel: int = 1) -> Iterator[Step]:
        self.orders.append(orders)
        for step in self.steps:
            self.taken += 1
            yield step
        if self.fault is not None:
            raise self.fault


def results(answers: list[ops.Reply]) -> list[ops.Result]:
    return [answer for answer in answers if isinstance(answer, ops.Result)]


def reports(answers: list[ops.Reply]) -> list[ops.Scrubbed]:
    return [answer for answer in answers if isinstance(answer, ops.Scrubbed)]


@pytest.fixture
def answers() -> list[ops.Reply]:
    return []


def test_a_walk_is_answered_by_its_sum_and_then_one_result(answers: list[ops.Reply]) -> None:
    finding = Finding(Verdict.CORRUPT, "blocks", "ab", "why", True)
    tier = Walked([Step("blocks", 3, total=4), Step("blocks", 0, (finding,), 4096, (KEY,)), Step("records", 2)])
    Scrubber(tier, answers.append, lambda: False).run(SCRUB)
    assert tier.orders == [Orders(repair=True)]
    assert answers[-1] == ops.Result(7, Outcome.OK)
    assert len(results(answers)) == 1
    last = reports(answers)[-1].report
    assert last.counts == {"blocks": {"ok": 3, "corrupt": 1}, "records": {"ok": 2}}
    assert (last.total, last.removed, last.num_bytes) == (4, {"blocks": 1}, 4096)
    assert [(found.verdict, found.name) for found in last.examples] == [("corrupt", "ab")]


def test_a_block_that_was_removed_is_told_of_at_once(answers: list[ops.Reply]) -> None:
    Scrubber(Walked([Step("blocks", lost=(KEY,))]), answers.append, lambda: False).run(SCRUB)
    assert [reply.lost for reply in reports(answers)] == [KEY, b""]


def test_a_walk_ends_after_the_step_that_it_is_cancelled_in(answers: list[ops.Reply]) -> None:
    tier = Walked([Step("blocks", 1)] * 100)
    scrubber = Scrubber(tier, answers.append, lambda: False)
    scrubber.cancel()
    scrubber.run(SCRUB)
    assert tier.taken == 1
    assert results(answers) == [ops.Result(7, Outcome.CANCELLED)]


def test_after_a_walk_that_was_cancelled_the_next_one_runs(answers: list[ops.Reply]) -> None:
    scrubber = Scrubber(Walked([Step("blocks", 1)]), answers.append, lambda: False)
    scrubber.cancel()
    for _ in range(2):
        scrubber.start(SCRUB)
        scrubber._join()
    assert results(answers) == [ops.Result(7, Outcome.OK)] * 2
    scrubber.close()


def test_closing_ends_a_walk(answers: list[ops.Reply]) -> None:
    tier = Walked([Step("blocks", 1)] * 1_000_000)
    scrubber = Scrubber(tier, answers.append, lambda: False)
    scrubber.start(SCRUB)
    scrubber.close()
    assert tier.taken < 1_000_000
    assert results(answers) == [ops.Result(7, Outcome.CANCELLED)]
    scrubber.close()


@pytest.mark.parametrize("fault", [TierUnavailable("no bucket"), ValueError("a fault of ours")])
def test_a_walk_that_fails_is_answered(answers: list[ops.Reply], fault: Exception) -> None:
    Scrubber(Walked([Step("blocks", 1)], fault), answers.append, lambda: False).run(SCRUB)
    assert results(answers) == [ops.Result(7, Outcome.UNAVAILABLE)]
    assert reports(answers)[-1].report.counts == {"blocks": {"ok": 1}}


class Ticking:
    """A clock that goes on by a little whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


@pytest.mark.parametrize("busy_s", [0.5, 1e9])
def test_loads_go_first_but_do_not_stop_a_walk_for_ever(answers: list[ops.Reply], busy_s: float) -> None:
    clock = Ticking()
    tier = Walked([Step("blocks", 1)] * 3)
    asked: list[float] = []

    def is_loading() -> bool:
        asked.append(clock.now)
        return clock.now < busy_s

    Scrubber(tier, answers.append, is_loading, clock).run(SCRUB)
    assert tier.taken == 3
    assert clock.now >= min(busy_s, 3 * MAX_YIELD_S)
    assert asked, "it looks whether somebody waits"
