"""The continuous batch, step by step: who runs, what is fetched, stored, held, preempted and counted."""

import random

import pytest

from engine.request import Cached, RequestState
from kvstore.core.outcome import Outcome, TierKind
from tests.engine.fakes import continuation
from tests.engine.rig import Rig

PROMPT = [5, 9, 2, 7, 1, 1, 8, 3, 6, 4, 0, 2, 9, 9]


def cached(*tiers: TierKind, why: str = "never_stored") -> Cached:
    return Cached(tiers, why, asked=True)


def test_a_request_gets_the_models_own_continuation() -> None:
    rig = Rig()
    _, answer = rig.submit(PROMPT, 6)
    rig.run()
    assert answer.tokens == continuation(PROMPT, 6)
    assert answer.finish == "length"


def test_a_stop_token_ends_the_reply_and_is_part_of_it() -> None:
    rig = Rig()
    want = continuation(PROMPT, 6)
    _, answer = rig.submit(PROMPT, 6, stop=frozenset({want[2]}))
    rig.run()
    assert answer.tokens == want[: want.index(want[2]) + 1]
    assert answer.finish == "stop"


def test_prefill_is_cut_into_chunks_and_decodes_ride_along() -> None:
    rig = Rig(num_pool_blocks=40, chunk_tokens=5)
    first, _ = rig.submit([1, 2, 3], 8)
    assert [(p.num_tokens, p.samples) for p in rig.scheduler.next_step()] == [(3, True)]
    rig.step()
    rig.submit(PROMPT, 2)
    sizes = []
    for _ in range(3):
        pieces = rig.scheduler.next_step()
        sizes.append([(p.num_tokens, p.samples) for p in pieces])
        rig.runner._compute(pieces)
    assert sizes == [[(1, True), (5, False)], [(1, True), (5, False)], [(1, True), (4, True)]]
    assert len(first.output) == 4


def test_new_requests_join_and_finished_ones_leave_at_every_step() -> None:
    rig = Rig(max_batch=2)
    lengths = [2, 6, 3, 3]
    answers = [rig.submit([i, i + 1, i + 2], length)[1] for i, length in enumerate(lengths)]
    rig.step()
    assert (rig.scheduler.num_active, rig.scheduler.num_waiting) == (2, 2)
    rig.step()
    assert answers[0].finish == "length"
    rig.step()
    assert [len(answer.tokens) for answer in answers] == [2, 3, 1, 0]
    rig.run()
    for i, (length, answer) in enumerate(zip(lengths, answers, strict=True)):
        assert answer.tokens == continuation([i, i + 1, i + 2], length)


def test_a_second_equal_prompt_is_served_from_hbm_and_still_computes_its_last_token() -> None:
    rig = Rig(num_pool_blocks=30)
    rig.submit(PROMPT[:12], 1)
    rig.run()
    request, answer = rig.submit(PROMPT[:12], 3)
    rig.run()
    assert answer.tokens == continuation(PROMPT[:12], 3)
    assert request.result is not None
    assert request.result.tokens == {TierKind.HBM: 8}
    assert request.result.recomputed == 4
    assert request.result.miss == {"partial_block": 4}
    assert request.result.plan == "hbm"


def test_new_full_blocks_are_offered_in_prefix_order_and_held_until_acknowledged() -> None:
    rig = Rig(chunk_tokens=8)
    request, _ = rig.submit(PROMPT, 4)
    rig.run()
    jobs = list(rig.movers.stores)
    assert [job.depth for job in jobs] == [0, 2, 3]
    assert [len(job.keys) for job in jobs] == [2, 1, 1]
    assert jobs[1].parent == jobs[0].keys[-1]
    # 14 + 4 - 1 tokens have KV: the token sampled last has none.
    assert sum(len(job.keys) for job in jobs) == 4
    assert request.state is RequestState.FINISHED
    assert rig.pool.num_held_only == 4
    assert rig.acknowledge_stores() == 4
    assert rig.pool.num_held_only == 0
    assert rig.pool.num_available == 16


def test_what_is_fetched_is_used_and_counted_by_its_source() -> None:
    rig = Rig(num_pool_blocks=30)
    rig.submit(PROMPT, 1)
    rig.run()
    rig.acknowledge_stores()
    rig.pool.drop()
    request, answer = rig.submit(PROMPT, 3, cached=cached(TierKind.RAM, TierKind.SSD, TierKind.SSD))
    assert not rig.step(), "while it fetches there is nothing to compute"
    assert request.state is RequestState.FETCHING
    job = rig.movers.fetches.popleft()
    assert list(job.expected) == [TierKind.RAM, TierKind.SSD, TierKind.SSD], "the head in RAM first"
    rig.now += 0.5
    rig.land(request, job, [0], TierKind.RAM)
    rig.land(request, job, [1, 2], TierKind.SSD)
    rig.end(job)
    rig.run()
    assert answer.tokens == continuation(PROMPT, 3)
    assert request.result is not None
    assert request.result.tokens == {TierKind.HBM: 0, TierKind.RAM: 4, TierKind.SSD: 8}
    assert request.result.recomputed == 2
    assert request.result.plan == "fetch"
    assert request.result.ttft_s == pytest.approx(0.5)
    assert not any(job.depth < 3 for job in rig.movers.stores), "what came from kvstore is not offered again"


