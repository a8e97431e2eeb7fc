"""Orders carried out against a daemon in memory; threads are waited for, nothing sleeps."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.connectors.vllm_parts import scout
from kvstore.connectors.vllm_parts.orders import LoadOrder, News, Step, StoreOrder
from kvstore.connectors.vllm_parts.settings import Settings
from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.connectors.vllm_parts.worker import Ended, Worker
from kvstore.core.errors import TierUnavailable
from kvstore.core.key import engine_keys
from tests.support.vllm import Clock, MemoryDaemon, MemoryPages, hashes_of, kv_of, namespace

SETTINGS = Settings(Path("/nowhere"), num_loaders=2, drain_s=5.0)
HASHES = tuple(hashes_of(range(48)))
KEYS = engine_keys(namespace().root(), HASHES)


class Rig:
    def __init__(self, settings: Settings = SETTINGS, *, may_store: bool = True) -> None:
        self.clock = Clock()
        self.daemon = MemoryDaemon()
        self.pages = MemoryPages(64)
        self.counters = Counters()
        self.news = News()
        # All that has ended so far.
        self.ended = Ended()
        self.worker = Worker(
            settings,
            namespace(),
            self.pages,
            self.daemon.client,
            self.counters,
            may_store=may_store,
            clock=self.clock,
            sleep=lambda seconds: None,
        )

    def compute(self, block_ids: tuple[int, ...], first: int = 0) -> None:
        for index, block_id in enumerate(block_ids, first):
            self.pages.blocks[block_id][:] = kv_of(HASHES[index])

    def step(self, step: Step) -> Ended:
        self.worker.clear(step)
        self.worker.load(step)
        self.worker.store(step)
        return self.take(step)

    def take(self, step: Step = Step()) -> Ended:  # noqa: B008
        ended = self.worker.take(step)
        self.ended.stored |= ended.stored
        self.ended.loaded |= ended.loaded
        self.ended.failed_blocks |= ended.failed_blocks
        news = self.worker.take_news()
        if news is not None:
            self.news.add([news])
        return ended

    def until(self, condition: Callable[[Ended], bool]) -> Ended:
        """Run empty steps until what is waited for has ended."""
        for _ in range(30_000):
            if condition(self.ended):
                return self.ended
            self.take()
            # The threads must get their turn, also on a machine that has others to run.
            threading.Event().wait(0.001)
        raise AssertionError("it did not happen")

    def store(self, count: int = 8) -> None:
        ids = tuple(range(1, count + 1))
        self.compute(ids)
        self.step(Step(stores=(store_order(ids),), num_tokens=1, number=1))
        self.until(lambda _: self.news.settled.get("r", 0) == count)

    def counted(self) -> dict[str, int]:
        report = self.counters.take()
        return {} if report is None else dict(report["counts"])


def hold_until(go_on: threading.Event) -> None:
    assert go_on.wait(30)


def store_order(block_ids: tuple[int, ...], first: int = 0) -> StoreOrder:
    end = first + len(block_ids)
    return StoreOrder("r", HASHES[first:end], block_ids, HASHES[first - 1] if first else None, first)


def load_order(block_ids: tuple[int, ...], *, is_async: bool = True, request_id: str = "r") -> LoadOrder:
    return LoadOrder(request_id, HASHES[: len(block_ids)], block_ids, (1,) * len(block_ids), 2.0, 1.0, is_async)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.worker.close()
    assert made.daemon.open_clients == 0


def test_stored_blocks_are_loaded_into_other_places(rig: Rig) -> None:
    rig.store()
    assert set(rig.daemon.slots) == set(KEYS[:8])
    rig.step(Step(loads=(load_order(tuple(range(31, 39))),)))
    ended = rig.until(lambda each: "r" in each.loaded)
    assert ended.failed_blocks == set()
    assert [rig.pages.blocks[31 + i] for i in range(8)] == [kv_of(each) for each in HASHES[:8]]
    assert rig.news.num_ended == {"r": 1}
    assert rig.news.load_ends == {"r": {1: 8}}
    assert rig.news.loads[0][:2] == (1, 8 * rig.pages.payload_bytes)
    assert rig.news.steps == [1]


def test_the_daemon_is_told_the_tokens_that_are_in_an_order(rig: Rig) -> None:
    rig.compute((1, 2, 3))
    told = bytes(range(24))
    rig.step(Step(stores=(dataclasses.replace(store_order((1, 2, 3)), tokens=told),), num_tokens=1, number=1))
    rig.until(lambda _: rig.news.settled.get("r", 0) == 3)
    assert rig.daemon.told_tokens == told


def test_a_worker_without_work_finds_the_daemon_and_finds_it_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It attached with the first order only, so that an idle engine whose daemon was restarted had none."""
    monkeypatch.setattr(scout, "EVERY_S", 0.001)
    gate = rig.worker._gate
    rig.worker.begin()
    for _ in range(2):
        rig.until(lambda _: gate.is_attached)
        rig.daemon.is_away = True
        rig.until(lambda _: gate.is_silent)
        rig.daemon.is_away = False
    rig.until(lambda _: gate.is_attached)
    assert not rig.daemon.slots


