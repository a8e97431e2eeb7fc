"""Sessions are brought into RAM before they return, within a budget; what was useful and what was not is counted."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvstore import wire
from kvstore.config import PrefetchConfig, RamConfig
from kvstore.core.errors import ProtocolError
from kvstore.core.key import join_keys
from kvstore.core.outcome import Outcome, TierKind
from kvstore.store.engines import Engine
from tests.support.chats import Prefix
from tests.support.rig import Rig, memory
from tests.support.sessions import NAMESPACE, Bucket, get, put

MakeRig = Callable[..., Rig]
GAP_S = 60.0


class Chat:
    """A session whose user answers after GAP_S, for three turns so far; now all of it is in the bucket alone."""

    def __init__(self, rig: Rig, engine: Engine, session_id: str = "chat", seed: int = 1, turns: int = 3) -> None:
        self.rig, self.engine, self.id, self.seed = rig, engine, session_id, seed
        self.revision = 0
        for _ in range(turns):
            self.turn()
            rig.settle(seconds=GAP_S)

    @property
    def prefix(self) -> Prefix:
        return Prefix(NAMESPACE, self.seed, 2 + 2 * self.revision)

    def turn(self, **said: Any) -> None:
        """The engine asks for the session, takes what is there, stores what is new, and records the turn."""
        get(self.rig, self.id)
        keys = self.prefix.keys
        found = len(self.rig.lookup(self.engine, keys))
        if found:
            self.rig.fetch(self.engine, keys[:found])
        if found < len(keys):
            assert set(self.rig.put(self.engine, NAMESPACE, keys, found)) <= {Outcome.OK, Outcome.EXISTS}
        turn = put(len(keys), self.revision, session_id=self.id, seed=self.seed, **said)
        self.rig.store.session_put(self.engine, msgspec.structs.replace(turn, keys=join_keys(keys)))
        self.revision += 1
        self.rig.turn()

    def leave(self) -> None:
        """Its blocks go to the bucket, and from everywhere else."""
        self.rig.settle(seconds=1.0)
        evict(self.rig)

    @property
    def stored(self) -> Prefix:
        return Prefix(NAMESPACE, self.seed, 2 * self.revision)

    def where(self) -> set[TierKind]:
        return set(self.rig.lookup(self.engine, self.stored.keys))


def evict(rig: Rig) -> None:
    rig.store.evict(wire.Evict(["ram"]), lambda _: None)
    rig.settle()


def counts(rig: Rig) -> dict[str, int]:
    found: dict[str, int] = rig.stats()["prefetch"]
    return found


@pytest.fixture
def rig(make_rig: MakeRig, bucket: Bucket) -> Rig:
    return make_rig(ram_bytes=40 * 8192, **bucket.options())


@pytest.fixture
def engine(rig: Rig) -> Engine:
    return rig.attach(NAMESPACE)


def ask(rig: Rig, session_id: str = "chat", namespace: bytes = b"") -> wire.Message:
    replies: list[wire.Message] = []
    rig.store.sessions.prefetch(wire.SessionPrefetch(session_id, "", namespace), replies.append)
    rig.settle()
    return replies[0]


def test_a_session_whose_user_answers_regularly_is_in_ram_before_the_turn(rig: Rig, engine: Engine) -> None:
    chat = Chat(rig, engine)
    chat.turn()
    chat.leave()
    assert chat.where() == {TierKind.S3}
    rig.settle(seconds=GAP_S - 10.0)
    assert chat.where() == {TierKind.RAM}
    assert counts(rig)["ready_sessions"] == 1
    chat.turn()
    assert counts(rig)["useful_blocks"] == 8 and counts(rig)["wasted_blocks"] == 0
    assert counts(rig)["held_bytes"] == 0
    rig.check()


def test_it_is_not_brought_long_before(rig: Rig, engine: Engine) -> None:
    chat = Chat(rig, engine)
    chat.turn()
    chat.leave()
    rig.settle(seconds=10.0)
    assert chat.where() == {TierKind.S3}


def test_whoever_does_not_come_leaves_ram_first_and_counts_as_wasted(rig: Rig, engine: Engine) -> None:
    chat = Chat(rig, engine)
    chat.turn()
    chat.leave()
    rig.settle(seconds=5 * GAP_S)
    assert counts(rig)["wasted_blocks"] == 8 and counts(rig)["useful_blocks"] == 0
    rig.put(engine, NAMESPACE, Prefix(NAMESPACE, 50, 36).keys)
    rig.settle()
    assert TierKind.S3 in chat.where()
    rig.check()


def test_a_user_who_begins_to_type_is_waited_for(rig: Rig, engine: Engine) -> None:
    chat = Chat(rig, engine, turns=1)
    chat.turn()
    chat.leave()
    assert ask(rig) == wire.Prefetching(4, 4)
    assert chat.where() == {TierKind.RAM}
    chat.turn()
    assert counts(rig)["useful_blocks"] == 4
    with pytest.raises(ProtocolError, match="no session"):
        ask(rig, "nobody")
    rig.check()


def test_asking_again_while_the_user_types_on_keeps_what_was_brought(rig: Rig, engine: Engine) -> None:
    """It used to count all of it as wasted, and to begin anew with what was on its way."""
    chat = Chat(rig, engine, turns=1)
    chat.leave()
    replies: list[wire.Message] = []
    for _ in range(2):
        rig.store.sessions.prefetch(wire.SessionPrefetch("chat", "", b""), replies.append)
        rig.turn()
    rig.settle()
    assert replies == [wire.Prefetching(2, 2)] * 2
    assert ask(rig) == wire.Prefetching(0, 2)
    assert chat.where() == {TierKind.RAM}
    chat.turn()
    assert {name: count for name, count in counts(rig).items() if count} == {
        "asked": 3,
        "begun_blocks": 2,
        "ready_sessions": 1,
        "useful_blocks": 2,
    }


def test_pinning_a_session_keeps_what_was_brought_for_it(rig: Rig, engine: Engine) -> None:
    chat = Chat(rig, engine, turns=1)
    chat.leave()
    ask(rig)
    rig.store.sessions.pin(wire.SessionPin("chat", True), lambda _: None)
    rig.settle()
    assert counts(rig)["wasted_blocks"] == 0 and counts(rig)["held_bytes"] > 0
    chat.turn()
    assert counts(rig)["useful_blocks"] == 2


def test_asking_again_holds_what_was_brought_for_longer(rig: Rig, engine: Engine) -> None:
    chat = Chat(rig, engine, turns=1)
    chat.leave()
    ask(rig)
    rig.settle(seconds=100.0)
    ask(rig)
    rig.settle(seconds=100.0)
    assert counts(rig)["wasted_blocks"] == 0 and counts(rig)["held_bytes"] > 0


def test_a_session_that_only_the_bucket_knows_is_brought_by_name(
    make_rig: MakeRig, rig: Rig, engine: Engine, bucket: Bucket
) -> None:
    chat = Chat(rig, engine, turns=1)
    chat.turn()
    chat.leave()
    other = make_rig("other", ram_bytes=40 * 8192, **bucket.options())
    assert ask(other, namespace=NAMESPACE.digest()) == wire.Prefetching(4, 4)
    assert set(other.lookup(other.attach(NAMESPACE), chat.stored.keys)) == {TierKind.RAM}
    gone = ask(other, "nobody", NAMESPACE.digest())
    assert isinstance(gone, wire.Error) and gone.code == wire.ErrorCode.NOT_FOUND
    other.check()


def test_no_more_of_ram_than_its_share_waits_for_sessions(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(ram_bytes=40 * 8192, prefetch=PrefetchConfig(ram_share=0.1), **bucket.options())
    engine = rig.attach(NAMESPACE)
    chat = Chat(rig, engine)
    chat.turn()
    chat.leave()
    rig.settle(seconds=GAP_S)
    assert counts(rig)["held_bytes"] == 4 * 8192
    assert rig.lookup(engine, chat.stored.keys) == [TierKind.RAM] * 4 + [TierKind.S3] * 4
    rig.check()


def test_no_more_is_loaded_at_a_time_than_may_be_in_flight(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(ram_bytes=40 * 8192, prefetch=PrefetchConfig(in_flight_bytes=2 * 8192), **bucket.options())
    engine = rig.attach(NAMESPACE)
    chat = Chat(rig, engine, turns=2)
    chat.turn()
    chat.leave()
    rig.store.sessions.prefetch(wire.SessionPrefetch("chat"), lambda _: None)
    for _ in range(200):
        rig.turn()
        assert counts(rig)["loading_bytes"] <= 2 * 8192
        rig.work()
        rig.clock.now += 0.02
    assert chat.where() == {TierKind.RAM}
    rig.check()


def test_where_everything_in_ram_is_in_use_what_was_begun_is_taken_back(rig: Rig, engine: Engine) -> None:
    chat = Chat(rig, engine, turns=1)
    chat.turn()
    chat.leave()
    full = Prefix(NAMESPACE, 60, 40).keys
    assert set(rig.put(engine, NAMESPACE, full)) == {Outcome.OK}
    reading = rig.begin_fetch(engine, full)
    for _ in range(5):
        rig.turn()
    reading.copy(release=False)
    rig.store.sessions.prefetch(wire.SessionPrefetch("chat"), lambda _: None)
    rig.settle(seconds=0.5)
    assert counts(rig)["cancelled_blocks"] > 0 and counts(rig)["loading_bytes"] == 0
    reading.release()
    rig.settle(seconds=3.0)
    assert chat.where() == {TierKind.RAM}, "it is tried again when there is room"
    rig.check()


def test_an_engine_that_comes_too_early_shares_the_load_and_waits_no_longer_for_it(rig: Rig, engine: Engine) -> None:
    chat = Chat(rig, engine, turns=1)
    chat.turn()
    chat.leave()
    rig.store.sessions.prefetch(wire.SessionPrefetch("chat"), lambda _: None)
    rig.turn()
    assert set(rig.fetch(engine, chat.stored.keys).outcomes) == {Outcome.OK}
    rig.settle()
    assert counts(rig)["late_blocks"] == 4
    assert counts(rig)["held_bytes"] == counts(rig)["loading_bytes"] == 0
    rig.check()


def test_where_ram_is_short_a_session_that_will_pause_goes_first(make_rig: MakeRig, bucket: Bucket) -> None:
    """Its turn was the newest; that of the other one, which is not predicted, was before it."""
    stays = {}
    for short_above in (0.2, 1.0):
        rig = make_rig(
            f"daemon-{short_above}",
            ram_bytes=20 * 8192,
            ram_config=RamConfig(high_watermark=1.0),
            prefetch=PrefetchConfig(short_above=short_above),
            ssd=memory(TierKind.SSD),
        )
        engine = rig.attach(NAMESPACE)
        chat = Chat(rig, engine)
        other = Prefix(NAMESPACE, 9, 8)
        rig.put(engine, NAMESPACE, other.keys)
        chat.turn()
        rig.settle(seconds=1.0)
        rig.put(engine, NAMESPACE, Prefix(NAMESPACE, 10, 6).keys)
        stays[short_above] = rig.lookup(engine, other.keys) == [TierKind.RAM] * 8
        rig.check()
    assert stays == {0.2: True, 1.0: False}


def test_a_session_that_ends_or_is_deleted_is_not_waited_for(rig: Rig, engine: Engine) -> None:
    chat = Chat(rig, engine)
    chat.turn(end=True)
    chat.leave()
    rig.settle(seconds=GAP_S)
    assert chat.where() == {TierKind.S3}
    ask(rig)
    rig.store.sessions.delete(wire.SessionDelete("chat"), lambda _: None)
    rig.settle(seconds=1.0)
    assert counts(rig)["held_bytes"] == 0
    rig.check()


def test_predictions_can_be_switched_off_and_what_is_asked_for_still_comes(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(ram_bytes=40 * 8192, prefetch=PrefetchConfig(enabled=False), **bucket.options())
    engine = rig.attach(NAMESPACE)
    chat = Chat(rig, engine)
    chat.turn()
    chat.leave()
    rig.settle(seconds=GAP_S)
    assert chat.where() == {TierKind.S3}
    ask(rig)
    assert chat.where() == {TierKind.RAM}
    rig.check()
