"""The planner finds the best of all intervals, in whatever tiers blocks lie and whatever stands in front of them."""

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.outcome import TierKind
from policies.cost import LoadCost, PrefillCost
from policies.interval import Question, compare

TIERS = (TierKind.RAM, TierKind.SSD, TierKind.S3)


@dataclass(frozen=True)
class Case:
    question: Question
    prefill: PrefillCost
    loads: Mapping[TierKind, LoadCost]
    gpu_price: float = 0.0


def cases(count: int, seed: int, max_blocks: int) -> Iterator[Case]:
    """Blocks in order of distance (what leaf-first eviction leaves), in runs, or in no order at all."""
    draw = random.Random(seed)
    for _ in range(count):
        num_blocks = draw.randint(0, max_blocks)
        tiers = [draw.choice(TIERS) for _ in range(num_blocks)]
        order = draw.random()
        if order < 0.5:
            tiers.sort()
        elif order < 0.75:
            tiers = [tiers[i // 7] for i in range(num_blocks)]
        block_tokens, resident = draw.choice((16, 64, 256)), draw.choice((0, 0, 1, 5, 100))
        prompt = (resident + num_blocks) * block_tokens + draw.randint(1, 2 * block_tokens)
        gpu_queue_s = draw.choice((0.0, 0.0, 0.1, 1.0))
        yield Case(
            Question(prompt, block_tokens, draw.choice((1_000, 100_000)), resident, tiers, gpu_queue_s),
            PrefillCost(
                chunk_tokens=draw.choice((64, 100, 256, 2048)),
                per_step_s=draw.choice((0.0, draw.uniform(0, 0.05))),
                per_token_s=10 ** draw.uniform(-5, -2.5),
                per_pair_s=10 ** draw.uniform(-9, -6),
            ),
            {
                tier: LoadCost(10 ** draw.uniform(-4, -0.5), 10 ** draw.uniform(-9, -5), draw.choice((0.0, 0.0, 0.3)))
                for tier in TIERS
            },
            10 ** draw.uniform(-2, 1.5),
        )


def optimum(case: Case, gpu_price: float) -> float:
    """Return the least seconds + gpu_price · gpu_s over all intervals, each worked out as the design words it."""
    question, prefill = case.question, case.prefill
    count, stride = len(question.tiers), question.block_tokens
    start, end = np.indices((count + 1, count + 1))
    cached_before = (question.resident_blocks + start) * stride

    def seconds_of(new: np.ndarray, cached: np.ndarray) -> np.ndarray:
        work = new * cached + new * new / 2
        steps = np.ceil(new / prefill.chunk_tokens)
        return np.where(new > 0, prefill.per_step_s * steps + prefill.per_token_s * new + prefill.per_pair_s * work, 0)

    begin_s = np.full(start.shape, question.gpu_queue_s)
    loaded_s = np.zeros(start.shape)
    for tier, load in case.loads.items():
        before = np.array([question.tiers[:i].count(tier) for i in range(count + 1)])
        for blocks, done_s in ((before[start], begin_s), (before[start] + before[count] - before[end], loaded_s)):
            seconds = load.queue_s + load.latency_s + blocks * question.block_bytes * load.per_byte_s
            np.maximum(done_s, np.where(blocks > 0, seconds, 0.0), out=done_s)
    interval_s = seconds_of((end - start) * stride, cached_before)
    everything = np.full(start.shape, (question.resident_blocks + count) * stride)
    last_s = seconds_of(question.prompt_tokens - everything, everything)
    through_s = seconds_of(question.prompt_tokens - cached_before, cached_before)
    goes_through = end == count
    seconds = np.where(goes_through, begin_s + through_s, np.maximum(begin_s + interval_s, loaded_s) + last_s)
    gpu_s = np.where(goes_through, through_s, interval_s + last_s)
    return float((seconds + gpu_price * gpu_s)[start <= end].min())


def test_no_interval_is_faster_in_ten_thousand_random_cases() -> None:
    for number, case in enumerate(cases(10_000, seed=1, max_blocks=24)):
        best = compare(case.question, case.prefill, case.loads).best
        assert best.seconds <= optimum(case, 0.0) * (1 + 1e-6), f"case {number}: {best}"


def test_with_long_prefixes_no_interval_is_faster_either() -> None:
    for number, case in enumerate(cases(300, seed=2, max_blocks=250)):
        best = compare(case.question, case.prefill, case.loads).best
        assert best.seconds <= optimum(case, 0.0) * (1 + 1e-6), f"case {number}: {best}"


@pytest.mark.parametrize(("count", "max_blocks"), [(2000, 24), (300, 250)])
def test_with_a_price_on_gpu_seconds_no_interval_is_cheaper_by_a_percent(count: int, max_blocks: int) -> None:
    for number, case in enumerate(cases(count, seed=3, max_blocks=max_blocks)):
        best = compare(case.question, case.prefill, case.loads, case.gpu_price).best
        cost = best.seconds + case.gpu_price * best.gpu_s
        assert cost <= optimum(case, case.gpu_price) * 1.01, f"case {number}: {best}"


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 4.0]))
def test_the_best_plan_is_never_behind_one_of_another_kind_and_the_same_every_time(seed: int, price: float) -> None:
    (case,) = cases(1, seed, max_blocks=60)
    plans = compare(case.question, case.prefill, case.loads, price)
    assert plans == compare(case.question, case.prefill, case.loads, price)
    best = plans.best.seconds + price * plans.best.gpu_s
    for other in (plans.load_all, plans.recompute_all, plans.prefix_cut, plans.two_ended):
        assert best <= (other.seconds + price * other.gpu_s) * (1 + 1e-8)
    count = len(case.question.tiers)
    assert 0 <= plans.best.start <= plans.best.end <= count
    assert (plans.load_all.start, plans.load_all.end) == (count, count)
    assert (plans.recompute_all.start, plans.recompute_all.end) == (0, count)
    assert plans.prefix_cut.end == count
    assert plans.two_ended.start == 0 or count == 0


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(TIERS), st.floats(0, 10))
def test_a_longer_queue_never_makes_a_prompt_faster(seed: int, tier: TierKind, more_s: float) -> None:
    (case,) = cases(1, seed, max_blocks=40)
    load = case.loads[tier]
    slower = {**case.loads, tier: LoadCost(load.latency_s, load.per_byte_s, load.queue_s + more_s)}
    before = compare(case.question, case.prefill, case.loads).best.seconds
    assert compare(case.question, case.prefill, slower).best.seconds >= before * (1 - 1e-8)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_the_dearer_the_gpu_the_less_of_it_a_plan_takes(seed: int) -> None:
    (case,) = cases(1, seed, max_blocks=30)
    gpu_s = [compare(case.question, case.prefill, case.loads, price).best.gpu_s for price in (0.0, 0.3, 3.0, 30.0)]
    assert all(less <= more * (1 + 1e-6) for more, less in itertools.pairwise(gpu_s))


