"""A full RAM tier, two sessions, and what a client says decides which of them stays."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvstore import wire
from kvstore.config import RamConfig, SessionsConfig, SsdConfig
from kvstore.core.errors import ProtocolError
from kvstore.core.key import join_keys
from kvstore.core.outcome import Outcome, TierKind
from kvstore.store import keeping, pins
from kvstore.store.engines import Engine
from policies.eviction.choice import NAMES
from tests.support.chats import Prefix, namespace
from tests.support.rig import Rig, memory
from tests.support.sessions import NAMESPACE, put

MakeRig = Callable[..., Rig]
A, B, THIRD = (Prefix(NAMESPACE, seed, 4) for seed in (1, 2, 3))


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig(
        ram_bytes=9 * 8192,
        ram_config=RamConfig(policy="lru", pin_share=0.5, high_watermark=1.0),
        sessions=SessionsConfig(ttl_s=10_000.0, pin_for_s=500.0),
    )


@pytest.fixture
def engine(rig: Rig) -> Engine:
    return rig.attach(NAMESPACE)


def record(rig: Rig, engine: Engine, prefix: Prefix, session_id: str, revision: int = 0, **fields: Any) -> None:
    """Store a session's blocks and its turn."""
    rig.clock.now += 1.0
    rig.put(engine, NAMESPACE, prefix.keys)
    turn = put(prefix.num_blocks, revision, session_id=session_id, seed=prefix.seed)
    rig.store.session_put(engine, msgspec.structs.replace(turn, keys=join_keys(prefix.keys), **fields))


def say(rig: Rig, **fields: Any) -> list[wire.Message]:
    replies: list[wire.Message] = []
    rig.store.sessions.hint(wire.SessionHint(**fields), replies.append)
    return replies


def who_stays(rig: Rig, engine: Engine) -> tuple[int, int]:
    """Store a third prefix in a full RAM; return how many blocks of A and B are left."""
    rig.clock.now += 1.0
    assert set(rig.put(engine, NAMESPACE, THIRD.keys)) == {Outcome.OK}
    return len(rig.lookup(engine, A.keys)), len(rig.lookup(engine, B.keys))


def test_without_a_hint_the_older_session_goes(rig: Rig, engine: Engine) -> None:
    record(rig, engine, A, "a")
    record(rig, engine, B, "b")
    assert who_stays(rig, engine) == (1, 4)
    rig.check()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [({}, {"end": True}), ({"expect_followup": True}, {"end": True}), ({"priority": 2}, {"priority": -2})],
)
def test_what_a_turn_says_decides_under_every_policy(
    make_rig: MakeRig, name: str, of_a: dict[str, Any], of_b: dict[str, Any]
) -> None:
    rig = make_rig(ram_bytes=9 * 8192, ram_config=RamConfig(policy=name, high_watermark=1.0))  # type: ignore[arg-type]
    engine = rig.attach(NAMESPACE)
    record(rig, engine, A, "a", **of_a)
    record(rig, engine, B, "b", **of_b)
    of_a_left, of_b_left = who_stays(rig, engine)
    assert of_a_left == 4 and of_b_left < 4
    rig.check()


def test_a_session_can_be_hinted_at_later_and_by_anybody(rig: Rig, engine: Engine) -> None:
    record(rig, engine, A, "a")
    record(rig, engine, B, "b")
    assert say(rig, id="b", end=True) == [wire.Done()]
    assert who_stays(rig, engine) == (4, 1)
    rig.check()


def test_a_new_turn_ends_what_was_said_of_the_one_before(rig: Rig, engine: Engine) -> None:
    record(rig, engine, A, "a", priority=2)
    record(rig, engine, B, "b")
    rig.fetch(engine, A.keys)
    rig.fetch(engine, B.keys)
    record(rig, engine, A, "a", 1)
    assert who_stays(rig, engine) == (1, 4)


