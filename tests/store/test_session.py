"""The session table and its records: revisions, forks, limits, and what is believed of a stored record."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvstore import session_record as records
from kvstore import wire
from kvstore.config import SessionsConfig
from kvstore.core.errors import ProtocolError
from kvstore.core.key import join_keys
from kvstore.core.outcome import TierKind
from kvstore.store.engines import Engine
from tests.support.chats import Prefix
from tests.support.rig import Rig, memory
from tests.support.sessions import NAMESPACE, get, ids, put, view

MakeRig = Callable[..., Rig]


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig(sessions=SessionsConfig(ttl_s=100.0, max_sessions=3))


@pytest.fixture
def engine(rig: Rig) -> Engine:
    return rig.attach(NAMESPACE)


def test_a_turn_goes_on_from_the_revision_it_began_from(rig: Rig, engine: Engine) -> None:
    assert rig.store.session_put(engine, put(2)) == wire.SessionSaved("chat", 1, False)
    assert rig.store.session_put(engine, put(3, 1)) == wire.SessionSaved("chat", 2, False)
    found = view(rig)
    assert found.revision == 2 and found.num_blocks == 3 and found.num_tokens == 12 and found.durable == "none"
    assert found.messages == put(3).messages
    rig.check()


def test_the_later_of_two_turns_from_one_revision_becomes_a_fork(rig: Rig, engine: Engine) -> None:
    rig.store.session_put(engine, put(2))
    rig.store.session_put(engine, put(3, 1))
    saved = rig.store.session_put(engine, put(3, 1, seed=9))
    assert saved.forked and saved.revision == 1 and saved.id.startswith("chat~")
    assert view(rig).messages == put(3).messages
    assert view(rig, saved.id).messages == put(3, seed=9).messages
    assert view(rig, saved.id).forked_from == "chat"
    asked_for = rig.store.session_put(engine, put(4, 2, fork=True))
    assert asked_for.forked and asked_for.id != saved.id
    rig.check()


def test_a_turn_sent_again_since_its_answer_was_lost_is_recorded_once(rig: Rig, engine: Engine) -> None:
    """The engine sends a turn again when the daemon did not answer in time; that made a fork of the same chat."""
    rig.store.session_put(engine, put(2))
    assert rig.store.session_put(engine, put(2)) == wire.SessionSaved("chat", 1, False)
    rig.store.session_put(engine, put(3, 1))
    assert rig.store.session_put(engine, put(3, 1)) == wire.SessionSaved("chat", 2, False)
    assert ids(rig) == {"chat"}


def test_sessions_of_other_tenants_and_models_are_not_found(rig: Rig, engine: Engine) -> None:
    rig.store.session_put(engine, put(2, tenant="a"))
    assert isinstance(get(rig), wire.Error)
    assert isinstance(get(rig, tenant="b"), wire.Error)
    assert isinstance(get(rig, tenant="a", digest=b"\0" * 32), wire.Error)
    assert isinstance(get(rig, tenant="a"), wire.SessionFound)


def test_a_console_finds_a_session_by_an_unambiguous_id(rig: Rig, engine: Engine) -> None:
    rig.store.session_put(engine, put(2, tenant="a"))
    assert isinstance(get(rig, digest=b""), wire.SessionFound)
    rig.store.session_put(engine, put(2, tenant="b"))
    with pytest.raises(ProtocolError, match="name the tenant"):
        get(rig, digest=b"")
    with pytest.raises(ProtocolError, match="no session"):
        get(rig, "unknown", digest=b"")


@pytest.mark.parametrize(
    "changes",
    [
        {"id": ""},
        {"id": "x" * 201},
        {"id": "line\nbreak"},
        {"tenant": "x" * 201},
        {"tenant": "nul\0"},
        {"revision": -1},
        {"revision": 1 << 60},
        {"ttl_s": -1.0},
        {"ttl_s": math.nan},
        {"ttl_s": math.inf},
        {"keys": b"x" * 31},
        {"keys": join_keys(Prefix(NAMESPACE, 1, 3).keys)},
        {"namespace": b"\0" * 32},
    ],
)
def test_a_turn_that_makes_no_sense_is_refused(rig: Rig, engine: Engine, changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        rig.store.session_put(engine, put(2, **changes))
    assert not ids(rig)
    rig.check()


def test_a_session_has_so_many_tokens_and_no_more(make_rig: MakeRig) -> None:
    rig = make_rig("small", sessions=SessionsConfig(max_tokens_per_session=8))
    engine = rig.attach(NAMESPACE)
    rig.store.session_put(engine, put(2))
    with pytest.raises(ProtocolError, match="at most 8 tokens"):
        rig.store.session_put(engine, put(3, 1))


def test_sessions_end_when_their_time_is_over_unless_they_are_pinned(rig: Rig, engine: Engine) -> None:
    rig.store.session_put(engine, put(2, session_id="short", ttl_s=10.0))
    rig.store.session_put(engine, put(2, session_id="pinned", pin=True))
    rig.store.session_put(engine, put(2, session_id="default", seed=3))
    rig.settle(seconds=20)
    assert ids(rig) == {"pinned", "default"}
    rig.store.session_put(engine, put(2, 1, session_id="default", seed=3))
    rig.settle(seconds=95)
    assert ids(rig) == {"pinned", "default"}
    rig.settle(seconds=100)
    assert ids(rig) == {"pinned"}
    rig.check()


def test_the_longest_unused_go_where_there_are_too_many(rig: Rig, engine: Engine) -> None:
    for number in range(6):
        rig.store.session_put(engine, put(1, session_id=f"chat-{number}", seed=number, pin=number == 0 or None))
        rig.clock.now += 1.0
    rig.settle(seconds=6)
    assert ids(rig) == {"chat-0", "chat-4", "chat-5"}
    rig.check()


def test_a_session_that_goes_on_just_before_it_would_have_been_dropped_stays(rig: Rig, engine: Engine) -> None:
    """It was marked by a time to live of 0, which its next turn inherited."""
    rig.settle(seconds=5.0)
    for number in range(4):
        rig.store.session_put(engine, put(1, session_id=f"chat-{number}", seed=number))
        rig.clock.now += 0.01
    rig.store.session_put(engine, put(2, 1, session_id="chat-0", seed=0))
    rig.settle(seconds=20)
    assert ids(rig) == {"chat-0", "chat-2", "chat-3"}


def test_no_session_is_taken_where_all_that_may_be_kept_are_pinned(rig: Rig, engine: Engine) -> None:
    """Only half of them can be, but the limit may have been lowered since."""
    rig.store._session_table._max_sessions = 6
    for number in range(3):
        rig.store.session_put(engine, put(1, session_id=f"chat-{number}", pin=True))
    rig.store._session_table._max_sessions = 3
    with pytest.raises(ProtocolError, match="pinned already"):
        rig.store.session_put(engine, put(1, session_id="one more"))
    rig.store.session_put(engine, put(2, 1, session_id="chat-1"))


def test_turns_are_refused_before_text_that_no_tier_takes_fills_the_memory(rig: Rig, engine: Engine) -> None:
    rig.store._session_table._max_unsaved_bytes = 1000
    rig.store.session_put(engine, put(1, messages=[wire.ChatMessage("user", "x" * 2000, [1, 2, 3, 4])]))
    with pytest.raises(ProtocolError, match="no tier takes"):
        rig.store.session_put(engine, put(1, session_id="another"))


def test_a_list_is_no_longer_than_a_message_may_be(make_rig: MakeRig) -> None:
    rig = make_rig("many")
    engine = rig.attach(NAMESPACE)
    rig.store._catalog.namespaces[engine.namespace].label = "\U0001f642" * 200
    for number in range(1100):
        name = f"{number:04}" + "\U0001f642" * 196
        rig.store.session_put(engine, put(1, session_id=name, tenant="\U0001f642" * 200, seed=number % 5))
    listed = rig.store.sessions.list(wire.SessionList(limit=1 << 40))
    assert listed.total == 1100 and len(listed.sessions) == 1000
    wire.encode(listed)
    assert rig.store.sessions.list(wire.SessionList(limit=-5)).sessions == []
    assert len(rig.store.sessions.list(wire.SessionList(tenant="nobody")).sessions) == 0


def record() -> records.SessionRecord:
    return records.SessionRecord(
        id="chat",
        tenant="",
        namespace=NAMESPACE.digest(),
        root=NAMESPACE.root(),
        model="model",
        payload_bytes=8192,
        revision=3,
        messages=put(2).messages,
        keys=put(2).keys,
        created_s=1.0,
        last_turn_s=2.0,
        ttl_s=100.0,
    )


def test_a_record_is_read_as_it_was_written() -> None:
    assert records.decode(records.encode(record())) == record()


def test_a_record_with_any_bit_flipped_or_cut_short_counts_as_missing() -> None:
    """A flipped bit in a token id went unnoticed, and the chat went on with another prompt."""
    data = records.encode(record())
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        assert records.decode(bytes(flipped)) is None, position
    for length in range(len(data)):
        assert records.decode(data[:length]) is None
    assert records.decode(data + b"\0") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"id": ""},
        {"namespace": b"short"},
        {"root": b""},
        {"keys": b"x"},
        {"payload_bytes": 0},
        {"payload_bytes": -8192},
        {"revision": -1},
        {"s3_blocks": -1},
        {"ttl_s": math.nan},
        {"last_turn_s": math.inf},
    ],
)
def test_a_record_that_makes_no_sense_counts_as_missing(changes: dict[str, Any]) -> None:
    assert records.decode(records.encode(msgspec.structs.replace(record(), **changes))) is None


def test_records_of_different_sessions_have_different_names() -> None:
    keys = [("", b"a", "b"), ("a", b"", "b"), ("ab", b"", ""), ("", b"ab", ""), ("", b"", "ab")]
    assert len({records.record_name(key) for key in keys}) == len(keys)


def test_an_order_to_evict_may_name_a_session_and_leaves_the_others_alone(make_rig: MakeRig) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD))
    engine = rig.attach(NAMESPACE)
    for session_id, seed in (("a", 1), ("b", 2)):
        rig.put(engine, NAMESPACE, Prefix(NAMESPACE, seed, 2).keys)
        rig.store.session_put(engine, put(2, session_id=session_id, seed=seed))
    rig.settle()
    replies: list[wire.Message] = []
    rig.store.evict(wire.Evict(["ram"], session_id="a"), replies.append)
    assert replies == [wire.Evicted({"ram": 2}, {"ram": 0})]
    assert rig.lookup(engine, Prefix(NAMESPACE, 1, 2).keys) == [TierKind.SSD] * 2
    assert rig.lookup(engine, Prefix(NAMESPACE, 2, 2).keys) == [TierKind.RAM] * 2
    with pytest.raises(ProtocolError, match="no session"):
        rig.store.evict(wire.Evict(["ram"], session_id="nobody"), replies.append)
    rig.check()
