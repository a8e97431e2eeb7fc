"""What the movers make of whatever kvstore answers, one job at a time and without threads."""

from collections import deque
from collections.abc import Callable, Sequence

import pytest

from engine.counters import Counters
from engine.fetcher import Fetcher
from engine.jobs import FetchJob, StoreJob
from engine.link import Links, Roots
from engine.storer import Storer
from kvstore.client import GrantedBlock, LandedBlock, StoreGrant
from kvstore.core.errors import TierUnavailable
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome, TierKind
from kvstore.region_pin import RegionPin
from tests.engine.fakes import FakeClient, FakeStore, FakeStream
from tests.support.clock import Clock

KEYS = [BlockKey(bytes([i]) * 32) for i in range(5)]
OK, MISS, STALE, BUSY = Outcome.OK, Outcome.MISS, Outcome.STALE, Outcome.BUSY


class Bytes:
    """An HBM whose blocks are named by their first pool block; remembers what was copied."""

    def __init__(self) -> None:
        self.filled: dict[int, bytes] = {}
        self.broken: set[int] = set()
        # Per call: which layers, of which blocks.
        self.layers: list[tuple[int, int, list[int]]] = []

    def gather(self, pool_blocks: Sequence[int], out: memoryview) -> None:
        if pool_blocks[0] in self.broken:
            raise RuntimeError("the device refuses")
        out[:] = bytes([pool_blocks[0]]) * len(out)

    def scatter(self, payload: memoryview, pool_blocks: Sequence[int]) -> None:
        self.filled[pool_blocks[0]] = bytes(payload)

    def scatter_layers(
        self, payloads: Sequence[memoryview], groups: Sequence[Sequence[int]], first: int, end: int
    ) -> None:
        self.layers.append((first, end, [pool_blocks[0] for pool_blocks in groups]))
        for payload, pool_blocks in zip(payloads, groups, strict=True):
            if pool_blocks[0] in self.broken and first:
                raise RuntimeError("the device refuses")
            self.scatter(payload, pool_blocks)

    def pin(self, address: int, num_bytes: int, goes_on: Callable[[], bool]) -> None:
        return None

    def unpin(self, address: int) -> None:
        return None


class Script(FakeStream):
    """Lands what it is told to, batch by batch; an empty batch is silence, in which the clock goes on."""

    def __init__(self, clock: Clock, batches: Sequence[Sequence[LandedBlock]]) -> None:
        super().__init__(FakeStore(), [])
        self._clock = clock
        self._batches = deque(batches)

    def landed(self, timeout_s: float) -> list[LandedBlock]:
        if self._batches:
            batch = list(self._batches.popleft())
        else:
            batch, self.done = [], True
        if not batch and not self.done:
            self._clock.now += timeout_s
        return batch


class Client(FakeClient):
    """Answers fetches and stores from lists."""

    def __init__(self) -> None:
        super().__init__(FakeStore())
        self.stream: FakeStream | None = None
        self.answers: deque[list[Outcome]] = deque()
        self.asked: list[tuple[int, BlockKey, int]] = []
        self.commits: list[tuple[list[BlockKey], list[bool]]] = []
        self.commit_outcome = OK

    def clone(self) -> "Client":
        return self

    def close(self) -> None:
        return None

    def fetch(self, keys: Sequence[BlockKey], deadline_s: float) -> FakeStream:
        if self.stream is None:
            raise TierUnavailable("nobody is there")
        return self.stream

    def store(
        self, keys: Sequence[BlockKey], parent: BlockKey, depth: int, deadline_s: float | None = None
    ) -> StoreGrant:
        self.asked.append((len(keys), parent, depth))
        outcomes = self.answers.popleft()
        assert len(outcomes) == len(keys)
        blocks = [
            GrantedBlock(outcome, memoryview(bytearray(4)) if outcome is OK else None, 0, 5) for outcome in outcomes
        ]
        return StoreGrant(blocks, 0.05)

    def commit(self, keys: Sequence[BlockKey], generations: list[int], written: list[bool]) -> list[Outcome]:
        self.commits.append((list(keys), written))
        return [self.commit_outcome] * len(keys)