def test_a_hint_holds_for_blocks_that_come_after_it(rig: Rig, engine: Engine) -> None:
    """A turn is recorded while its last blocks are still being copied out of HBM."""
    record(rig, engine, A, "a")
    turn = put(4, session_id="b", seed=B.seed, end=True)
    rig.store.session_put(engine, msgspec.structs.replace(turn, keys=join_keys(B.keys)))
    rig.clock.now += 1.0
    rig.put(engine, NAMESPACE, B.keys)
    assert who_stays(rig, engine) == (4, 1)


def test_blocks_without_a_session_are_hinted_at_by_their_keys(rig: Rig, engine: Engine) -> None:
    rig.put(engine, NAMESPACE, A.keys)
    rig.clock.now += 1.0
    rig.put(engine, NAMESPACE, B.keys)
    rig.store.hint(engine, wire.Hint(join_keys(B.keys), end=True))
    assert who_stays(rig, engine) == (4, 1)


def test_after_their_time_to_live_unused_blocks_go_first(rig: Rig, engine: Engine) -> None:
    rig.put(engine, NAMESPACE, A.keys)
    rig.clock.now += 1.0
    rig.put(engine, NAMESPACE, B.keys)
    rig.store.hint(engine, wire.Hint(join_keys(B.keys), ttl_s=60.0))
    rig.settle(seconds=70.0)
    assert who_stays(rig, engine) == (4, 1)


def test_blocks_that_were_used_within_their_time_to_live_stay(rig: Rig, engine: Engine) -> None:
    rig.put(engine, NAMESPACE, A.keys)
    rig.clock.now += 1.0
    rig.put(engine, NAMESPACE, B.keys)
    rig.store.hint(engine, wire.Hint(join_keys(B.keys), ttl_s=60.0))
    rig.clock.now += 1.0
    rig.fetch(engine, B.keys)
    rig.settle(seconds=70.0)
    assert who_stays(rig, engine) == (1, 4)


def test_a_session_with_a_shorter_time_to_live_makes_room(rig: Rig, engine: Engine) -> None:
    record(rig, engine, A, "a")
    record(rig, engine, B, "b")
    assert say(rig, id="b", ttl_s=20.0) == [wire.Done()]
    rig.settle(seconds=30.0)
    assert who_stays(rig, engine) == (4, 0)
    rig.check()


# ---------------------------------------------------------------- pins


def pin(rig: Rig, session_id: str, pinned: bool = True) -> wire.Message:
    replies: list[wire.Message] = []
    rig.store.sessions.pin(wire.SessionPin(session_id, pinned), replies.append)
    rig.settle()
    return replies[0]


def test_a_pinned_session_stays_and_an_unpinned_one_does_not(rig: Rig, engine: Engine) -> None:
    record(rig, engine, A, "a", pin=True)
    record(rig, engine, B, "b")
    assert who_stays(rig, engine) == (4, 1)
    assert pin(rig, "a", False) == wire.Done()
    rig.put(engine, NAMESPACE, Prefix(NAMESPACE, 4, 4).keys)
    rig.put(engine, NAMESPACE, Prefix(NAMESPACE, 5, 4).keys)
    assert len(rig.lookup(engine, A.keys)) < 4
    rig.check()


def test_pins_never_fill_a_tier_and_what_is_over_the_budget_is_told_why(rig: Rig, engine: Engine) -> None:
    record(rig, engine, A, "a", pin=True)
    record(rig, engine, B, "b")
    refused = pin(rig, "b")
    assert isinstance(refused, wire.Error) and refused.code == wire.ErrorCode.BUSY
    assert "ram.pin_share" in refused.message
    with pytest.raises(ProtocolError, match="unpin something"):
        record(rig, engine, THIRD, "c", pin=True)
    with pytest.raises(ProtocolError, match="not pinned"):
        rig.store.hint(engine, wire.Hint(join_keys(B.keys), pin_s=60.0))
    assert pin(rig, "a", False) == wire.Done()
    assert pin(rig, "b") == wire.Done()
    assert rig.stats()["pins"]["refused"] == 3
    rig.check()