def test_a_fetch_that_fails_part_way_is_recomputed_and_offered_again() -> None:
    rig = Rig(num_pool_blocks=30)
    request, answer = rig.submit(PROMPT, 2, cached=cached(*[TierKind.S3] * 3))
    rig.step()
    job = rig.movers.fetches.popleft()
    rig.land(request, job, [0], TierKind.S3, Outcome.CORRUPT)
    rig.end(job, Outcome.CORRUPT)
    rig.run()
    assert answer.tokens == continuation(PROMPT, 2)
    assert request.result is not None
    assert request.result.miss == {"corrupt": 12, "partial_block": 2}
    assert rig.movers.stores[0].depth == 0
    assert rig.counters.snapshot()["fetch_corrupt"] == 1


def test_a_fetch_that_nobody_begins_in_time_is_taken_back() -> None:
    rig = Rig(num_pool_blocks=30)
    _, answer = rig.submit(PROMPT, 2, cached=cached(*[TierKind.RAM] * 3))
    assert not rig.step()
    job = rig.movers.fetches.popleft()
    while rig.now < 102.5:
        deadline_s = rig.scheduler.next_deadline_s()
        assert deadline_s is None or rig.now < deadline_s < rig.now + 0.1
        rig.now += 0.05
        rig.run()
    assert answer.tokens == continuation(PROMPT, 2)
    assert not job.claim(rig.now), "a mover that comes late must not touch the blocks"


def test_a_full_fetch_queue_means_recompute() -> None:
    rig = Rig(num_pool_blocks=30)
    rig.movers.full = True
    request, answer = rig.submit(PROMPT, 2, cached=cached(*[TierKind.RAM] * 3))
    rig.run()
    assert answer.tokens == continuation(PROMPT, 2)
    assert request.result is not None
    assert request.result.miss["busy"] == 12


def test_a_full_store_queue_skips_the_blocks_and_counts_them() -> None:
    rig = Rig()
    rig.movers.full = True
    _, answer = rig.submit(PROMPT, 4)
    rig.run()
    assert answer.finish == "length"
    assert rig.counters.snapshot()["store_skipped_blocks"] == 4
    assert rig.pool.num_held_only == 0


def test_a_request_waits_for_held_blocks_and_the_step_goes_on() -> None:
    rig = Rig(num_pool_blocks=8, max_batch=3)
    rig.submit(PROMPT, 1)
    rig.run()
    assert rig.pool.num_held_only == 3
    _, small = rig.submit([1, 2], 4)
    rig.step()
    _, large = rig.submit([3] * 20, 2)
    rig.run()
    assert small.finish == "length", "the one that has room is not held up"
    assert large.finish is None
    rig.acknowledge_stores()
    rig.run()
    assert large.tokens == continuation([3] * 20, 2)


def test_the_youngest_is_preempted_and_still_answers_right() -> None:
    rig = Rig(num_pool_blocks=6, max_batch=3, movers=False)
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    answers = [rig.submit(prompt, 14)[1] for prompt in prompts]
    rig.run()
    assert rig.scheduler.num_preemptions > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == continuation(prompt, 14)
    assert rig.pool.num_available == 6


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    rig = Rig(num_pool_blocks=4)
    _, refused = rig.submit([1] * 12, 6)
    assert refused.finish == "error"
    assert "17 tokens" in refused.error
    assert "16" in refused.error
    _, fits = rig.submit([1] * 12, 5)
    rig.run()
    assert fits.finish == "length"


def test_recompute_uses_no_cache_and_leaves_no_trace() -> None:
    rig = Rig(num_pool_blocks=30)
    rig.submit(PROMPT, 1)
    rig.run()
    rig.acknowledge_stores()
    indexed = rig.pool.num_indexed_blocks
    request, answer = rig.submit(PROMPT, 5, plan="recompute", cache=False, cached=cached(*[TierKind.RAM] * 3))
    rig.run()
    assert answer.tokens == continuation(PROMPT, 5)
    assert request.result is not None
    assert request.result.recomputed == 14
    assert sum(request.result.tokens.values()) == 0
    assert request.result.miss["plan"] == 12
    assert (rig.pool.num_indexed_blocks, len(rig.movers.stores)) == (indexed, 0)