class Rig:
    def __init__(self, layer_ends: Sequence[int] = ()) -> None:
        self.clock = Clock(10.0)
        self.hbm = Bytes()
        self.client = Client()
        self.counters, self.faults = Counters(), Counters()
        self.slept_s: list[float] = []
        self.done: list[object] = []
        self.num_told = 0
        self.links = Links(Roots(lambda _: self.client))
        pins = RegionPin(self.hbm)
        self.fetcher = Fetcher(
            self.hbm, pins, self.tell, self.done.append, self.counters, self.faults, self.clock, layer_ends
        )
        self.storer = Storer(self.hbm, pins, self.done.append, self.counters, self.faults, self.slept_s.append)

    def tell(self) -> None:
        self.num_told += 1

    def job(self, count: int = 3, deadline_s: float = 11.0) -> FetchJob:
        blocks = [[100 + i] for i in range(count)]
        return FetchJob("r", "", KEYS[:count], blocks, [TierKind.SSD] * count, deadline_s)

    def fetch(self, *batches: Sequence[LandedBlock], deadline_s: float = 11.0) -> FetchJob:
        job = self.job(deadline_s=deadline_s)
        self.run(job, *batches)
        return job

    def run(self, job: FetchJob, *batches: Sequence[LandedBlock]) -> None:
        self.client.stream = Script(self.clock, batches)
        self.fetcher.run(job, self.links)
        assert self.done.pop() is job
        assert job.num_open == 0

    def store(self, *answers: list[Outcome], count: int = 3) -> StoreJob:
        job = StoreJob("r", "", KEYS[1 : 1 + count], KEYS[0], 1, [[100 + i] for i in range(count)])
        self.client.answers = deque(answers)
        self.storer.run(job, self.links)
        assert self.done.pop() is job
        return job


def landed(index: int, outcome: Outcome = OK, *, stale: bool = False, source: TierKind = TierKind.SSD) -> LandedBlock:
    view = memoryview(bytes([index]) * 4) if outcome is OK else None
    return LandedBlock(index, outcome, view, 0, int(stale), source)


@pytest.fixture
def rig() -> Rig:
    return Rig()


# ---------------------------------------------------------------- fetches


def outcomes(job: FetchJob) -> dict[int, Outcome]:
    return {landing.index: landing.outcome for landing in job.take_news()}


def test_blocks_land_in_any_order_and_are_told_of_at_once(rig: Rig) -> None:
    job = rig.fetch([landed(2)], [landed(0), landed(1, source=TierKind.RAM)])
    assert [(news.index, news.outcome, news.source) for news in job.take_news()] == [
        (2, OK, TierKind.SSD),
        (0, OK, TierKind.SSD),
        (1, OK, TierKind.RAM),
    ]
    assert job.outcome is OK and rig.num_told == 2
    assert rig.hbm.filled == {100: b"\0" * 4, 101: b"\1" * 4, 102: b"\2" * 4}
    assert isinstance(rig.client.stream, FakeStream)
    assert rig.client.stream.num_released == 3
    assert rig.counters.snapshot()["fetched_blocks"] == 3


def test_a_block_that_fails_fails_alone(rig: Rig) -> None:
    """Those behind it are of use once it was computed."""
    job = rig.fetch([landed(1, Outcome.CORRUPT)], [], [landed(0), landed(2)])
    assert outcomes(job) == {0: OK, 1: Outcome.CORRUPT, 2: OK}
    assert rig.hbm.filled.keys() == {100, 102}


def test_a_slot_that_changed_under_the_copy_does_not_count(rig: Rig) -> None:
    job = rig.fetch([landed(0), landed(1, stale=True), landed(2)])
    assert outcomes(job) == {0: OK, 1: STALE, 2: OK}
    assert rig.faults.snapshot() == {"stale_slot": 1}


def test_silence_ends_at_the_deadline(rig: Rig) -> None:
    job = rig.fetch([landed(1)], *[[]] * 50, deadline_s=10.25)
    assert job.outcome is Outcome.TIMED_OUT
    assert outcomes(job) == {1: OK, 0: Outcome.TIMED_OUT, 2: Outcome.TIMED_OUT}
    assert rig.clock.now == pytest.approx(10.25)


def test_a_stream_that_ends_early_is_a_miss_of_the_rest(rig: Rig) -> None:
    assert outcomes(rig.fetch([landed(0)])) == {0: OK, 1: MISS, 2: MISS}


def test_what_was_taken_back_is_not_touched_any_more(rig: Rig) -> None:
    job = rig.job()
    assert job.withdraw(0)
    rig.run(job, [landed(0), landed(1)], [landed(2)])
    assert outcomes(job) == {1: OK, 2: OK}
    assert rig.hbm.filled.keys() == {101, 102}
    assert not job.withdraw(1), "what has landed is not to be computed"