def test_a_pinned_session_that_outgrows_the_budget_keeps_its_head(rig: Rig, engine: Engine) -> None:
    record(rig, engine, Prefix(NAMESPACE, 1, 3), "a", pin=True)
    record(rig, engine, Prefix(NAMESPACE, 1, 6), "a", 1)
    assert rig.stats()["pins"]["ram_bytes"] == 4 * 8192
    for seed in range(10, 14):
        rig.put(engine, NAMESPACE, Prefix(NAMESPACE, seed, 5).keys)
    assert len(rig.lookup(engine, Prefix(NAMESPACE, 1, 6).keys)) == 4
    rig.check()


def test_a_pin_ends_at_its_deadline_and_with_its_owner(rig: Rig, engine: Engine) -> None:
    record(rig, engine, A, "a", pin=True)
    rig.settle(seconds=510.0)
    assert rig.stats()["pins"] == {"owners": 0, "refused": 0, "ram_bytes": 0}
    rig.store.hint(engine, wire.Hint(join_keys(A.keys), pin_s=60.0, pin_name="x"))
    assert rig.stats()["pins"]["owners"] == 1
    rig.store.hint(engine, wire.Hint(join_keys(A.keys), pin_s=0.0, pin_name="x"))
    assert rig.stats()["pins"]["owners"] == 0
    rig.store.hint(engine, wire.Hint(join_keys(A.keys), pin_s=60.0))
    rig.die(engine)
    rig.settle(seconds=1.0)
    assert rig.stats()["pins"]["ram_bytes"] == 0
    rig.check()


def test_a_block_that_two_have_pinned_counts_once_and_stays_until_both_let_go(rig: Rig, engine: Engine) -> None:
    record(rig, engine, A, "a", pin=True)
    rig.store.hint(engine, wire.Hint(join_keys(A.keys), pin_s=60.0))
    assert rig.stats()["pins"]["ram_bytes"] == 4 * 8192
    pin(rig, "a", False)
    assert rig.stats()["pins"]["ram_bytes"] == 4 * 8192
    rig.settle(seconds=70.0)
    assert rig.stats()["pins"]["ram_bytes"] == 0
    rig.check()


def test_a_deleted_session_leaves_no_pin(rig: Rig, engine: Engine) -> None:
    record(rig, engine, A, "a", pin=True)
    rig.store.sessions.delete(wire.SessionDelete("a"), lambda _: None)
    rig.settle()
    assert rig.stats()["pins"]["owners"] == 0
    assert rig.lookup(engine, A.keys) == []
    rig.check()


def test_pinned_sessions_are_pinned_again_after_a_restart_and_stay_on_the_ssd(make_rig: MakeRig) -> None:
    disk = memory(TierKind.SSD, 24)
    small = {"ram_bytes": 9 * 8192, "ssd": disk, "ssd_config": SsdConfig(max_bytes=16 * 8192, pin_share=0.5)}
    first = make_rig("first", **small)
    engine = first.attach(NAMESPACE)
    record(first, engine, A, "a", pin=True)
    first.settle(seconds=1.0)
    second = make_rig("second", ssd_records=first.ssd_records, **small)
    assert second.stats()["pins"]["ssd_bytes"] == 4 * 8192
    engine = second.attach(NAMESPACE)
    for seed in range(20, 40):
        second.put(engine, NAMESPACE, Prefix(NAMESPACE, seed, 4).keys)
        second.settle(seconds=1.0)
    assert len(second.lookup(engine, A.keys)) == 4
    second.check()


def test_hints_that_contradict_each_other_are_refused(rig: Rig, engine: Engine) -> None:
    record(rig, engine, A, "a")
    with pytest.raises(ProtocolError, match="contradict"):
        say(rig, id="a", expect_followup=True, end=True)
    with pytest.raises(ProtocolError, match="contradict"):
        rig.store.hint(engine, wire.Hint(join_keys(A.keys), expect_followup=True, end=True))
    with pytest.raises(ProtocolError, match="pin_s"):
        rig.store.hint(engine, wire.Hint(join_keys(A.keys), pin_s=1e9))
    with pytest.raises(ProtocolError, match="ttl_s"):
        rig.store.hint(engine, wire.Hint(join_keys(A.keys), ttl_s=float("nan")))


