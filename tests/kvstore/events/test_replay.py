"""The last batches, sent again to readers of any speed."""

from collections import defaultdict

from kvstore.events.replay import END, MAX_READERS, Replay
from tests.support.clock import Clock


class Readers:
    """Takes from each reader so many messages and then no more, until `room` is raised."""

    def __init__(self) -> None:
        self.room: dict[bytes, int] = defaultdict(lambda: 1 << 30)
        self.got: dict[bytes, list[bytes]] = defaultdict(list)
        self.is_gone = False

    def send(self, reader: bytes, frames: list[bytes]) -> bool:
        if self.is_gone:
            raise ConnectionError
        if self.room[reader] <= len(self.got[reader]):
            return False
        assert frames[0] == b""
        self.got[reader].append(frames[2])
        return True

    def sequences(self, reader: bytes) -> list[int]:
        return [int.from_bytes(value, "big", signed=True) for value in self.got[reader]]


def question(reader: bytes, begin: int) -> list[bytes]:
    return [reader, b"", begin.to_bytes(8, "big")]


def make(readers: Readers, max_bytes: int = 1 << 20, clock: Clock | None = None) -> Replay:
    return Replay(max_bytes, b"topic", readers.send, clock or Clock())


def test_a_reader_gets_all_from_the_sequence_it_asked_for_and_then_the_end() -> None:
    readers = Readers()
    replay = make(readers)
    for sequence in (0, 1, 2, 5, 6):  # 3 and 4 were dropped before they came here
        replay.keep(sequence, b"payload")
    replay.ask(question(b"a", 2))
    replay.ask(question(b"b", 3))
    while replay.is_busy:
        replay.step(2)
    assert readers.sequences(b"a") == [2, 5, 6, -1]
    assert readers.sequences(b"b") == [5, 6, -1]
    assert readers.got[b"a"][-1] == END


def test_a_reader_that_has_everything_gets_the_end() -> None:
    readers = Readers()
    replay = make(readers)
    replay.ask(question(b"empty", 0))
    replay.step(8)
    replay.keep(0, b"payload")
    replay.ask(question(b"a", 1))
    replay.step(8)
    assert readers.sequences(b"empty") == readers.sequences(b"a") == [-1]
    assert not replay.is_busy


def test_a_slow_reader_loses_nothing_and_holds_up_nobody() -> None:
    readers = Readers()
    replay = make(readers)
    for sequence in range(100):
        replay.keep(sequence, b"payload")
    readers.room[b"slow"] = 3
    replay.ask(question(b"slow", 0))
    replay.ask(question(b"fast", 0))
    for _ in range(20):
        replay.step(8)
    assert readers.sequences(b"fast") == [*range(100), -1]
    assert readers.sequences(b"slow") == [0, 1, 2]
    assert not replay.step(8)
    readers.room[b"slow"] = 1 << 30
    while replay.is_busy:
        replay.step(8)
    assert readers.sequences(b"slow") == [*range(100), -1]


def test_what_is_kept_is_bounded_in_bytes() -> None:
    readers = Readers()
    replay = make(readers, max_bytes=1000)
    for sequence in range(50):
        replay.keep(sequence, b"x" * 100)
    replay.ask(question(b"a", 0))
    replay.step(100)
    assert readers.sequences(b"a") == [*range(40, 50), -1]


def test_readers_that_are_gone_or_take_nothing_for_long_are_forgotten() -> None:
    readers, clock = Readers(), Clock()
    replay = make(readers, clock=clock)
    replay.keep(0, b"payload")
    readers.room[b"stuck"] = 0
    replay.ask(question(b"stuck", 0))
    replay.step(8)
    assert replay.is_busy
    clock.now += 31.0
    replay.step(8)
    assert not replay.is_busy
    readers.is_gone = True
    replay.ask(question(b"a", 0))
    replay.step(8)
    assert not replay.is_busy


def test_questions_that_are_none_and_readers_beyond_the_limit_get_no_answer() -> None:
    readers = Readers()
    replay = make(readers)
    replay.ask([b"a", b"1"])
    replay.ask([b"a", b"", b"no sequence"])
    assert not replay.is_busy
    readers.room.default_factory = lambda: 0
    for number in range(MAX_READERS + 1):
        replay.ask(question(str(number).encode(), 0))
    readers.room = defaultdict(lambda: 1 << 30)
    replay.step(8)
    assert len(readers.got) == MAX_READERS
