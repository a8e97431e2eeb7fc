import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvstore.connectors.vllm_parts import scout
from kvstore.connectors.vllm_parts.consult import Answer, Consult, Inquiry, Shard
from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.key import BlockKey, engine_keys
from kvstore.core.outcome import TierKind
from kvstore.wire import ErrorCode
from tests.support.vllm import Clock, MemoryDaemon, hashes_of, namespace

HASHES = hashes_of(range(40))


class Rig:
    def __init__(self, ranks: int = 1) -> None:
        self.clock = Clock()
        self.daemons = [MemoryDaemon() for _ in range(ranks)]
        self.spaces = [namespace(rank, ranks) for rank in range(ranks)]
        self.greeted: list[str] = []
        self.counters = Counters()
        # What a greeting comes upon.
        self.on_greet: Callable[[], object] = lambda: None
        self.may_start = threading.Event()
        self.may_start.set()
        self.consult = Consult(self._shards, self, self.counters, self.clock)

    def _shards(self) -> list[Shard]:
        hold_until(self.may_start)
        return [Shard(space, daemon.client()) for space, daemon in zip(self.spaces, self.daemons, strict=True)]

    def knows(self, session_id: str, num_shards: int) -> bool:
        return session_id in self.greeted

    def greet(self, shards: Sequence[Shard], session_id: str, deadline_s: float) -> None:
        self.on_greet()
        self.greeted.append(session_id)

    def have(self, rank: int, count: int, tier: TierKind = TierKind.RAM) -> None:
        keys: list[BlockKey] = engine_keys(self.spaces[rank].root(), HASHES[:count])
        self.daemons[rank].slots.update({key: bytearray() for key in keys})
        self.daemons[rank].tier = tier

    def ask(self, first: int = 0, session_id: str = "") -> Answer:
        inquiry = Inquiry("r", first, HASHES[first:], self.clock.now, self.clock.now + 1.0, 1.0, 1.0, session_id)
        self.consult.ask(inquiry)
        return self.wait(inquiry)

    def wait(self, inquiry: Inquiry) -> Answer:
        for _ in range(30_000):
            if inquiry.answer is not None:
                return inquiry.answer
            self.consult.wait(0.01)
        raise AssertionError("no answer came")


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def start(ranks: int = 1) -> Rig:
        made.append(Rig(ranks))
        return made[-1]

    yield start
    for rig in made:
        rig.consult.close(5.0)
        assert all(daemon.open_clients == 0 for daemon in rig.daemons)