def test_a_later_time_to_live_holds_and_not_the_earlier_one(rig: Rig, engine: Engine) -> None:
    """Each request of a chat says how long its prefix lives: what the first said must not end it under the second."""
    rig.put(engine, NAMESPACE, A.keys)
    rig.clock.now += 1.0
    rig.put(engine, NAMESPACE, B.keys)
    rig.store.hint(engine, wire.Hint(join_keys(B.keys), ttl_s=60.0))
    rig.fetch(engine, B.keys)
    rig.store.hint(engine, wire.Hint(join_keys(B.keys), ttl_s=6000.0))
    rig.settle(seconds=70.0)
    assert who_stays(rig, engine) == (1, 4)


def test_a_hint_that_is_refused_for_its_pin_has_no_other_effect(rig: Rig, engine: Engine) -> None:
    record(rig, engine, A, "a", pin=True)
    rig.put(engine, NAMESPACE, B.keys)
    with pytest.raises(ProtocolError, match="not pinned"):
        rig.store.hint(engine, wire.Hint(join_keys(B.keys), ttl_s=10.0, pin_s=60.0))
    assert rig.store.keeping._timed == []


def test_a_pin_is_renewed_though_its_blocks_are_in_no_tier_any_more(rig: Rig, engine: Engine) -> None:
    """Their entries lived by the old pin alone, and ended when it did, before the new one was there."""
    rig.put(engine, NAMESPACE, A.keys)
    hint = wire.Hint(join_keys(A.keys), pin_s=60.0)
    rig.store.hint(engine, hint)
    rig.store.evict(wire.Evict(["ram"], drop=True), lambda _: None)
    rig.settle()
    rig.store.hint(engine, hint)
    rig.check()
    rig.put(engine, NAMESPACE, A.keys)
    assert rig.stats()["pins"]["ram_bytes"] == 4 * 8192
    rig.check()


def test_a_block_that_is_named_twice_counts_once_and_its_pin_ends(rig: Rig, engine: Engine) -> None:
    """Twice in one pin and once in another its size stayed in the sum, until nothing could be pinned."""
    rig.put(engine, NAMESPACE, A.keys)
    rig.store.hint(engine, wire.Hint(join_keys([*A.keys[:2], *A.keys[:2]]), pin_s=60.0, pin_name="twice"))
    rig.store.hint(engine, wire.Hint(join_keys(A.keys[:2]), pin_s=60.0, pin_name="once"))
    for name in ("twice", "once"):
        rig.store.hint(engine, wire.Hint(join_keys(A.keys[:2]), pin_s=0.0, pin_name=name))
    assert rig.stats()["pins"]["ram_bytes"] == 0
    rig.check()