def test_a_fetch_ends_when_everything_was_taken_back(rig: Rig) -> None:
    job = rig.job()

    class Script2(Script):
        def landed(self, timeout_s: float) -> list[LandedBlock]:
            batch = super().landed(timeout_s)
            assert job.withdraw_all() == []
            return batch

    rig.client.stream = Script2(rig.clock, [[landed(1)], [landed(0)]])
    rig.fetcher.run(job, rig.links)
    assert rig.done.pop() is job
    assert (job.outcome, rig.hbm.filled) == (OK, {})


def test_a_block_that_is_being_filled_cannot_be_taken_back(rig: Rig) -> None:
    job = rig.job()
    asked: list[object] = []

    def scatter(payload: memoryview, pool_blocks: Sequence[int]) -> None:
        asked.append((job.withdraw(1), job.withdraw_all()))

    rig.hbm.scatter = scatter  # type: ignore[method-assign]
    rig.run(job, [landed(1)])
    assert asked == [(False, [1])]
    assert outcomes(job) == {1: OK}


def test_a_copy_that_raises_leaves_no_block_unsettled(rig: Rig) -> None:
    def broken(payload: memoryview, pool_blocks: Sequence[int]) -> None:
        raise RuntimeError("the device refuses")

    rig.hbm.scatter = broken  # type: ignore[method-assign]
    job = rig.fetch([landed(1), landed(0)])
    assert outcomes(job) == dict.fromkeys(range(3), Outcome.UNAVAILABLE)
    assert rig.faults.snapshot() == {"fetch_fault": 1}


def test_a_fetch_that_comes_too_late_or_meets_nobody_touches_nothing(rig: Rig) -> None:
    assert rig.fetch([landed(0)], deadline_s=10.0).outcome is Outcome.TIMED_OUT
    job = rig.job(1)
    rig.client.stream = None
    rig.fetcher.run(job, rig.links)
    assert rig.done.pop() is job
    assert job.outcome is Outcome.UNAVAILABLE
    taken_back = rig.job(1)
    assert taken_back.withdraw_all() == []
    rig.run(taken_back, [landed(0)])
    assert rig.hbm.filled == {}


def test_the_request_goes_on_before_the_stream_is_left(rig: Rig) -> None:
    """Leaving the stream of a daemon that has said nothing yet waits 0.2 s for the lease's number. That came before the
    report: a request of half a second that was given up in time began to recompute too late for its promise."""
    order: list[str] = []

    class Slow(Script):
        def __exit__(self, *_: object) -> None:
            order.append("left")

    fetcher = Fetcher(
        rig.hbm,
        RegionPin(rig.hbm),
        rig.tell,
        lambda job: order.append(job.outcome.label),
        rig.counters,
        rig.faults,
        rig.clock,
    )
    rig.client.stream = Slow(rig.clock, [[]] * 50)
    fetcher.run(rig.job(1, deadline_s=10.2), rig.links)
    assert order == ["timed_out", "left"]


def test_a_block_that_lands_twice_is_taken_once(rig: Rig) -> None:
    """A second copy over a block that counts already could be stale, and its bytes would have been used."""
    job = rig.fetch([landed(0), landed(1)], [landed(0, stale=True)], [landed(7), landed(2)])
    assert outcomes(job) == {0: OK, 1: OK, 2: OK}


# ---------------------------------------------------------------- layer by layer


def test_the_blocks_that_end_a_fetch_are_copied_one_layer_before_the_next() -> None:
    rig = Rig(layer_ends=[2, 3])
    job = rig.fetch([landed(2)], [landed(1), landed(0)])
    assert rig.hbm.layers == [(0, 2, [101, 100]), (2, 3, [101, 100])]
    assert outcomes(job) == {0: OK, 1: OK, 2: OK}
    assert rig.counters.snapshot() == {"fetched_blocks": 3}
    assert job.layers is not None and job.layers.came_whole()
    assert isinstance(rig.client.stream, FakeStream)
    assert rig.client.stream.num_released == 3


