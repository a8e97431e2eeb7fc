"""The step loop with its real threads: random work over a failing kvstore, faults of the model, and its end."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from engine.request import Cached
from kvstore.core.outcome import TierKind
from policies.cost import StepWork
from tests.engine.fakes import FakeStore, Faults, continuation
from tests.engine.rig import Answer, Rig, threaded


@contextmanager
def running(rig: Rig, store: FakeStore, max_jobs: int = 8, layer_ends: Sequence[int] = ()) -> Iterator[None]:
    rig.clock = time.monotonic  # type: ignore[method-assign]
    rig.caching._clock = rig.caching.planner._clock = rig.runner._clock = time.monotonic
    movers = threaded(rig, store, max_jobs, layer_ends)
    movers.start()
    rig.runner.start()
    try:
        yield
    finally:
        movers.close()
        rig.runner.stop()


def cached_in(store: FakeStore, rig: Rig, prompt: list[int]) -> Cached:
    request, _ = rig.request(prompt)
    found = 0
    while found < len(request.keys) and request.keys[found] in store.blocks:
        found += 1
    return Cached([TierKind.RAM] * found, "never_stored", asked=True)


@pytest.mark.parametrize(
    ("seed", "pool_block_tokens", "layer_ends"), [(0, 4, []), (1, 2, []), (2, 1, []), (3, 4, [1]), (4, 2, [1])]
)
def test_every_answer_is_right_whatever_kvstore_does(seed: int, pool_block_tokens: int, layer_ends: list[int]) -> None:
    """Arrivals, cancels, a tiny pool, and a kvstore that is down, refuses, loses, lies and is silent at random."""
    draw = random.Random(seed)
    faults = Faults(down=0.03, refused=0.02, miss=0.03, stale=0.05, silent=0.02, busy=0.15, full=0.02, lost_commit=0.03)
    store = FakeStore(faults, seed)
    rig = Rig(96 // pool_block_tokens, pool_block_tokens, block_tokens=4, chunk_tokens=8, max_batch=4)
    roots = [[draw.randint(0, 9) for _ in range(20)] for _ in range(5)]
    asked: list[tuple[list[int], int, Answer]] = []
    with running(rig, store, layer_ends=layer_ends):
        for number in range(120):
            prompt = draw.choice(roots)[: draw.randint(1, 20)] + [draw.randint(0, 9) for _ in range(draw.randint(0, 9))]
            reply = draw.randint(1, 9)
            request, answer = rig.request(prompt, reply, cached=cached_in(store, rig, prompt))
            rig.runner.post(lambda request=request: rig.scheduler.add(request))  # type: ignore[misc]
            asked.append((prompt, reply, answer))
            if draw.random() < 0.1:
                rig.runner.post(lambda request=request: rig.scheduler.cancel(request.id))  # type: ignore[misc]
            if draw.random() < 0.1:
                rig.runner.post(rig.pool.drop)  # type: ignore[arg-type]
            if number % 20 == 19:
                assert answer.done.wait(30)
        for *_, answer in asked:
            assert answer.done.wait(30)
    assert rig.runner.fault == ""
    for prompt, reply, answer in asked:
        want = continuation(prompt, reply)
        if answer.finish == "cancelled":
            assert answer.tokens == want[: len(answer.tokens)]
        else:
            assert (answer.finish, answer.tokens) == ("length", want)
    counts = rig.counters.snapshot()
    assert counts["fetched_blocks"] > 0
    assert counts["store_ok_blocks"] > 0
    rig.pool.check_integrity()
    assert rig.pool.num_available == rig.pool.num_pool_blocks, "every hold and reference has come back"


def test_a_dead_kvstore_costs_nothing_but_the_cache() -> None:
    store = FakeStore(up=False)
    rig = Rig(num_pool_blocks=24)
    with running(rig, store):
        request, answer = rig.request([1] * 13, 5, cached=Cached([TierKind.RAM] * 3, "", asked=True))
        rig.runner.post(lambda: rig.scheduler.add(request))
        assert answer.done.wait(10)
    assert answer.tokens == continuation([1] * 13, 5)
    assert request.result is not None
    assert request.result.miss["unavailable"] == 12
    assert rig.pool.num_available == 24


def test_a_silent_kvstore_is_given_up_within_the_patience_that_the_cost_model_allows() -> None:
    store = FakeStore(Faults(silent=1.0))
    rig = Rig(num_pool_blocks=24)
    for _ in range(10):
        rig.costs.observe_step(StepWork.of([(16, 0)], 0), 0.4)
    with running(rig, store):
        request, answer = rig.request([1] * 16, 2, cached=Cached([TierKind.S3] * 3, "", asked=True))
        began_s = time.monotonic()
        rig.runner.post(lambda: rig.scheduler.add(request))
        assert answer.done.wait(10)
        # Computing takes 0.4 s by the model, and without one the load would be waited for for 10 s.
        assert time.monotonic() - began_s < 5.0
    assert answer.tokens == continuation([1] * 16, 2)
    assert request.result is not None
    assert request.result.miss == {"timed_out": 12, "partial_block": 4}
    assert rig.costs.load({TierKind.S3: 96}) > 0.005, "the silence counts as a slow load"


def test_a_fault_of_the_model_ends_every_request_present_and_future() -> None:
    rig = Rig()

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    rig.model.forward = broken  # type: ignore[method-assign, assignment]
    with running(rig, FakeStore()):
        answers = []
        for _ in range(2):
            request, answer = rig.request([1, 2, 3])
            rig.runner.post(lambda request=request: rig.scheduler.add(request))  # type: ignore[misc]
            assert answer.done.wait(10)
            answers.append(answer)
    assert all("the device is gone" in answer.error for answer in answers)
    assert "the device is gone" in rig.runner.fault


def test_a_fault_of_the_bookkeeping_leaves_no_request_without_an_end() -> None:
    """A pool that fails made ending the requests fail too: the step loop died, and whoever had asked waited for ever.
    Where it was the next step that failed, the loop failed over and over, and filled the log."""
    rig = Rig()
    num_steps = 0

    def broken(*_: object) -> None:
        raise ValueError("pool block 3 has no reference to release")

    def no_step() -> None:
        nonlocal num_steps
        num_steps += 1
        raise RuntimeError("no step")

    answers = []
    rig.pool.release = broken  # type: ignore[method-assign, assignment]
    for _ in range(3):
        request, answer = rig.request([1, 2, 3])
        rig.runner.post(lambda request=request: rig.scheduler.add(request))  # type: ignore[misc]
        answers.append(answer)
    with running(rig, FakeStore()):
        assert all(answer.done.wait(10) for answer in answers)
        rig.scheduler.next_step = no_step  # type: ignore[method-assign, assignment]
        for _ in range(3):
            request, answer = rig.request([1, 2, 3])
            rig.runner.post(lambda request=request: rig.scheduler.add(request))  # type: ignore[misc]
            assert answer.done.wait(10)
    assert "pool block 3" in rig.runner.fault
    assert num_steps <= 1


def test_stopping_ends_what_came_too_late_to_be_computed() -> None:
    """A request that the consult thread handed over while the engine ended got no event any more."""
    rig = Rig()
    with running(rig, FakeStore()):
        request, answer = rig.request([1, 2, 3], 10)
        rig.runner.post(lambda: (rig.scheduler.add(request), rig.runner._stop())[1])
        assert answer.done.wait(10)
    assert answer.error == "the engine is shutting down"


def test_warming_up_measures_prefill_and_leaves_the_pool_as_it_was() -> None:
    rig = Rig(num_pool_blocks=8, chunk_tokens=16)
    rig.clock = time.monotonic  # type: ignore[method-assign]
    rig.runner._clock = time.monotonic
    blocks = rig.pool.allocate(6)
    assert blocks is not None
    rig.runner.warm_up(16, blocks)
    rig.pool.release(blocks)
    assert rig.costs.prefill_known
    assert rig.pool.num_free == 8