def test_pins_of_the_same_blocks_without_end_are_refused(
    rig: Rig, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cost no budget, since blocks count once, but memory of the daemon's."""
    monkeypatch.setattr(pins, "_MAX_BLOCKS", 10)
    rig.put(engine, NAMESPACE, A.keys)
    for name in ("x", "y", "y"):
        rig.store.hint(engine, wire.Hint(join_keys(A.keys), pin_s=60.0, pin_name=name))
    with pytest.raises(ProtocolError, match="2 others are"):
        rig.store.hint(engine, wire.Hint(join_keys(A.keys), pin_s=60.0, pin_name="z"))
    rig.store.hint(engine, wire.Hint(join_keys(A.keys), pin_s=0.0, pin_name="x"))
    rig.store.hint(engine, wire.Hint(join_keys(A.keys), pin_s=60.0, pin_name="z"))
    rig.check()


def test_pinned_sessions_leave_room_for_others_however_small_they_are(make_rig: MakeRig) -> None:
    """Sessions without a whole block cost nothing of what may be pinned, and never make room: one tenant could have
    filled the table with them for good, and all others been refused."""
    rig = make_rig(sessions=SessionsConfig(max_sessions=4))
    engine = rig.attach(NAMESPACE)

    def turn(session_id: str, **fields: Any) -> None:
        rig.clock.now += 1.0
        rig.store.session_put(engine, msgspec.structs.replace(put(0, session_id=session_id), **fields))

    turn("a", pin=True)
    turn("b", pin=True)
    for refused in ({"pin": True}, {"pin": True, "fork": True}):
        with pytest.raises(ProtocolError, match="2 sessions are"):
            turn("a" if "fork" in refused else "c", **refused)
    turn("c")
    answer = pin(rig, "c")
    assert isinstance(answer, wire.Error) and answer.code == wire.ErrorCode.BUSY
    for number in range(5):
        turn(f"other-{number}")
    assert pin(rig, "a", False) == wire.Done()
    assert pin(rig, "other-4") == wire.Done()
    rig.check()


def test_long_times_to_live_do_not_keep_out_short_ones(
    rig: Rig, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who named a year for as many prefixes as are remembered had all other times to live refused for that year."""
    monkeypatch.setattr(keeping, "_MAX_TIMED", 3)
    rig.put(engine, NAMESPACE, A.keys)
    rig.clock.now += 1.0
    rig.put(engine, NAMESPACE, B.keys)
    for _ in range(3):
        rig.store.hint(engine, wire.Hint(join_keys(A.keys), ttl_s=365 * 86400.0))
    rig.store.hint(engine, wire.Hint(join_keys(B.keys), ttl_s=60.0))
    with pytest.raises(ProtocolError, match="time to live"):
        rig.store.hint(engine, wire.Hint(join_keys(A.keys), ttl_s=366 * 86400.0))
    rig.settle(seconds=70.0)
    assert who_stays(rig, engine) == (4, 1)
    assert rig.store.keeping._timed_bytes == sum(len(one[3]) for one in rig.store.keeping._timed)


def test_a_fork_that_does_not_fit_is_refused_though_what_it_forks_from_is_pinned(rig: Rig, engine: Engine) -> None:
    """It was taken for the pinned session itself: its head was pinned, and nobody was told of the rest."""
    long = Prefix(NAMESPACE, 1, 6)
    record(rig, engine, A, "a", pin=True)
    for how in ({"fork": True}, {"revision": 7}):
        with pytest.raises(ProtocolError, match="not pinned") as refused:
            record(rig, engine, long, "a", pin=True, **how)
        assert refused.value.code == wire.ErrorCode.BUSY
    assert rig.stats()["pins"]["owners"] == 1
    record(rig, engine, A, "a", pin=True, fork=True)
    assert rig.stats()["pins"]["owners"] == 2, "what it shares costs nothing"
    record(rig, engine, A, "a", 1, pin=True)
    rig.check()


# ---------------------------------------------------------------- pins of several tenants

THEIRS = namespace(tenant="other")


@pytest.fixture
def large(make_rig: MakeRig) -> Rig:
    """8 blocks may be pinned."""
    return make_rig(
        ram_bytes=16 * 8192,
        ram_config=RamConfig(policy="lru", pin_share=0.5, high_watermark=1.0),
        sessions=SessionsConfig(ttl_s=10_000.0, pin_for_s=500.0),
    )


def hold(rig: Rig, engine: Engine, prefix: Prefix, name: str, pin_s: float = 60.0) -> None:
    rig.put(engine, prefix.namespace, prefix.keys)
    rig.store.hint(engine, wire.Hint(join_keys(prefix.keys), pin_s=pin_s, pin_name=name))


def pinned_of(rig: Rig, namespace_id: int) -> int:
    """How many blocks of the namespace are pinned in RAM."""
    return rig.store.keeping.pins._bytes[TierKind.RAM].get(namespace_id, 0) // 8192


def test_a_tenant_that_pins_alone_may_use_all_and_gives_half_up_when_another_pins(large: Rig) -> None:
    """One tenant could pin all that may be pinned, and every other was refused for as long as it went on."""
    ours, theirs = large.attach(NAMESPACE), large.attach(THEIRS)
    hold(large, ours, Prefix(NAMESPACE, 1, 5), "first")
    hold(large, ours, Prefix(NAMESPACE, 2, 3), "second", 600.0)
    assert pinned_of(large, ours.namespace) == 8
    hold(large, theirs, Prefix(THEIRS, 3, 3), "x")
    assert (pinned_of(large, ours.namespace), pinned_of(large, theirs.namespace)) == (5, 3), "no more than is needed"
    hold(large, theirs, Prefix(THEIRS, 4, 1), "y")
    assert (pinned_of(large, ours.namespace), pinned_of(large, theirs.namespace)) == (4, 4)
    held = large.store.keeping.pins._pins
    assert [held[ours.incarnation, name].num_held[TierKind.RAM] for name in ("first", "second")] == [1, 3]
    with pytest.raises(ProtocolError, match="other tenants"):
        hold(large, theirs, Prefix(THEIRS, 5, 1), "z")
    with pytest.raises(ProtocolError, match="other tenants"):
        hold(large, ours, Prefix(NAMESPACE, 6, 1), "third")
    large.check()
    for engine in (ours, theirs):
        large.die(engine)
    large.settle(seconds=1.0)
    assert large.stats()["pins"] == {"owners": 0, "refused": 2, "ram_bytes": 0}
    large.check()


def test_what_two_pins_of_a_tenant_share_is_given_up_by_both(large: Rig) -> None:
    ours, theirs = large.attach(NAMESPACE), large.attach(THEIRS)
    for name in ("first", "second"):
        hold(large, ours, Prefix(NAMESPACE, 1, 8), name)
    hold(large, theirs, Prefix(THEIRS, 3, 4), "x")
    assert (pinned_of(large, ours.namespace), pinned_of(large, theirs.namespace)) == (4, 4)
    large.check()


def test_a_session_of_another_tenant_is_pinned_in_its_half(large: Rig) -> None:
    ours, theirs = large.attach(NAMESPACE), large.attach(THEIRS)
    record(large, ours, Prefix(NAMESPACE, 1, 8), "a", pin=True)
    chat = Prefix(THEIRS, 2, 5)
    large.put(theirs, THEIRS, chat.keys)

    def turn(num_blocks: int) -> wire.SessionPut:
        prefix = Prefix(THEIRS, 2, num_blocks)
        message = wire.ChatMessage("user", "", prefix.tokens)
        return put(tenant="other", namespace=THEIRS.digest(), messages=[message], keys=join_keys(prefix.keys), pin=True)

    with pytest.raises(ProtocolError, match="other tenants"):
        large.store.session_put(theirs, turn(5))
    assert pinned_of(large, ours.namespace) == 8, "who is refused takes nothing"
    large.store.session_put(theirs, turn(4))
    assert (pinned_of(large, ours.namespace), pinned_of(large, theirs.namespace)) == (4, 4)
    record(large, ours, Prefix(NAMESPACE, 1, 8), "a", 1)
    assert pinned_of(large, ours.namespace) == 4, "the head of the session that it was"
    large.check()


def test_beside_others_a_tenant_may_pin_half_of_the_sessions_that_may_be(make_rig: MakeRig) -> None:
    rig = make_rig(sessions=SessionsConfig(max_sessions=8))
    ours, theirs = rig.attach(NAMESPACE), rig.attach(THEIRS)

    def turn(number: int, engine: Engine, **fields: Any) -> None:
        rig.store.session_put(engine, put(0, session_id=f"chat-{number}", seed=number, **fields))

    of_others = {"tenant": "other", "namespace": THEIRS.digest()}
    turn(1, ours, pin=True)
    turn(2, ours, pin=True)
    turn(3, theirs, **of_others)
    with pytest.raises(ProtocolError, match="2 sessions of this tenant"):
        turn(4, ours, pin=True)
    for number in (5, 6):
        turn(number, theirs, pin=True, **of_others)
    with pytest.raises(ProtocolError, match="4 sessions are"):
        turn(7, theirs, pin=True, **of_others)
    rig.check()