def test_of_equal_plans_the_one_that_computes_least_is_taken() -> None:
    """One block that loads in the time the GPU is busy anyway: computing it would not be later, but for nothing."""
    question = Question(20, 16, 1000, 0, [TierKind.RAM], gpu_queue_s=1.0)
    best = compare(question, PrefillCost(64, 0.0, 0.0, 0.0), {TierKind.RAM: LoadCost(0.1, 0.0)}).best
    assert best.start == best.end


def test_a_prompt_of_which_nothing_is_cached_is_computed() -> None:
    plans = compare(Question(100, 16, 1000, 2, [], 0.5), PrefillCost(64, 0.1, 0.01, 0.0), {})
    assert plans.best.seconds == pytest.approx(0.5 + 2 * 0.1 + 68 * 0.01)
    assert plans.best == plans.load_all == plans.recompute_all


def test_a_worked_example_meets_in_the_middle() -> None:
    """Ten blocks in S3, 1 s each to compute, 1 s latency and 1 s each to load, and one more to compute at the end:
    computing five takes 5 s, loading the other five 6 s; computing six takes 6 s, loading four 5 s."""
    question = Question(176, 16, 1, 0, [TierKind.S3] * 10)
    plans = compare(question, PrefillCost(16, 1.0, 0.0, 0.0), {TierKind.S3: LoadCost(1.0, 1.0)})
    assert (plans.best.start, plans.best.end, plans.best.seconds) == (0, 5, 7.0)
    assert plans.load_all.seconds == 12.0
    assert plans.recompute_all.seconds == 11.0


def test_a_worked_example_computes_the_middle_while_its_tail_is_loaded() -> None:
    """Four blocks in RAM, there after 1 s, four in S3, 2 s each; computing takes 1 s each. RAM, then two blocks are
    computed (till 3 s) while the last two come (till 4 s), then the rest of the prompt."""
    question = Question(144, 16, 1, 0, [TierKind.RAM] * 4 + [TierKind.S3] * 4)
    loads = {TierKind.RAM: LoadCost(1.0, 0.0), TierKind.S3: LoadCost(0.0, 2.0)}
    plans = compare(question, PrefillCost(16, 1.0, 0.0, 0.0), loads)
    assert (plans.best.start, plans.best.end, plans.best.seconds) == (4, 6, 5.0)
    assert plans.prefix_cut.seconds == 6.0
    assert plans.two_ended.seconds > 5.0
