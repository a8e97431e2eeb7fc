"""The scheduler's side alone, with the workers' news written by hand."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connectors.vllm_parts.consult import Answer, Shard
from kvstore.connectors.vllm_parts.costs import Costs, blank_profile
from kvstore.connectors.vllm_parts.orders import News
from kvstore.connectors.vllm_parts.scheduler import Scheduler
from kvstore.connectors.vllm_parts.settings import Settings
from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.connectors.vllm_parts.tracked import Tracked
from kvstore.core.outcome import TierKind
from kvstore.wire import Report
from tests.support.vllm import BLOCK_TOKENS, Clock, FakeRequest

SETTINGS = Settings(Path("/nowhere"), plan="fetch")


class Rig:
    """No daemon: an answer is there when the test gives it."""

    def __init__(self, num_ranks: int = 1, settings: Settings = SETTINGS) -> None:
        # Whether vLLM's prefix cache has any block.
        self.has_cached_blocks = False
        self.clock = Clock()
        self.counters = Counters(self.clock)
        self._go_on = threading.Event()
        costs = Costs(blank_profile("m", "d", 64, BLOCK_TOKENS, 64), None, self.clock)
        self.scheduler = Scheduler(
            settings,
            BLOCK_TOKENS,
            1,
            64,
            num_ranks,
            self._no_shards,
            costs,
            self.counters,
            has_cached_blocks=lambda: self.has_cached_blocks,
            clock=self.clock,
            wall_clock=self.clock,
        )

    def _no_shards(self) -> list[Shard]:
        assert self._go_on.wait(30)
        return []

    def close(self) -> None:
        self._go_on.set()
        self.scheduler.close()

    def begin(self, num_tokens: int, num_cached: int = 0, request_id: str = "r") -> FakeRequest:
        """A request of which the daemon has the first `num_cached` blocks."""
        request = FakeRequest(request_id, list(range(num_tokens)))
        self.scheduler.on_new_request(request)
        inquiry = self.tracked(request).inquiry
        assert inquiry is not None
        inquiry.answer = Answer(0, (TierKind.RAM,) * num_cached, asked=True)
        return request

    def load(self, request: FakeRequest, block_ids: Sequence[int]) -> None:
        """vLLM makes room for what is cached, and a step orders it."""
        num_tokens, is_async = self.scheduler.match(request, 0)
        assert num_tokens and is_async
        self.scheduler.allocated(request, block_ids, num_tokens)
        request.num_computed_tokens = num_tokens
        assert len(self.scheduler.begin_step(step_of()).loads) == 1

    def tell_into(self, reports: list[Report]) -> None:
        """Have what the daemon is told of requests in `reports`."""
        client = SimpleNamespace(report=reports.append)
        shard: Any = SimpleNamespace(keys=lambda hashes: list(hashes), client=client)
        self.scheduler._consult.tell = lambda work: work([shard])  # type: ignore[method-assign]

    def tracked(self, request: FakeRequest) -> Tracked:
        return self.scheduler._requests[request.request_id]

    def counted(self) -> dict[str, int]:
        report = self.counters.take()
        return {} if report is None else dict(report["counts"])


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def step_of(
    new: Sequence[tuple[str, int, list[int]]] = (),
    cached: Sequence[tuple[str, int, list[int] | None]] = (),
    **counts: int,
) -> Any:
    """vLLM's output: (request, computed tokens, block ids) of each, and how many tokens are computed in it."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed, block_ids=(blocks,))
            for name, computed, blocks in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _, _ in cached],
            num_computed_tokens=[computed for _, computed, _ in cached],
            new_block_ids=[None if blocks is None else (blocks,) for _, _, blocks in cached],
            num_output_tokens=[0 for _ in cached],
            resumed_req_ids=set(),
        ),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
    )


def test_a_load_is_over_when_every_rank_has_ended_it() -> None:
    """A request was aborted when one of two ranks had ended its load. vLLM freed it when the other one had, and was
    told once more that it might: the engine died."""
    rig = Rig(num_ranks=2)
    try:
        request = rig.begin(18, num_cached=4)
        tracked = rig.tracked(request)
        # Of before a preemption.
        tracked.outstanding = 3
        rig.load(request, [1, 2, 3, 4, 5])
        rig.scheduler.end_step(News(num_ended={"r": 1}, load_ends={"r": {1: 4}}), set())
        assert tracked.is_loading
        assert tracked.load_end_s is None
        assert not rig.scheduler.finished(request, [1, 2, 3, 4])
        assert not rig.scheduler.begin_step(step_of()).stores, "the other rank still writes there"
    finally:
        rig.close()


def test_what_all_ranks_have_loaded_counts_once() -> None:
    rig = Rig(num_ranks=2)
    try:
        request = rig.begin(18, num_cached=4)
        rig.load(request, [1, 2, 3, 4, 5])
        for _ in range(2):
            rig.scheduler.end_step(News(num_ended={"r": 1}, load_ends={"r": {1: 4}}), set())
        assert not rig.tracked(request).is_loading
        assert rig.tracked(request).loaded == {TierKind.RAM: 4}
    finally:
        rig.close()