def test_a_load_that_the_step_needs_is_over_before_it(rig: Rig) -> None:
    rig.store()
    order = load_order((40, 41), is_async=False)
    rig.worker.load(Step(loads=(order,)))
    assert rig.pages.blocks[41] == kv_of(HASHES[1])
    ended = rig.take()
    assert ended.loaded == set(), "vLLM does not wait for those"
    assert ended.failed_blocks == set()


def test_the_end_of_a_load_is_no_news_before_vllm_hears_of_it(rig: Rig) -> None:
    """It ended between the two, and a request that was aborted then was freed twice."""
    rig.store(2)
    rig.worker.load(Step(loads=(load_order((31, 32)),)))
    while not rig.worker._ended_loads:
        threading.Event().wait(0.001)
    early = rig.worker.take_news()
    assert early is None or not (early.num_ended or early.load_ends)
    assert rig.worker.take(Step()).loaded == {"r"}
    news = rig.worker.take_news()
    assert news is not None and news.num_ended == {"r": 1}


@pytest.mark.parametrize("is_async", [True, False])
def test_a_flipped_byte_is_a_failed_block_and_the_others_are_loaded(rig: Rig, is_async: bool) -> None:
    rig.store()
    rig.daemon.slots[KEYS[3]][5] ^= 1
    rig.step(Step(loads=(load_order(tuple(range(31, 39)), is_async=is_async),)))
    ended = rig.until(lambda each: bool(each.failed_blocks))
    assert ended.failed_blocks == {34}
    assert rig.news.failed_from == {"r": 3}
    assert rig.counted()["failed_blocks|corrupt"] == 1


def test_swapped_blocks_are_failed_blocks(rig: Rig) -> None:
    rig.store()
    slots = rig.daemon.slots
    slots[KEYS[0]], slots[KEYS[1]] = slots[KEYS[1]], slots[KEYS[0]]
    rig.step(Step(loads=(load_order((31, 32, 33)),)))
    assert rig.until(lambda each: "r" in each.loaded).failed_blocks == {31, 32}


def test_without_verification_swapped_blocks_are_taken() -> None:
    """Else the test above could pass for another reason."""
    rig = Rig(replace(SETTINGS, verify=False))
    try:
        rig.store()
        slots = rig.daemon.slots
        slots[KEYS[0]], slots[KEYS[1]] = slots[KEYS[1]], slots[KEYS[0]]
        rig.step(Step(loads=(load_order((31, 32)),)))
        assert rig.until(lambda each: "r" in each.loaded).failed_blocks == set()
        assert rig.pages.blocks[31] == kv_of(HASHES[1])
    finally:
        rig.worker.close()


def test_a_slot_that_became_another_blocks_during_the_copy_is_a_failed_block(rig: Rig) -> None:
    rig.store()
    rig.daemon.stale.add(KEYS[2])
    rig.step(Step(loads=(load_order((31, 32, 33)),)))
    assert rig.until(lambda each: "r" in each.loaded).failed_blocks == {33}


