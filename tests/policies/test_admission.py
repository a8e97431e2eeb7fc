"""What is admitted: by hand where it can be worked out, and on loads of which it is known what is worth writing."""

import numpy as np
import pytest

from policies import admission
from policies.admission import Admission, Always, Learned, Prompt, SecondTouch, WriteBudget
from policies.seen import Names, Seen
from tests.support.clock import Clock


def names(*numbers: int) -> Names:
    return np.array(numbers, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)


def ask(policy: Admission, blocks: Names) -> int:
    return policy.admit(blocks, policy.prompt(blocks))


@pytest.mark.parametrize("name", admission.NAMES)
def test_every_policy_takes_requests_without_blocks_and_blocks_it_never_saw(name: str) -> None:
    policy = admission.make(name, Clock())
    assert ask(policy, names()) == 0
    policy.on_read(names(1, 2))
    policy.on_evicted(names(3))
    assert 0 <= ask(policy, names(1, 2, 3)) <= 3


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="'sometimes'"):
        admission.make("sometimes", Clock())


def test_always_admits_all() -> None:
    assert ask(Always(), names(1, 2, 3)) == 3


def test_a_second_touch_admits_what_was_seen_and_all_before_it() -> None:
    policy = SecondTouch()
    assert ask(policy, names(1, 2, 3)) == 0
    assert ask(policy, names(1, 2, 4)) == 2
    assert ask(policy, names(9, 3, 5)) == 2, "a parent goes with its child"


# ---------------------------------------------------------------- learned


def live(policy: Learned, clock: Clock, number: int) -> tuple[int, int]:
    """Short prompts whose blocks are read again, and long ones whose blocks are not; return how many were written."""
    clock.now += 1.0
    short = names(*range(10_000 * number, 10_000 * number + 2))
    long = names(*range(10_000 * number + 100, 10_000 * number + 140))
    short_written, long_written = ask(policy, short), ask(policy, long)
    policy.on_read(short[:short_written])
    policy.on_evicted(long[:long_written])
    return short_written, long_written


def test_what_is_never_read_again_is_written_no_more_but_for_a_sample() -> None:
    clock = Clock()
    policy = Learned(clock)
    for number in range(200):
        live(policy, clock, number)
    written = [live(policy, clock, number) for number in range(200, 400)]
    assert sum(short for short, _ in written) == 400
    assert 0 < sum(long for _, long in written) < 200 * 40 / 5


def test_what_begins_to_be_read_again_is_written_again() -> None:
    """Without the sample nothing could be learned about what is refused."""
    clock = Clock()
    policy = Learned(clock)
    for number in range(200):
        live(policy, clock, number)
    written = []
    for number in range(1000, 3000):
        clock.now += 1.0
        long = names(*range(10_000 * number, 10_000 * number + 40))
        written.append(ask(policy, long))
        policy.on_read(long[: written[-1]])
    assert sum(written[-200:]) > 200 * 40 * 0.9


def test_a_budget_refuses_what_is_worth_least_first() -> None:
    clock = Clock()
    # 42 blocks a second are asked about, of which 3 may be written.
    policy = Learned(clock, budget_blocks_per_day=3 * 86_400, max_loss=0.0)
    for number in range(300):
        live(policy, clock, number)
    written = [live(policy, clock, number) for number in range(300, 500)]
    assert sum(short for short, _ in written) > 350
    assert sum(long for _, long in written) / 200 < 6


def test_without_losses_and_without_a_budget_nothing_that_is_worth_anything_is_refused() -> None:
    clock = Clock()
    policy = Learned(clock, max_loss=0.0)
    assert all(live(policy, clock, number) == (2, 40) for number in range(100))


def test_equal_histories_end_in_equal_decisions() -> None:
    ends = []
    for _ in range(2):
        clock = Clock()
        policy = Learned(clock)
        ends.append([live(policy, clock, number) for number in range(100)])
    assert ends[0] == ends[1]


# ---------------------------------------------------------------- budgets, and what was seen


def test_a_budget_fills_up_with_time_and_no_further_than_its_burst() -> None:
    clock = Clock()
    budget = WriteBudget(24.0, clock)
    assert budget.allows(5.0) == 1.0
    budget.spend(1.0)
    assert budget.allows(5.0) == 0.0
    clock.now += 1800.0
    assert budget.allows(5.0) == 0.5
    clock.now += 86_400.0
    assert budget.allows(5.0) == 1.0


def test_what_had_to_be_written_is_paid_for_later() -> None:
    clock = Clock()
    budget = WriteBudget(24.0, clock)
    budget.spend(3.0)
    clock.now += 7200.0
    assert budget.allows(1.0) == 0.0
    clock.now += 3600.0
    assert budget.allows(1.0) == 1.0


def test_without_a_limit_all_is_allowed() -> None:
    budget = WriteBudget(0.0, Clock())
    budget.spend(1e12)
    assert budget.allows(7.0) == 7.0


def test_blocks_are_counted_by_name_and_forgotten_where_another_takes_their_place() -> None:
    seen = Seen(2)
    assert seen.see(names(1))[1].tolist() == [0]
    assert seen.see(names(1))[1].tolist() == [1]
    for number in range(2, 40):
        seen.see(names(number))
    assert seen.times(names(1)).tolist() == [0]
    assert len(seen.find(names(1))) == 0


def test_a_prompt_tells_how_much_of_it_is_new() -> None:
    policy = Learned(Clock())
    ask(policy, names(1, 2, 3))
    assert policy.prompt(names(1, 2, 3, 4, 5)) == Prompt(5, 2)