def test_blocks_that_hbm_has_and_kvstore_lost_are_offered_again() -> None:
    rig = Rig(num_pool_blocks=30)
    rig.submit(PROMPT, 1)
    rig.run()
    rig.acknowledge_stores()
    request, _ = rig.submit(PROMPT, 1, cached=cached(TierKind.RAM))
    rig.step()
    job = rig.movers.stores[0]
    assert (job.depth, len(job.keys), job.parent) == (1, 2, request.keys[0])


def test_after_a_block_could_not_be_stored_its_children_are_not_offered() -> None:
    rig = Rig(num_pool_blocks=30)
    rig.submit(PROMPT, 12)
    rig.step()
    job = rig.movers.stores.popleft()
    job.num_stored = 1
    rig.scheduler.stored(job)
    rig.run()
    assert not rig.movers.stores


def test_cancelling_gives_the_blocks_back_whatever_the_request_does() -> None:
    rig = Rig(num_pool_blocks=16, max_batch=2)
    running, first = rig.submit(PROMPT, 8)
    fetching, second = rig.submit([8] * 14, 8, cached=cached(*[TierKind.RAM] * 3))
    waiting, third = rig.submit([1] * 6, 2)
    rig.step()
    job = rig.movers.fetches.popleft()
    assert job.claim(rig.now)
    assert job.begin(0)
    for request in (running, fetching, waiting):
        rig.scheduler.cancel(request.id)
        rig.scheduler.cancel(request.id)
    assert (first.finish, second.finish, third.finish) == ("cancelled", "cancelled", "cancelled")
    rig.acknowledge_stores()
    assert rig.pool.num_available == 15, "the block that is being filled is nobody else's before that has ended"
    assert not job.begin(1)
    rig.hbm.scatter(memoryview(bytearray(32)), job.pool_blocks[0])
    job.end(0, Outcome.OK, TierKind.RAM, rig.now)
    rig.end(job)
    assert rig.pool.num_available == 16
    rig.scheduler.cancel("unknown")


def test_a_step_that_the_model_refuses_ends_its_requests_only() -> None:
    rig = Rig()
    rig.model.fail_on = 66
    _, bad = rig.submit([66, 1, 2], 3)
    rig.step()
    assert bad.finish == "error"
    _, good = rig.submit([1, 2, 3], 3)
    rig.run()
    assert good.tokens == continuation([1, 2, 3], 3)
    assert rig.pool.num_free + rig.pool.num_cached + rig.pool.num_held_only == 16


def test_blocks_of_several_pool_blocks_are_fetched_and_stored_whole() -> None:
    rig = Rig(num_pool_blocks=30, pool_block_tokens=2, block_tokens=6)
    request, _ = rig.submit(PROMPT, 1)
    rig.run()
    job = rig.movers.stores.popleft()
    assert [len(group) for group in job.pool_blocks] == [3, 3]
    job.num_stored = 2
    rig.scheduler.stored(job)
    again, answer = rig.submit(PROMPT, 4)
    rig.run()
    assert answer.tokens == continuation(PROMPT, 4)
    assert again.result is not None
    assert again.result.tokens[TierKind.HBM] == 12
    assert request.keys == again.keys[:2]


def test_random_work_in_a_tiny_pool_always_comes_out_right() -> None:
    """Without threads, so that a failure repeats: arrivals, cancels, failing fetches, slow acknowledgements."""
    for seed in range(8):
        draw = random.Random(seed)
        rig = Rig(num_pool_blocks=draw.randint(8, 14), chunk_tokens=draw.choice([3, 8]), max_batch=draw.randint(1, 4))
        jobs = []
        for _ in range(150):
            if draw.random() < 0.3:
                prompt = [draw.randint(0, 2) for _ in range(draw.randint(1, 18))]
                tiers = [TierKind.RAM] * draw.randint(0, 4) if draw.random() < 0.5 else []
                reply = draw.randint(1, 8)
                request, answer = rig.submit(prompt, reply, cached=cached(*tiers) if tiers else None)
                jobs.append((prompt, reply, request, answer))
            if jobs and draw.random() < 0.05:
                rig.scheduler.cancel(draw.choice(jobs)[2].id)
            if rig.movers.fetches and draw.random() < 0.5:
                job = rig.movers.fetches.popleft()
                job.claim(rig.now)
                rig.end(job, draw.choice([Outcome.MISS, Outcome.STALE, Outcome.TIMED_OUT]))
            if draw.random() < 0.2:
                rig.acknowledge_stores()
            rig.now += draw.random()
            rig.step()
        for _ in range(3000):
            rig.acknowledge_stores()
            rig.now += 1
            if not rig.step() and all(answer.finish for *_, answer in jobs):
                break
        for prompt, reply, _, answer in jobs:
            want = continuation(prompt, reply)
            if answer.finish == "cancelled":
                assert answer.tokens == want[: len(answer.tokens)]
            else:
                assert (answer.finish, answer.tokens) == ("length", want)
        rig.acknowledge_stores()
        rig.pool.check_integrity()
        assert rig.pool.num_available == rig.pool.num_pool_blocks