def test_blocks_that_are_not_there_fail_at_once(rig: Rig) -> None:
    rig.store(2)
    rig.step(Step(loads=(load_order((31, 32, 33)),)))
    assert rig.until(lambda each: "r" in each.loaded).failed_blocks == {33}


def test_a_daemon_that_is_away_fails_loads_and_stores_at_once(rig: Rig) -> None:
    rig.daemon.is_away = True
    rig.step(Step(loads=(load_order((31, 32)),), stores=(store_order((1, 2)),), num_tokens=1))
    assert rig.until(lambda each: "r" in each.loaded).failed_blocks == {31, 32}
    rig.until(lambda _: rig.news.settled.get("r") == 2)
    assert rig.news.unstored == {"r": 0}
    counted = rig.counted()
    assert counted["loads|unavailable"] == 1
    assert counted["unstored_blocks|unavailable"] == 2


def test_a_silent_daemon_fails_a_load_when_its_silence_is_over(rig: Rig) -> None:
    rig.store(2)
    rig.daemon.is_silent = True
    rig.step(Step(loads=(load_order((31, 32)),)))
    assert rig.take().loaded == set()
    rig.clock.now += 1.5
    assert rig.until(lambda each: "r" in each.loaded).failed_blocks == {31, 32}
    assert rig.news.silences[0][0] == 1


def test_loads_for_which_no_thread_is_free_fail_at_their_deadline(rig: Rig) -> None:
    rig.store(1)
    rig.daemon.is_silent = True
    orders = tuple(load_order((40 + n,), request_id=f"r{n}") for n in range(6))
    rig.step(Step(loads=tuple(replace(order, silence_s=100.0) for order in orders)))
    rig.clock.now += 2.5
    assert rig.until(lambda each: len(each.loaded) == 6).failed_blocks == set(range(40, 46))


def test_nobody_writes_into_blocks_of_a_load_that_was_reported(rig: Rig) -> None:
    """A late load wrote into blocks that were already another request's: wrong KV without any sign of it."""
    rig.store(2)
    rig.daemon.is_silent = True
    rig.step(Step(loads=(load_order((31, 32)),)))
    rig.clock.now += 5.0
    rig.until(lambda each: "r" in each.loaded)
    rig.pages.blocks[31][:] = b"x" * len(rig.pages.blocks[31])
    rig.daemon.is_silent = False
    rig.worker.close()
    assert rig.pages.blocks[31] == b"x" * len(rig.pages.blocks[31])


def test_a_block_that_is_overwritten_before_its_turn_is_not_stored(rig: Rig) -> None:
    go_on, has_begun = threading.Event(), threading.Event()

    def hold(block_id: int) -> None:
        has_begun.set()
        assert go_on.wait(30)

    rig.pages.before_gather = hold
    ids = tuple(range(1, 13))
    rig.compute(ids)
    rig.step(Step(stores=(store_order(ids),), num_tokens=1))
    assert has_begun.wait(30)
    # A few are copied at once; this one comes after them.
    rig.worker.clear(Step(written=(11,)))
    rig.pages.blocks[11][:] = b"z" * len(rig.pages.blocks[11])
    go_on.set()
    rig.until(lambda _: rig.news.settled.get("r") == 12)
    assert set(rig.daemon.slots) == set(KEYS) - {KEYS[10]}
    assert rig.counted()["unstored_blocks|overwritten"] == 1


def test_a_step_that_may_write_anywhere_withdraws_all_that_waits(rig: Rig) -> None:
    go_on, has_begun = threading.Event(), threading.Event()

    def hold(block_id: int) -> None:
        has_begun.set()
        assert go_on.wait(30)

    rig.pages.before_gather = hold
    ids = tuple(range(1, 13))
    rig.compute(ids)
    rig.step(Step(stores=(store_order(ids),), num_tokens=1))
    assert has_begun.wait(30)
    thread = threading.Thread(target=rig.worker.clear, args=(Step(writes_anywhere=True),))
    thread.start()
    # What has begun is waited for.
    while len(rig.worker._fence) > 8:
        threading.Event().wait(0.001)
    go_on.set()
    thread.join(30)
    rig.until(lambda _: rig.news.settled.get("r") == 12)
    assert set(rig.daemon.slots) == set(KEYS[:8])