def test_the_step_loop_is_told_before_the_copy_and_sees_how_far_it_is() -> None:
    rig = Rig()
    job = rig.job()
    seen: list[tuple[bool, list[int]]] = []

    def tell() -> None:
        gate = job.layers
        assert gate is not None
        seen.append((job.withdraw(0), [end for _, end, _ in rig.hbm.layers]))

    rig.fetcher = Fetcher(
        rig.hbm, RegionPin(rig.hbm), tell, rig.done.append, rig.counters, rig.faults, rig.clock, [1, 2]
    )
    rig.run(job, [landed(0), landed(1), landed(2)])
    # Told once when it begins and once when it is over; neither time may a block be taken back.
    assert seen == [(False, []), (False, [1, 2])]


def test_blocks_that_do_not_end_the_fetch_are_copied_whole() -> None:
    rig = Rig(layer_ends=[2, 3])
    job = rig.fetch([landed(0), landed(1)], [landed(2, Outcome.CORRUPT)])
    assert rig.hbm.layers == [] and job.layers is None
    assert outcomes(job) == {0: OK, 1: OK, 2: Outcome.CORRUPT}


def test_what_was_taken_back_is_not_waited_for_by_the_last_ones() -> None:
    rig = Rig(layer_ends=[2, 3])
    job = rig.job()
    assert job.withdraw(0)
    rig.run(job, [landed(0), landed(1), landed(2)])
    assert rig.hbm.layers == [(0, 2, [101, 102]), (2, 3, [101, 102])]
    assert outcomes(job) == {1: OK, 2: OK}


def test_a_slot_that_changed_under_the_layers_takes_the_pass_with_it() -> None:
    rig = Rig(layer_ends=[2, 3])
    job = rig.fetch([landed(0), landed(1, stale=True), landed(2)])
    assert outcomes(job) == {0: OK, 1: STALE, 2: OK}
    assert job.layers is not None and not job.layers.came_whole()
    assert rig.faults.snapshot() == {"stale_slot": 1}


def test_a_copy_that_breaks_between_two_layers_lets_nobody_wait() -> None:
    rig = Rig(layer_ends=[2, 3])
    rig.hbm.broken = {101}
    job = rig.fetch([landed(0), landed(1), landed(2)])
    assert job.layers is not None
    job.layers.wait_for(2)
    assert not job.layers.came_whole()
    assert outcomes(job) == dict.fromkeys(range(3), Outcome.UNAVAILABLE)
    assert rig.faults.snapshot() == {"fetch_fault": 1}


# ---------------------------------------------------------------- stores


def test_granted_blocks_are_copied_then_committed_and_the_others_left_alone(rig: Rig) -> None:
    job = rig.store([OK, Outcome.EXISTS, Outcome.PENDING])
    assert job.num_stored == 3
    assert rig.client.asked == [(3, KEYS[0], 1)]
    assert rig.client.commits == [([KEYS[1]], [True])]
    assert rig.counters.snapshot() == {"store_ok_blocks": 1, "store_exists_blocks": 1, "store_pending_blocks": 1}


def test_busy_blocks_are_offered_again_from_the_first_busy_one_on(rig: Rig) -> None:
    job = rig.store([OK, BUSY, BUSY], [BUSY, BUSY], [OK, OK])
    assert job.num_stored == 3
    assert rig.client.asked == [(3, KEYS[0], 1), (2, KEYS[1], 2), (2, KEYS[1], 2)]
    assert rig.slept_s == [0.05, 0.05]


def test_a_store_gives_up_after_a_bounded_number_of_tries(rig: Rig) -> None:
    job = rig.store(*[[BUSY]] * 8, count=1)
    assert job.num_stored == 0
    assert rig.counters.snapshot() == {"store_gave_up_blocks": 1}
    rig.storer.hurry = True
    rig.store([BUSY], count=1)
    assert len(rig.slept_s) == 9


def test_a_block_for_which_there_is_no_room_ends_the_store(rig: Rig) -> None:
    job = rig.store([OK, Outcome.FULL, Outcome.REJECTED])
    assert job.num_stored == 1
    assert rig.counters.snapshot()["store_full_blocks"] == 1


def test_a_copy_that_fails_gives_its_grant_back(rig: Rig) -> None:
    rig.hbm.broken = {101}
    job = rig.store([OK, OK, OK])
    assert rig.client.commits == [(KEYS[1:4], [True, False, True])]
    assert job.num_stored == 1
    assert rig.faults.snapshot() == {"store_copy_fault": 1}


def test_grants_of_an_older_epoch_are_asked_for_again(rig: Rig) -> None:
    rig.client.commit_outcome = STALE
    job = rig.store(*[[OK]] * 8, count=1)
    assert job.num_stored == 0
    assert len(rig.client.commits) == 8