def test_leading_blocks_are_found_with_their_tiers(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.have(0, 4, TierKind.SSD)
    assert rig.ask() == Answer(0, (TierKind.SSD,) * 4, "never_stored", asked=True)
    assert rig.ask(first=3) == Answer(3, (TierKind.SSD,), "never_stored", asked=True)


def test_a_block_counts_where_every_rank_has_it_and_as_far_away_as_the_farthest(make: Callable[..., Rig]) -> None:
    rig = make(3)
    rig.have(0, 6)
    rig.have(1, 4, TierKind.S3)
    rig.have(2, 9)
    assert rig.ask().tiers == (TierKind.S3,) * 4


def test_a_rank_that_has_nothing_makes_a_miss(make: Callable[..., Rig]) -> None:
    rig = make(2)
    rig.have(0, 6)
    assert rig.ask().tiers == ()


def test_a_daemon_that_is_away_is_an_answer_too(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.daemons[0].is_away = True
    assert rig.ask() == Answer(why="unavailable")
    assert not rig.consult.gate.is_attached
    rig.daemons[0].is_away = False
    assert rig.ask().asked
    assert rig.consult.gate.is_attached


def test_a_missing_daemon_is_told_of_before_anybody_asks(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a wrong run folder nothing was said until the first request, and nothing then by vLLM's own log."""
    monkeypatch.setattr(scout, "EVERY_S", 0.001)
    rig = make()
    rig.daemons[0].is_away = True
    with caplog.at_level(logging.INFO, "vllm.kvstore"):
        rig.consult.begin()
        until(lambda: rig.consult.gate.is_silent)
        rig.daemons[0].is_away = False
        until(lambda: rig.consult.gate.is_attached)
    said = [(record.levelname, record.name) for record in caplog.records]
    assert said == [("WARNING", "vllm.kvstore"), ("INFO", "vllm.kvstore")]


def test_a_question_whose_time_is_over_is_not_asked(make: Callable[..., Rig]) -> None:
    rig = make()
    inquiry = Inquiry("r", 0, HASHES, rig.clock.now, rig.clock.now - 1.0)
    rig.consult.ask(inquiry)
    assert rig.wait(inquiry) == Answer(why="timed_out")
    assert rig.daemons[0].lookups == 0


def test_a_session_that_is_new_is_met_once_and_what_its_bucket_has_counts(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.on_greet = lambda: rig.have(0, 6, TierKind.S3)
    assert rig.ask(session_id="chat").tiers == (TierKind.S3,) * 6
    rig.ask(session_id="chat")
    assert rig.greeted == ["chat"]


def test_nobody_is_greeted_where_everything_was_found(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.have(0, len(HASHES))
    assert len(rig.ask(session_id="chat").tiers) == len(HASHES)
    assert not rig.greeted


def test_a_slow_bucket_delays_no_lookup_of_others(make: Callable[..., Rig]) -> None:
    """One thread did both, and a greeting of a second made every question behind it come too late."""
    rig = make()
    rig.have(0, 4)
    go_on = threading.Event()
    rig.on_greet = lambda: hold_until(go_on)
    waiting = Inquiry("r", 0, HASHES, rig.clock.now, rig.clock.now + 1.0, 1.0, 1.0, "chat")
    rig.consult.ask(waiting)
    assert len(rig.ask().tiers) == 4
    assert waiting.answer is None
    assert waiting.early is not None and len(waiting.early.tiers) == 4
    go_on.set()
    assert len(rig.wait(waiting).tiers) == 4


@pytest.mark.parametrize(
    "error", [ProtocolError(ErrorCode.BUSY, "cannot be read now"), TierUnavailable("no answer within 1 s")]
)
def test_what_the_bucket_does_takes_away_no_hit(make: Callable[..., Rig], error: Exception) -> None:
    """With the bucket down the first turn of every session was answered without any lookup."""
    rig = make()
    rig.have(0, 4)

    def fail() -> None:
        raise error

    rig.on_greet = fail
    assert len(rig.ask(session_id="chat").tiers) == 4
    assert rig.consult.gate.is_open and rig.consult.gate.is_attached
    assert rig.consult.awaits("other") is isinstance(error, ProtocolError)


def test_what_one_request_tells_shuts_nobody_out(make: Callable[..., Rig]) -> None:
    rig = make()
    done = threading.Event()

    def refused(shards: Sequence[Shard]) -> None:
        raise ProtocolError(ErrorCode.BAD_REQUEST, "ttl is too long")

    rig.consult.tell(refused)
    rig.consult.tell(lambda shards: done.set())
    hold_until(done)
    assert rig.ask().asked


def test_a_daemon_that_takes_long_over_what_it_is_told_is_not_taken_for_silent(make: Callable[..., Rig]) -> None:
    """Each record of a session that came too late made lookups less patient, and two lines in the log."""
    rig = make()
    assert rig.ask().asked
    done = threading.Event()

    def late(shards: Sequence[Shard]) -> None:
        raise TierUnavailable("the daemon did not answer within 1 s")

    rig.consult.tell(late)
    rig.consult.tell(lambda shards: done.set())
    hold_until(done)
    assert rig.consult.gate.is_attached


def test_everything_that_is_told_at_once_is_done_though_nobody_asks(make: Callable[..., Rig]) -> None:
    """With two things to tell the thread put each behind the other for ever, and took a whole core."""
    rig = make()
    done = threading.Semaphore(0)
    for _ in range(20):
        rig.consult.tell(lambda shards: done.release())
    assert all(done.acquire(timeout=10) for _ in range(20))


def test_what_is_told_before_the_end_is_done_and_a_fault_ends_nothing(make: Callable[..., Rig]) -> None:
    rig = make()
    done: list[int] = []
    rig.consult.tell(lambda shards: done.append(1 // 0))
    rig.consult.tell(lambda shards: done.append(2))
    rig.consult.close(5.0)
    assert done == [2]


def test_where_no_client_can_be_made_every_question_is_answered_at_once() -> None:
    """The thread ended, so each request waited until its time was over."""

    def fails() -> list[Shard]:
        raise ValueError("no client")

    rig = Rig()
    rig.consult = Consult(fails, rig, rig.counters, rig.clock)
    for _ in range(3):
        assert rig.ask() == Answer(why="fault")
    rig.consult.tell(lambda shards: None)
    rig.consult.close(5.0)


def test_more_questions_than_may_wait_are_answered_busy(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.may_start.clear()
    inquiries = [Inquiry("r", 0, (), 0.0, rig.clock.now + 1) for _ in range(1030)]
    for inquiry in inquiries:
        rig.consult.ask(inquiry)
    assert [each.answer for each in inquiries[1024:]] == [Answer(why="busy")] * 6
    rig.may_start.set()


def until(happened: Callable[[], bool]) -> None:
    for _ in range(30_000):
        if happened():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it did not happen")


def hold_until(go_on: threading.Event) -> None:
    assert go_on.wait(30)