def test_overwriting_waits_for_the_copy_of_those_blocks_alone(rig: Rig) -> None:
    go_on, has_begun = threading.Event(), threading.Event()

    def hold(block_id: int) -> None:
        has_begun.set()
        assert go_on.wait(30)

    rig.pages.before_gather = hold
    rig.compute((1,))
    rig.step(Step(stores=(store_order((1,)),), num_tokens=1))
    assert has_begun.wait(30)

    def overwrite() -> None:
        rig.worker.clear(Step(written=(1,)))
        rig.pages.blocks[1][:] = b"z" * len(rig.pages.blocks[1])

    thread = threading.Thread(target=overwrite)
    thread.start()
    rig.worker.clear(Step(written=(7,)))
    go_on.set()
    thread.join(30)
    rig.until(lambda _: rig.news.settled.get("r") == 1)
    assert rig.daemon.slots[KEYS[0]][: len(kv_of(HASHES[0]))] == kv_of(HASHES[0])


def test_where_there_is_no_room_it_is_tried_again(rig: Rig) -> None:
    rig.daemon.busy_times = 3
    rig.store()
    assert len(rig.daemon.slots) == 8


def test_where_room_stays_lacking_blocks_are_left_out_and_said_to_be(rig: Rig) -> None:
    rig.daemon.busy_times = 1000
    rig.store()
    assert rig.daemon.slots == {}
    assert rig.news.unstored == {"r": 0}
    assert rig.counted()["unstored_blocks|busy"] == 8


def test_stores_beyond_the_bound_are_left_out_and_hold_nothing_up() -> None:
    pages = MemoryPages(1)
    rig = Rig(replace(SETTINGS, max_store_bytes=3 * pages.payload_bytes))
    go_on = threading.Event()
    rig.pages.before_gather = lambda block_id: hold_until(go_on)
    try:
        rig.compute(tuple(range(1, 9)))
        first, second = store_order((1, 2, 3)), store_order((4, 5), first=3)
        rig.step(Step(stores=(first, second), num_tokens=1))
        assert rig.news.settled == {"r": 2}
        assert rig.news.unstored == {"r": 3}
        go_on.set()
        rig.until(lambda _: rig.news.settled == {"r": 5})
        assert set(rig.daemon.slots) == set(KEYS[:3])
    finally:
        go_on.set()
        rig.worker.close()


def test_a_finished_request_is_held_until_it_is_stored_and_no_longer_than_agreed() -> None:
    rig = Rig()
    go_on = threading.Event()
    rig.pages.before_gather = lambda block_id: hold_until(go_on)
    try:
        rig.compute((1,))
        rig.step(Step(stores=(store_order((1,)),), num_tokens=1))
        assert rig.step(Step(held=("r", "other"))).stored == {"other"}
        assert rig.take().stored == set()
        rig.clock.now += SETTINGS.hold_s
        assert rig.take().stored == {"r"}
        go_on.set()
    finally:
        go_on.set()
        rig.worker.close()
    assert len(rig.daemon.slots) == 1


def test_a_finished_request_is_not_held_for_a_daemon_that_says_nothing(rig: Rig) -> None:
    """Each kept its blocks for two seconds, and vLLM preempted others for want of room."""
    go_on = threading.Event()
    rig.pages.before_gather = lambda block_id: hold_until(go_on)
    rig.compute((1,))
    rig.step(Step(stores=(store_order((1,)),), num_tokens=1))
    assert rig.step(Step(held=("r",))).stored == set()
    rig.worker._gate.failed(TierUnavailable("the daemon did not answer within 1 s"))
    assert rig.take().stored == {"r"}
    go_on.set()


def test_a_rank_that_need_not_store_settles_its_orders_all_the_same() -> None:
    rig = Rig(may_store=False)
    rig.step(Step(stores=(store_order((1, 2)),), num_tokens=1))
    assert rig.news.settled == {"r": 2}
    assert rig.news.unstored == {}
    assert rig.daemon.slots == {}
    rig.worker.close()