def test_a_step_of_which_something_failed_loads_all_the_same_and_lets_no_store_read_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty step was the answer: what waited to be stored was read while the step overwrote it, and the request
    whose load was lost waited for ever."""
    request = rig.begin(18, num_cached=4)
    num_tokens, _ = rig.scheduler.match(request, 0)
    assert num_tokens
    rig.scheduler.allocated(request, [1, 2, 3, 4, 5], num_tokens)
    other = rig.begin(10, request_id="other")
    output = step_of([("other", 0, [6, 7, 8])], other=10)
    with monkeypatch.context() as faulty:
        faulty.setattr(rig.scheduler, "_offer", lambda *_: pytest.fail("a fault"))
        with pytest.raises(pytest.fail.Exception):
            rig.scheduler.begin_step(output)
    step = rig.scheduler.begin_step_after_fault(output)
    assert step.writes_anywhere
    assert [load.block_ids for load in step.loads] == [(1, 2, 3, 4)]
    assert step.num_tokens == 10
    assert not step.stores
    # Whose blocks are whose is not certain any more.
    other.num_computed_tokens = 10
    assert not rig.scheduler.begin_step(step_of(cached=[("other", 10, None)], other=1)).stores
    after = rig.begin(10, request_id="after")
    assert after.num_tokens == 10
    assert rig.scheduler.begin_step(step_of([("after", 0, [9, 10, 11])], after=10)).stores


def test_what_a_step_writes_is_known_of_requests_too_that_are_not_followed(rig: Rig) -> None:
    output = step_of([("new", 4, [1, 2, 3])], [("old", 8, [4]), ("resumed", 4, [5, 6]), ("same", 9, None)])
    output.scheduled_cached_reqs.resumed_req_ids.add("resumed")
    assert rig.scheduler.begin_step(output).written == (2, 3, 4, 6)


def test_what_was_computed_before_a_reset_is_not_stored_after_it(rig: Rig) -> None:
    """After new weights came while requests ran, KV of the old ones was stored under the new keys."""
    running = rig.begin(18)
    assert rig.scheduler.begin_step(step_of([("r", 0, [1, 2, 3])], r=10)).stores
    running.num_computed_tokens = 10
    waiting = rig.begin(10, request_id="waiting")
    rig.scheduler.reset()
    assert not rig.scheduler.begin_step(step_of(cached=[("r", 10, [4, 5])], r=8)).stores
    running.num_computed_tokens = 18
    rig.scheduler.finished(running, [1, 2, 3, 4, 5])
    assert not rig.scheduler.begin_step(step_of()).stores
    assert waiting.num_computed_tokens == 0
    assert rig.scheduler.begin_step(step_of([("waiting", 0, [6, 7, 8])], waiting=10)).stores


def test_what_vllm_still_has_of_before_a_reset_is_not_stored_after_it(rig: Rig) -> None:
    """vLLM does not empty its prefix cache while requests run."""
    running = rig.begin(18)
    rig.scheduler.begin_step(step_of([("r", 0, [1, 2, 3])], r=10))
    running.num_computed_tokens = 10
    rig.has_cached_blocks = True
    rig.scheduler.reset()
    for request_id, local, expected in (("hit", 8, 0), ("fresh", 0, 1)):
        request = rig.begin(18, request_id=request_id)
        rig.scheduler.match(request, local)
        step = rig.scheduler.begin_step(step_of([(request_id, local, [1, 2, 6, 7, 8])], **{request_id: 10}))
        assert len(step.stores) == expected, request_id
        rig.scheduler.finished(request, [1, 2, 6, 7, 8])
    rig.scheduler.finished(running, [1, 2, 3])
    rig.scheduler.end_step(None, {"r", "fresh"})
    rig.has_cached_blocks = False
    rig.scheduler.reset()
    request = rig.begin(18, request_id="later")
    rig.scheduler.match(request, 8)
    assert rig.scheduler.begin_step(step_of([("later", 8, [1, 2, 6, 7, 8])], later=10)).stores


def test_what_vllm_could_not_forget_for_a_load_that_nobody_waits_for_is_not_stored_after_a_reset(rig: Rig) -> None:
    """A request was aborted while its blocks were being loaded. vLLM keeps those until the load ends, and so all that
    its prefix cache has; that was hit, and stored under the new keys though it was of the old weights."""
    request = rig.begin(18, num_cached=4)
    rig.load(request, [1, 2, 3, 4, 5])
    assert not rig.scheduler.finished(request, [1, 2, 3, 4])
    rig.has_cached_blocks = True
    rig.scheduler.reset()
    later = rig.begin(18, request_id="later")
    rig.scheduler.match(later, 8)
    assert not rig.scheduler.begin_step(step_of([("later", 8, [6, 7, 8, 9, 10])], later=10)).stores


def test_after_a_preemption_everything_is_offered_again_where_nobody_knows_what_was_stored(rig: Rig) -> None:
    """What had waited to be stored was left out with the preemption, and never offered any more."""
    request = rig.begin(18)
    assert len(rig.scheduler.begin_step(step_of([("r", 0, [1, 2, 3, 4, 5])], r=18)).stores) == 1
    request.num_preemptions += 1
    assert rig.scheduler.match(request, 0) == (None, False)
    rig.clock.now += 10.0
    assert rig.scheduler.match(request, 0) == (0, False)
    (order,) = rig.scheduler.begin_step(step_of([("r", 0, [6, 7, 8, 9, 10])], r=18)).stores
    assert (order.depth, order.block_ids) == (0, (6, 7, 8, 9))


def test_a_request_that_ends_in_the_step_of_its_load_is_stored_and_reported() -> None:
    """vLLM says that it has ended before the news of the load come: of an answer of one token nothing was stored."""
    rig = Rig(settings=replace(SETTINGS, load="sync"))
    try:
        request = rig.begin(26, num_cached=4)
        num_tokens, is_async = rig.scheduler.match(request, 0)
        assert (num_tokens, is_async) == (16, False)
        rig.scheduler.allocated(request, [1, 2, 3, 4, 5, 6, 7], num_tokens)
        step = rig.scheduler.begin_step(step_of([("r", 16, [1, 2, 3, 4, 5, 6, 7])], r=10))
        assert step.loads and not step.stores
        request.num_computed_tokens = 26
        request.all_token_ids.append(1)
        reports: list[Report] = []
        rig.tell_into(reports)
        assert rig.scheduler.finished(request, [1, 2, 3, 4, 5, 6, 7])
        (order,) = rig.scheduler.begin_step(step_of()).stores
        assert (order.depth, order.block_ids) == (4, (5, 6))
        assert [(report.ram, report.recomputed) for report in reports] == [(16, 10)]
    finally:
        rig.close()


def test_a_session_belongs_to_the_salt_of_its_request(rig: Rig) -> None:
    names = []
    for number, salt in enumerate((None, "", "one", "two", "one")):
        request: Any = FakeRequest(f"r{number}", list(range(18)), {"session_id": "chat"})
        request.cache_salt = salt
        rig.scheduler.on_new_request(request)
        names.append(rig.tracked(request).wishes.session_id)
    assert names[:2] == ["chat", "chat"]
    assert names[2] == names[4]
    assert len(set(names)) == 3


def test_what_was_asked_for_a_request_that_has_ended_is_not_asked_any_more(rig: Rig) -> None:
    request = FakeRequest("r", list(range(18)))
    rig.scheduler.on_new_request(request)
    inquiry = rig.tracked(request).inquiry
    assert inquiry is not None
    rig.scheduler.finished(request, [])
    assert inquiry.is_dropped


def test_what_is_computed_in_place_of_a_load_that_failed_is_stored(rig: Rig) -> None:
    """The old answer was taken for true once more, so that a damaged prefix did not heal."""
    request = rig.begin(18, num_cached=4)
    rig.load(request, [1, 2, 3, 4, 5])
    rig.scheduler.end_step(News(num_ended={"r": 1}, load_ends={"r": {}}, failed_from={"r": 0}), set())
    request.num_computed_tokens = 0
    assert rig.scheduler.match(request, 0) == (0, False)
    (order,) = rig.scheduler.begin_step(step_of([("r", 0, [6, 7, 8, 9, 10])], r=18)).stores
    assert (order.depth, order.block_ids) == (0, (6, 7, 8, 9))


def test_what_vllm_itself_has_is_reported_as_its_own(rig: Rig) -> None:
    request = rig.begin(18, num_cached=4)
    assert rig.scheduler.match(request, 16) == (0, False)
    tracked = rig.tracked(request)
    assert (tracked.local_tokens, tracked.plan) == (16, "hbm")


def test_running_requests_do_not_stand_still_for_a_hold_that_is_late(rig: Rig) -> None:
    """vLLM scheduled none of them, for up to two seconds, instead of preempting one."""
    request = rig.begin(18)
    rig.scheduler.begin_step(step_of([("r", 0, [1, 2, 3, 4, 5])], r=18))
    request.num_computed_tokens = 18
    assert not rig.scheduler.is_holding
    assert rig.scheduler.finished(request, [1, 2, 3, 4, 5])
    assert rig.scheduler.is_holding
    rig.clock.now += 0.06
    assert not rig.scheduler.is_holding
    rig.scheduler.end_step(None, {"r"})
    assert not rig.scheduler._holding


def test_a_request_that_waits_for_room_is_counted_once_and_when_it_is_loaded(rig: Rig) -> None:
    """vLLM asks again as long as it lacks room, and each time blocks were counted that nobody loaded."""
    request = rig.begin(18, num_cached=4)
    for _ in range(3):
        assert rig.scheduler.match(request, 0) == (16, True)
        rig.clock.now += 1.0
    assert "consults|hit" not in rig.counted()
    rig.clock.now += 1.0
    rig.load(request, [1, 2, 3, 4, 5])
    counted = rig.counted()
    assert (counted["consults|hit"], counted["planned_blocks|load"]) == (1, 4)
