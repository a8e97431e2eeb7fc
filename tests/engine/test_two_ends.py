"""Computing and loading at once, step by step: the answers are the model's own, whatever lands when, or never."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.jobs import FetchJob, Fill
from engine.request import Cached, PlanMode, Request, RequestState
from kvstore.core.outcome import Outcome, TierKind
from policies.cost import CostModel, LoadCost, PrefillCost, StepWork
from policies.price import GpuPrice
from tests.engine.fakes import continuation
from tests.engine.rig import Answer, Rig

PROMPT = [(7 * i * i + 3 * i) % 90 for i in range(82)]
S3, RAM = TierKind.S3, TierKind.RAM
# A block takes 4 tokens, the prompt has 20 blocks and two tokens more.
NUM_BLOCKS = 20


def cached(*tiers: TierKind) -> Cached:
    return Cached(tiers, "never_stored", asked=True)


class KnownCosts(CostModel):
    """Costs as a test says; remembers what was observed."""

    def __init__(self, rig: Rig, token_s: float, block_s: float, latency_s: float) -> None:
        super().__init__(16, rig.clock)
        self.known = True
        self.seen: list[tuple[TierKind, int, float]] = []
        self._token_s = token_s
        self._loads_s = {RAM: LoadCost(0.001, 1e-6), S3: LoadCost(latency_s, block_s / 32)}

    @property
    def prefill_known(self) -> bool:
        return True

    def load_known(self, tier: TierKind) -> bool:
        return self.known

    def prefill_cost(self) -> PrefillCost:
        return PrefillCost(16, 0.0, self._token_s, 0.0)

    def load_cost(self, tier: TierKind) -> LoadCost:
        return self._loads_s[tier]

    def observe_load(self, tier: TierKind, num_bytes: int, seconds: float, least_s: float | None = None) -> None:
        self.seen.append((tier, num_bytes, seconds))


def measured(rig: Rig, token_s: float = 0.1, block_s: float = 0.4, latency_s: float = 0.1) -> KnownCosts:
    """Let the rig know what computing and loading from S3 cost; RAM comes at once."""
    costs = KnownCosts(rig, token_s, block_s, latency_s)
    rig.costs = rig.caching._costs = rig.caching.planner._costs = rig.caching.planner.loads._costs = costs
    return costs


def rig_of(num_pool_blocks: int = 30, block_s: float = 0.4, latency_s: float = 0.1) -> Rig:
    rig = Rig(num_pool_blocks)
    measured(rig, block_s=block_s, latency_s=latency_s)
    return rig


def step(rig: Rig, token_s: float = 0.1) -> list[tuple[int, int]]:
    """Compute a step and let its time pass; return its pieces as (start, tokens)."""
    pieces = rig.scheduler.next_step()
    told = [(piece.start, piece.num_tokens) for piece in pieces]
    if pieces:
        rig.runner._compute(pieces)
        rig.now += token_s * sum(count for _, count in told)
    rig.pool.check_integrity()
    return told


def asked_blocks(request: Request, job: FetchJob) -> list[int]:
    return [request.keys.index(key) for key in job.keys]


def begun(rig: Rig, *tiers: TierKind, plan: PlanMode = "auto") -> tuple[Request, Answer, FetchJob]:
    request, answer = rig.submit(PROMPT, 3, cached=cached(*tiers), plan=plan)
    rig.scheduler.next_step()
    return request, answer, rig.movers.fetches.popleft()


def finished(rig: Rig, request: Request, answer: Answer) -> None:
    for _ in range(200):
        if not step(rig):
            rig.now += 0.05
        if answer.finish:
            break
    assert answer.tokens == continuation(PROMPT, 3)
    assert request.result is not None
    assert sum(request.result.tokens.values()) + request.result.recomputed == len(PROMPT)
    assert sum(request.result.miss.values()) == request.result.recomputed


def test_the_front_is_computed_while_the_tail_lands_and_they_meet() -> None:
    rig = rig_of()
    request, answer, job = begun(rig, *[S3] * NUM_BLOCKS)
    assert asked_blocks(request, job) == list(range(NUM_BLOCKS - 1, -1, -1))
    assert job.claim(rig.now)
    landed = NUM_BLOCKS
    while not answer.tokens:
        # One block each 0.4 s, as fast as computing is.
        while landed > NUM_BLOCKS - int((rig.now - request.arrival_s - 0.1) / 0.4) and job.num_open:
            landed -= 1
            rig.land(request, job, [landed], S3)
        if not step(rig):
            rig.now += 0.1
    assert rig.now - request.arrival_s == pytest.approx(0.1 * len(PROMPT) / 2, rel=0.15)
    finished(rig, request, answer)
    assert request.result is not None and request.result.plan == "two_ended"
    assert 36 <= request.result.tokens[S3] <= 44
    assert request.result.recomputed_though_cached == NUM_BLOCKS * 4 - request.result.tokens[S3]
    assert not job.num_open and len(rig.caching.planner.loads) == 0


def test_a_chunk_ends_where_what_has_landed_begins_and_the_next_begins_behind_it() -> None:
    rig = rig_of()
    request, answer, job = begun(rig, *[S3] * NUM_BLOCKS)
    assert step(rig) == [(0, 16)]
    rig.land(request, job, [6, *range(9, NUM_BLOCKS)], S3)
    rig.now += 30.0
    assert [step(rig) for _ in range(3)] == [[(16, 8)], [(28, 8)], [(80, 2)]]
    rig.end(job)
    finished(rig, request, answer)
    assert request.result is not None and request.result.plan == "interval"


def test_the_last_chunk_is_cut_so_that_both_ends_arrive_together() -> None:
    rig = rig_of(block_s=0.2)
    request, answer, job = begun(rig, *[S3] * NUM_BLOCKS)
    ((start, count),) = step(rig)
    assert (start, count) == (0, 16)
    rig.land(request, job, range(13, NUM_BLOCKS), S3)
    # Nine blocks are left, which load twice as fast as they are computed.
    assert step(rig) == [(16, 12)]
    rig.land(request, job, range(7, 13), S3)
    assert step(rig) == [(80, 2)]
    rig.end(job)
    finished(rig, request, answer)


def test_a_chunk_that_the_load_would_overtake_is_not_begun() -> None:
    rig = rig_of(block_s=0.001, latency_s=0.01)
    request, answer, job = begun(rig, *[S3] * NUM_BLOCKS)
    assert request.state is RequestState.FETCHING
    assert rig.scheduler.next_deadline_s() is not None
    rig.land(request, job, range(NUM_BLOCKS), S3)
    rig.end(job)
    assert step(rig) == [(80, 2)]
    finished(rig, request, answer)
    assert request.result is not None and request.result.plan == "fetch"
    assert request.result.tokens[S3] == 80


def test_a_load_that_falls_silent_is_computed_around() -> None:
    """As after a cut link: what had landed stays of use, and the promise is kept."""
    rig = rig_of(block_s=0.005, latency_s=0.01)
    request, answer, job = begun(rig, *[S3] * NUM_BLOCKS)
    assert request.state is RequestState.FETCHING
    rig.now += 0.05
    rig.land(request, job, range(15, NUM_BLOCKS), S3)
    recompute_s = rig.costs.prefill(len(PROMPT), 0)
    while not answer.tokens:
        if not step(rig):
            deadline_s = rig.scheduler.next_deadline_s()
            assert deadline_s is not None
            rig.now = max(rig.now + 0.001, deadline_s)
    assert rig.now - request.arrival_s <= 1.2 * recompute_s
    assert request.result is not None
    assert request.result.tokens[S3] == 20
    assert request.result.miss["timed_out"] + request.result.miss.get("plan", 0) == 60
    finished(rig, request, answer)


def test_a_load_that_never_says_a_word_costs_at_most_a_fifth() -> None:
    for tiers in ([S3] * NUM_BLOCKS, [RAM] * NUM_BLOCKS, [RAM] * 8 + [S3] * 12):
        for known in (True, False):
            rig = Rig(num_pool_blocks=30)
            measured(rig, block_s=0.02).known = known
            request, answer, _ = begun(rig, *tiers)
            recompute_s = rig.costs.prefill(len(PROMPT), 0)
            while not answer.tokens:
                if not step(rig):
                    rig.now = max(rig.now + 0.001, rig.scheduler.next_deadline_s() or 0.0)
            assert rig.now - request.arrival_s <= 1.2 * recompute_s
            finished(rig, request, answer)


def test_a_tier_whose_loads_are_always_overtaken_is_known_for_slow_after_two() -> None:
    """Over 12 MB/s nothing of 128 tokens ever landed before they were computed; so nothing was learned, and each
    request waited for the load as if it were the first."""
    rig = Rig(30)
    for _ in range(3):
        rig.costs.observe_step(StepWork.of([(16, 0)], 0), 1.6)
    for _ in range(2):
        assert not rig.costs.load_known(S3)
        request, answer, job = begun(rig, *[S3] * NUM_BLOCKS)
        assert job.claim(rig.now)
        finished(rig, request, answer)
        rig.pool.drop()
    assert rig.costs.load({S3: NUM_BLOCKS * 32}) > 1
    request, answer = rig.submit(PROMPT, 3, cached=cached(*[S3] * NUM_BLOCKS))
    finished(rig, request, answer)
    assert not rig.movers.fetches, "computing it is known to be faster"


def test_the_head_in_ram_is_loaded_then_the_middle_computed_while_the_tail_comes() -> None:
    rig = rig_of()
    request, answer, job = begun(rig, *[RAM] * 8, *[S3] * 12)
    assert asked_blocks(request, job) == [*range(8), *range(19, 7, -1)]
    assert request.state is RequestState.FETCHING
    rig.land(request, job, range(8), RAM)
    assert step(rig) == [(32, 16)]
    rig.land(request, job, range(14, NUM_BLOCKS), S3)
    assert step(rig)[0][0] == 48
    rig.land(request, job, range(request.num_computed // 4, 14), S3)
    rig.end(job)
    finished(rig, request, answer)
    assert request.result is not None and request.result.plan == "interval"
    assert request.result.tokens[RAM] == 32


def test_of_a_prefix_cut_the_head_is_waited_for_only_if_it_comes_sooner_than_it_is_computed() -> None:
    """What is computed in any case counted as loaded for nothing, and a head that was late was waited for."""
    rig = rig_of(block_s=9.0)
    request, answer, job = begun(rig, *[RAM] * 8, *[S3] * 12)
    assert asked_blocks(request, job) == list(range(8))
    assert request.state is RequestState.FETCHING
    rig.now += 1.0
    assert step(rig) == [(0, 16)], "it should have come long ago"
    rig.land(request, job, range(4, 8), RAM)
    assert step(rig) == [(32, 16)]
    rig.end(job)
    finished(rig, request, answer)


def test_a_block_that_is_gone_is_computed_alone_and_stored_again() -> None:
    rig = rig_of()
    request, answer, job = begun(rig, *[S3] * NUM_BLOCKS)
    assert step(rig) == [(0, 16)]
    rig.land(request, job, [9], S3, Outcome.CORRUPT)
    rig.land(request, job, [*range(4, 9), *range(10, NUM_BLOCKS)], S3)
    rig.end(job)
    assert step(rig) == [(36, 4)]
    assert step(rig) == [(80, 2)]
    finished(rig, request, answer)
    assert request.result is not None
    assert request.result.miss["corrupt"] == 4
    assert rig.movers.stores[0].depth == 9
    assert rig.counters.snapshot()["fetch_corrupt"] == 1


def test_what_was_computed_though_it_is_cached_is_not_stored_again() -> None:
    rig = rig_of(block_s=2.0)
    request, answer, job = begun(rig, *[S3] * NUM_BLOCKS)
    finished(rig, request, answer)
    rig.end(job)
    assert request.result is not None and request.result.recomputed == len(PROMPT)
    assert all(store.depth >= NUM_BLOCKS for store in rig.movers.stores)


@pytest.mark.parametrize(("plan", "computed", "name"), [((4, 8), (16, 16), "interval"), ((0, 6), (0, 16), "two_ended")])
def test_a_pinned_interval_is_computed_exactly(plan: PlanMode, computed: tuple[int, int], name: str) -> None:
    rig = rig_of(block_s=9.0)
    request, answer, job = begun(rig, *[S3] * NUM_BLOCKS, plan=plan)
    assert isinstance(plan, tuple)
    if plan[0]:
        assert step(rig) == [], "first the head"
        rig.land(request, job, range(plan[0]), S3)
    assert step(rig) == [computed]
    while request.num_computed < plan[1] * 4:
        step(rig)
    assert request.num_computed == plan[1] * 4
    assert step(rig) == [], "then it waits for the rest, however long that takes"
    rig.land(request, job, range(plan[1], NUM_BLOCKS), S3)
    rig.end(job)
    assert step(rig) == [(80, 2)]
    finished(rig, request, answer)
    assert request.result is not None and request.result.plan == name


def test_a_pinned_plan_waits_ten_seconds_and_no_longer() -> None:
    rig = rig_of()
    request, answer, _ = begun(rig, *[S3] * NUM_BLOCKS, plan="fetch")
    rig.now = request.arrival_s + 9.9
    assert step(rig) == []
    rig.now = request.arrival_s + 10.1
    assert step(rig) == [(0, 16)]
    finished(rig, request, answer)
    assert request.result is not None and request.result.miss["timed_out"] == 80


def test_loads_of_two_requests_are_one_observation_of_the_tier() -> None:
    """Each of them seemed half as fast as the tier is, and the next request computed what it should have loaded."""
    rig = rig_of(60, block_s=0.01, latency_s=0.01)
    costs = measured(rig, block_s=0.01, latency_s=0.01)
    pairs = []
    for first in (1, 2):
        prompt = [first, *PROMPT[1:]]
        request, answer = rig.submit(prompt, 2, cached=cached(*[S3] * NUM_BLOCKS))
        pairs.append((request, answer))
    assert rig.scheduler.next_step() == []
    jobs = [rig.movers.fetches.popleft() for _ in pairs]
    queues = rig.caching.planner.loads.queues_s()
    assert queues[S3] == pytest.approx(0.4, rel=0.1)
    for job in jobs:
        assert job.claim(rig.now)
    for block in range(NUM_BLOCKS - 1, -1, -1):
        for (request, _), job in zip(pairs, jobs, strict=True):
            rig.now += 0.01
            rig.land(request, job, [block], S3)
    for job in jobs:
        rig.end(job)
    rig.run()
    assert [(tier, count) for tier, count, _ in costs.seen] == [(S3, 40 * 32)]
    assert costs.seen[0][2] == pytest.approx(0.4, rel=0.01)


def test_with_a_price_on_gpu_seconds_less_is_computed() -> None:
    computed: dict[str, int] = {}
    for objective in ("latency", "throughput"):
        rig = rig_of(block_s=0.4, latency_s=0.0)
        if objective == "throughput":
            rig.caching.planner._price = price = GpuPrice(1, rig.now - 100.0)
            for second in range(100):
                price.arrived(rig.now - 100.0 + second)
                price.computed(0.6, rig.now - 100.0 + second)
        request, answer, job = begun(rig, *[S3] * NUM_BLOCKS)
        rig.land(request, job, range(10, NUM_BLOCKS), S3)
        rig.now += 4.0
        for block in range(9, -1, -1):
            index = job.keys.index(request.keys[block])
            if job.state(index) is Fill.WANTED:
                rig.land(request, job, [block], S3)
        rig.end(job)
        finished(rig, request, answer)
        assert request.result is not None and request.decision is not None
        assert request.decision.why == objective
        computed[objective] = request.result.recomputed
    assert computed["throughput"] < computed["latency"]


def test_what_was_taken_back_while_it_is_read_stands_in_front_of_the_next_load() -> None:
    rig = rig_of(60, block_s=0.3, latency_s=0.0)
    request, answer, job = begun(rig, *[S3] * NUM_BLOCKS)
    assert job.claim(rig.now)
    finished(rig, request, answer)
    rig.end(job)
    leftover_s = rig.caching.planner.loads.queues_s()[S3]
    assert leftover_s > 0.0
    rig.now += leftover_s
    assert rig.caching.planner.loads.queues_s()[S3] == pytest.approx(0.0)


def test_preempted_in_the_middle_of_a_load_it_begins_anew_and_answers_right() -> None:
    rig = Rig(num_pool_blocks=24, max_batch=2)
    measured(rig)
    _, first = rig.submit([5, 4, 3], 20)
    rig.step()
    request, answer, job = begun(rig, *[S3] * NUM_BLOCKS)
    assert job.begin(0)
    while rig.scheduler.num_preemptions == 0 and not first.finish:
        step(rig)
    assert rig.scheduler.num_preemptions == 1
    assert request.state is RequestState.WAITING
    assert job.state(0) is Fill.FILLING and rig.pool.num_held_only == 1
    job.end(0, Outcome.OK, S3, rig.now)
    rig.end(job)
    assert rig.pool.num_held_only == 0
    for _ in range(400):
        rig.acknowledge_stores()
        if not step(rig):
            rig.now += 0.1
        if answer.finish and first.finish:
            break
    assert first.tokens == continuation([5, 4, 3], 20)
    assert answer.tokens == continuation(PROMPT, 3)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 30))
def test_random_landings_failures_and_cancels_never_change_an_answer(seed: int) -> None:
    draw = random.Random(seed)
    pool_blocks = draw.randint(26, 70)
    pool_block_tokens = draw.choice([4, 2])
    rig = Rig(
        pool_blocks * 4 // pool_block_tokens,
        pool_block_tokens,
        block_tokens=4,
        chunk_tokens=draw.choice([3, 8, 16]),
        max_batch=draw.randint(1, 4),
    )
    if draw.random() < 0.8:
        measured(rig, block_s=draw.choice([0.001, 0.1, 0.4, 2.0]))
    requests: dict[str, Request] = {}
    asked: list[tuple[Request, Answer]] = []
    filling: list[tuple[FetchJob, int]] = []
    jobs: list[FetchJob] = []
    for _ in range(draw.randint(30, 120)):
        if len(asked) < 8 and draw.random() < 0.2:
            prompt = [draw.randint(0, 1), *PROMPT[1 : draw.randint(6, len(PROMPT))]]
            count = (len(prompt) - 1) // 4
            near = draw.randint(0, count)
            plan: PlanMode = draw.choice(["auto", "auto", "auto", "fetch", (draw.randint(0, 4), draw.randint(4, 20))])
            request, answer = rig.submit(
                prompt, draw.randint(1, 4), cached=cached(*[RAM] * near, *[S3] * (count - near)), plan=plan
            )
            requests[request.id] = request
            asked.append((request, answer))
        while rig.movers.fetches:
            job = rig.movers.fetches.popleft()
            if job.claim(rig.now):
                jobs.append(job)
            else:
                rig.end(job)
        for job in list(jobs):
            request = requests[job.request_id]
            for _ in range(draw.randint(0, 6)):
                index = draw.randrange(len(job.keys)) if draw.random() < 0.3 else _next_wanted(job)
                if index is None or job.state(index) is not Fill.WANTED:
                    continue
                if draw.random() < 0.05:
                    job.refuse(index, draw.choice([Outcome.MISS, Outcome.TIMED_OUT]), S3, rig.now)
                elif job.begin(index):
                    filling.append((job, index))
            if draw.random() < 0.03 or not job.num_open:
                for other, index in list(filling):
                    if other is job:
                        _fill(rig, requests, draw, job, index)
                        filling.remove((other, index))
                jobs.remove(job)
                rig.end(job, draw.choice([Outcome.TIMED_OUT, Outcome.UNAVAILABLE]))
        for job, index in list(filling):
            if draw.random() < 0.6:
                _fill(rig, requests, draw, job, index)
                filling.remove((job, index))
        if asked and draw.random() < 0.04:
            rig.scheduler.cancel(draw.choice(asked)[0].id)
        if draw.random() < 0.1:
            rig.pool.drop()
        if draw.random() < 0.3:
            rig.acknowledge_stores()
        if not step(rig):
            rig.now += draw.random() * 0.3
    for job, index in filling:
        _fill(rig, requests, draw, job, index)
    for job in jobs:
        rig.end(job, Outcome.UNAVAILABLE)
    for _ in range(3000):
        while rig.movers.fetches:
            rig.end(rig.movers.fetches.popleft(), Outcome.UNAVAILABLE)
        rig.acknowledge_stores()
        if not step(rig):
            rig.now += 1.0
            if all(answer.finish for _, answer in asked):
                break
    for request, answer in asked:
        want = continuation(request.prompt, request.max_new_tokens)
        if answer.finish == "cancelled":
            assert answer.tokens == want[: len(answer.tokens)]
        else:
            assert (answer.finish, answer.tokens) == ("length", want)
    rig.acknowledge_stores()
    assert rig.pool.num_available == rig.pool.num_pool_blocks, "every hold and reference has come back"
    assert len(rig.caching.planner.loads) == 0


def _next_wanted(job: FetchJob) -> int | None:
    return next((i for i in range(len(job.keys)) if job.state(i) is Fill.WANTED), None)


def _fill(rig: Rig, requests: dict[str, Request], draw: random.Random, job: FetchJob, index: int) -> None:
    """End a copy; one that turns out to be of another block has left anything behind."""
    if draw.random() < 0.08:
        for block in job.pool_blocks[index]:
            rig.tensor[block] = -7.0
        job.end(index, Outcome.STALE, S3, rig.now)
    else:
        rig.fill(requests[job.request_id], job, index)
        job.end(index, Outcome.OK, draw.choice([S3, RAM]), rig.now)