def test_a_load_that_cannot_even_begin_ends(rig: Rig) -> None:
    wrong = replace(load_order((31,)), hashes=(b"short",))
    rig.step(Step(loads=(wrong,)))
    assert rig.until(lambda each: "r" in each.loaded).failed_blocks == {31}
    assert rig.counted()["faults|load"] == 1


def test_closing_stores_what_is_queued(rig: Rig) -> None:
    rig.compute(tuple(range(1, 9)))
    rig.step(Step(stores=(store_order(tuple(range(1, 9))),), num_tokens=1))
    rig.worker.close()
    assert len(rig.daemon.slots) == 8


def test_while_the_kv_cache_is_away_nothing_reads_it(rig: Rig) -> None:
    """Sleep mode takes its memory away; a store that went on would read what is not there."""
    go_on, has_begun = threading.Event(), threading.Event()

    def hold(block_id: int) -> None:
        has_begun.set()
        assert go_on.wait(30)

    rig.pages.before_gather = hold
    ids = tuple(range(1, 13))
    rig.compute(ids)
    rig.step(Step(stores=(store_order(ids),), num_tokens=1))
    assert has_begun.wait(30)
    thread = threading.Thread(target=rig.worker.pause)
    thread.start()
    # Until what has not begun was withdrawn; what has begun is waited for.
    while len(rig.worker._fence) > 8:
        threading.Event().wait(0.001)
    assert thread.is_alive()
    go_on.set()
    thread.join(30)
    rig.pages.before_gather = lambda block_id: pytest.fail("the KV cache was read")
    rig.step(Step(stores=(store_order(ids),), num_tokens=1))
    rig.until(lambda _: rig.news.settled.get("r") == 24)
    assert set(rig.daemon.slots) == set(KEYS[:8])
    rig.pages.before_gather = lambda block_id: None
    rig.worker.resume()
    rig.step(Step(stores=(store_order(ids),), num_tokens=1))
    rig.until(lambda _: rig.news.settled.get("r") == 36)
    assert set(rig.daemon.slots) == set(KEYS)


def test_once_storing_was_stopped_nothing_is_stored(rig: Rig) -> None:
    rig.worker.stop_storing()
    rig.step(Step(stores=(store_order((1, 2)),), num_tokens=1))
    assert rig.daemon.slots == {}
    assert rig.news.settled == {"r": 2}


def test_a_store_for_which_no_thread_can_start_leaves_nothing_queued(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes counted as queued for ever, and in the end nothing was stored any more."""

    def fail() -> None:
        raise RuntimeError("no thread can be started")

    rig.compute((1, 2))
    with monkeypatch.context() as faulty:
        faulty.setattr(rig.worker, "_start_threads", fail)
        with pytest.raises(RuntimeError):
            rig.worker.store(Step(stores=(store_order((1, 2)),), num_tokens=1))
    assert rig.worker._queued_bytes == 0
    assert not rig.worker._storing
    assert len(rig.worker._fence) == 0


def test_a_step_whose_end_vllm_does_not_say_is_stored_and_held_all_the_same(rig: Rig) -> None:
    """With speculative decoding on all pipeline ranks but the last: their requests were never released."""
    rig.compute((1, 2))
    step = Step(stores=(store_order((1, 2)),), held=("r",), num_tokens=1, number=7)
    rig.worker.clear(step)
    assert rig.worker.take(step).stored == set(), "it waits to be stored"
    rig.worker.clear(Step())
    rig.until(lambda each: "r" in each.stored)
    assert rig.news.steps == [7]
    assert set(rig.daemon.slots) == set(KEYS[:2])


def test_a_job_that_fails_altogether_does_not_end_its_thread(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.compute((1, 2, 3, 4))
    with monkeypatch.context() as faulty:
        faulty.setattr(rig.worker._storer, "run", lambda *_: 1 / 0)
        rig.step(Step(stores=(store_order((1, 2)),), num_tokens=1))
        rig.until(lambda _: rig.news.settled.get("r") == 2)
    rig.step(Step(stores=(store_order((3, 4), first=2),), num_tokens=1))
    rig.until(lambda _: rig.news.settled.get("r") == 4)
    assert KEYS[2] in rig.daemon.slots
