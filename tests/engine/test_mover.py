"""What the movers make of whatever kvstore answers, one job at a time and without threads."""

from collections import deque
from collections.abc import Callable, Sequence

import pytest

from engine.counters import Counters
from engine.fetcher import Fetcher
from engine.jobs import FetchJob, StoreJob
from engine.link import Links, Roots
from engine.pins import RegionPin
from engine.storer import Storer
from kvstore.client import GrantedBlock, LandedBlock, StoreGrant
from kvstore.core.errors import TierUnavailable
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome, TierKind
from tests.engine.fakes import FakeClient, FakeStore, FakeStream

KEYS = [BlockKey(bytes([i]) * 32) for i in range(5)]
OK, MISS, STALE, BUSY = Outcome.OK, Outcome.MISS, Outcome.STALE, Outcome.BUSY


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


class Bytes:
    """An HBM whose blocks are named by their first pool block; remembers what was copied."""

    def __init__(self) -> None:
        self.filled: dict[int, bytes] = {}
        self.broken: set[int] = set()

    def gather(self, pool_blocks: Sequence[int], out: memoryview) -> None:
        if pool_blocks[0] in self.broken:
            raise RuntimeError("the device refuses")
        out[:] = bytes([pool_blocks[0]]) * len(out)

    def scatter(self, payload: memoryview, pool_blocks: Sequence[int]) -> None:
        self.filled[pool_blocks[0]] = bytes(payload)

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
    def __init__(self) -> None:
        self.clock = Clock()
        self.hbm = Bytes()
        self.client = Client()
        self.counters, self.faults = Counters(), Counters()
        self.slept_s: list[float] = []
        self.done: list[object] = []
        self.links = Links(Roots(lambda _: self.client))
        pins = RegionPin(self.hbm)
        self.fetcher = Fetcher(self.hbm, pins, self.done.append, self.counters, self.faults, self.clock)
        self.storer = Storer(self.hbm, pins, self.done.append, self.counters, self.faults, self.slept_s.append)

    def fetch(self, *batches: Sequence[LandedBlock], patience_s: Sequence[float] = (1.0, 1.0, 1.0)) -> FetchJob:
        count = len(patience_s)
        job = FetchJob(
            request_id="r",
            tenant="",
            keys=KEYS[:count],
            pool_blocks=[[100 + i] for i in range(count)],
            give_up_at_s=[self.clock.now + wait_s for wait_s in patience_s],
            expected=[TierKind.SSD] * count,
            block_bytes=4,
        )
        self.client.stream = Script(self.clock, batches)
        self.fetcher.run(job, self.links)
        assert self.done.pop() is job
        return job

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


def test_blocks_may_land_in_any_order_and_count_from_the_front(rig: Rig) -> None:
    job = rig.fetch([landed(2)], [landed(0), landed(1, source=TierKind.RAM)])
    assert (job.landed, job.outcome) == (3, OK)
    assert job.sources == [TierKind.SSD, TierKind.RAM, TierKind.SSD]
    assert rig.hbm.filled == {100: b"\0" * 4, 101: b"\1" * 4, 102: b"\2" * 4}
    assert {(tier, count) for tier, count, _ in job.loads} == {(TierKind.SSD, 8), (TierKind.RAM, 4)}
    assert isinstance(rig.client.stream, FakeStream)
    assert rig.client.stream.num_released == 3


def test_a_block_that_fails_ends_the_prefix_and_those_before_it_are_waited_for(rig: Rig) -> None:
    job = rig.fetch([landed(1, Outcome.CORRUPT)], [], [landed(0), landed(2)])
    assert (job.landed, job.outcome) == (1, Outcome.CORRUPT)
    assert 102 not in rig.hbm.filled, "what hangs on a failed block is not even copied"


def test_a_slot_that_changed_under_the_copy_does_not_count(rig: Rig) -> None:
    job = rig.fetch([landed(0), landed(1, stale=True), landed(2)])
    assert (job.landed, job.outcome) == (1, STALE)
    assert rig.faults.snapshot() == {"stale_slot": 1}


def test_silence_is_given_up_and_counts_as_a_slow_load(rig: Rig) -> None:
    job = rig.fetch(*[[]] * 50, patience_s=(0.25, 0.5, 0.75))
    assert (job.landed, job.outcome) == (0, Outcome.TIMED_OUT)
    ((tier, num_bytes, seconds),) = job.loads
    assert (tier, num_bytes) == (TierKind.SSD, 12)
    assert seconds == pytest.approx(0.25)


def test_what_has_landed_buys_more_time(rig: Rig) -> None:
    job = rig.fetch([], [landed(0)], *[[]] * 3, [landed(1), landed(2)], patience_s=(0.15, 0.6, 0.7))
    assert (job.landed, job.outcome) == (3, OK)


def test_a_stream_that_ends_early_is_a_miss_of_the_rest(rig: Rig) -> None:
    job = rig.fetch([landed(0)])
    assert (job.landed, job.outcome) == (1, MISS)


def test_a_fetch_that_comes_too_late_or_meets_nobody_touches_nothing(rig: Rig) -> None:
    assert rig.fetch([landed(0)], patience_s=(0.0,)).outcome is Outcome.TIMED_OUT
    job = FetchJob("r", "", KEYS[:1], [[100]], [11.0], [TierKind.RAM], 4)
    rig.client.stream = None
    rig.fetcher.run(job, rig.links)
    assert rig.done.pop() is job
    assert job.outcome is Outcome.UNAVAILABLE
    taken_back = FetchJob("r", "", KEYS[:1], [[100]], [11.0], [TierKind.RAM], 4)
    assert taken_back.take_back()
    rig.fetcher.run(taken_back, rig.links)
    assert rig.done == []
    assert rig.hbm.filled == {}


def test_the_request_goes_on_before_the_stream_is_left(rig: Rig) -> None:
    """Leaving the stream of a daemon that has said nothing yet waits 0.2 s for the lease's number. That came before the
    report: a request of half a second that was given up in time began to recompute too late for its promise."""
    order: list[str] = []

    class Slow(Script):
        def __exit__(self, *_: object) -> None:
            order.append("left")

    fetcher = Fetcher(
        rig.hbm, RegionPin(rig.hbm), lambda job: order.append(job.outcome.label), rig.counters, rig.faults, rig.clock
    )
    rig.client.stream = Slow(rig.clock, [[]] * 50)
    fetcher.run(FetchJob("r", "", KEYS[:1], [[100]], [10.2], [TierKind.RAM], 4), rig.links)
    assert order == ["timed_out", "left"]


def test_a_block_that_lands_twice_is_taken_once(rig: Rig) -> None:
    """A second copy over a block that counts already could be stale, and its bytes would have been used."""
    job = rig.fetch([landed(0), landed(1)], [landed(0, stale=True)], [landed(2)])
    assert (job.landed, job.outcome) == (3, OK)


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
