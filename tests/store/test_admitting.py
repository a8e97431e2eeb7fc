"""What is written to SSD and bucket under each admission policy; promises and budgets."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvstore import wire
from kvstore.config import S3Config, SessionsConfig, SsdConfig
from kvstore.core.key import join_keys
from kvstore.core.outcome import TierKind
from kvstore.store.engines import Engine
from tests.support.chats import Prefix
from tests.support.rig import Rig, memory
from tests.support.sessions import NAMESPACE, put, view

MakeRig = Callable[..., Rig]
PREFIX = Prefix(NAMESPACE, 1, 6)


def ask(rig: Rig, engine: Engine, prefix: Prefix) -> None:
    """A request: looked up, fetched as far as it is there, and the rest stored."""
    rig.clock.now += 1.0
    found = len(rig.lookup(engine, prefix.keys))
    if found:
        rig.fetch(engine, prefix.keys[:found])
    if found < prefix.num_blocks:
        rig.put(engine, NAMESPACE, prefix.keys, found)
    rig.settle()


def make(make_rig: MakeRig, **ssd: Any) -> tuple[Rig, Engine]:
    rig = make_rig(ssd=memory(TierKind.SSD), ssd_config=SsdConfig(**ssd))
    return rig, rig.attach(NAMESPACE)


def on_ssd(rig: Rig) -> int:
    return int(rig.stats()["tiers"]["ssd"]["blocks"])


def test_all_is_written_where_nothing_else_was_chosen(make_rig: MakeRig) -> None:
    rig, engine = make(make_rig)
    ask(rig, engine, PREFIX)
    assert on_ssd(rig) == 6
    rig.check()


def test_a_second_touch_writes_what_the_first_did_not(make_rig: MakeRig) -> None:
    rig, engine = make(make_rig, admission="second_touch")
    ask(rig, engine, PREFIX)
    assert on_ssd(rig) == 0
    assert rig.stats()["tiers"]["ssd"]["admission"]["refused"] == 6
    ask(rig, engine, Prefix(NAMESPACE, 1, 4))
    assert on_ssd(rig) == 4
    rig.settle(seconds=10.0)
    assert on_ssd(rig) == 4, "what was refused is not written by who looks for what was forgotten"
    rig.check()


def test_a_child_that_is_written_takes_its_refused_parents_along(make_rig: MakeRig) -> None:
    rig, engine = make(make_rig, admission="second_touch")
    ask(rig, engine, Prefix(NAMESPACE, 1, 2))
    rig.put(engine, NAMESPACE, Prefix(NAMESPACE, 1, 3).keys, 2)
    record(rig, engine, Prefix(NAMESPACE, 1, 3), "chat")
    rig.settle()
    assert on_ssd(rig) == 3
    rig.check()


def record(rig: Rig, engine: Engine, prefix: Prefix, session_id: str) -> None:
    turn = put(prefix.num_blocks, session_id=session_id, seed=prefix.seed)
    rig.store.session_put(engine, msgspec.structs.replace(turn, keys=join_keys(prefix.keys)))


@pytest.mark.parametrize("is_recorded_first", [True, False])
def test_the_blocks_of_a_session_are_written_whatever_the_policy_thinks_of_them(
    make_rig: MakeRig, is_recorded_first: bool
) -> None:
    rig, engine = make(make_rig, admission="second_touch", write_budget_bytes=1)
    if is_recorded_first:
        record(rig, engine, PREFIX, "chat")
    ask(rig, engine, PREFIX)
    if not is_recorded_first:
        record(rig, engine, PREFIX, "chat")
    rig.settle(seconds=1.0)
    assert view(rig).durable == "ssd"
    assert rig.stats()["tiers"]["ssd"]["admission"]["promised"] == 6
    rig.check()


def test_who_chooses_so_lets_the_policy_decide_about_sessions_too(make_rig: MakeRig) -> None:
    rig = make_rig(
        ssd=memory(TierKind.SSD),
        ssd_config=SsdConfig(admission="second_touch"),
        sessions=SessionsConfig(durable="admitted"),
    )
    engine = rig.attach(NAMESPACE)
    ask(rig, engine, PREFIX)
    record(rig, engine, PREFIX, "chat")
    rig.settle(seconds=1.0)
    assert view(rig).durable == "none" and on_ssd(rig) == 0
    ask(rig, engine, PREFIX)
    rig.settle(seconds=1.0)
    assert view(rig).durable == "ssd"
    rig.check()


def test_no_more_is_written_in_a_day_than_the_budget_allows(make_rig: MakeRig) -> None:
    """An hour of the budget may be spent at once."""
    rig, engine = make(make_rig, write_budget_bytes=24 * 4 * 8192)
    ask(rig, engine, PREFIX)
    assert on_ssd(rig) == 4
    assert rig.stats()["tiers"]["ssd"]["admission"] == {"admitted": 4, "promised": 0, "refused": 0, "over_budget": 2}
    rig.settle(seconds=1800.0)
    ask(rig, engine, PREFIX)
    assert on_ssd(rig) == 6
    rig.check()


def test_the_bucket_has_a_policy_and_a_budget_of_requests_of_its_own(make_rig: MakeRig) -> None:
    bucket = memory(TierKind.S3)
    rig = make_rig(s3=bucket, s3_config=S3Config(write="all", admission="second_touch", request_budget=24 * 5))
    engine = rig.attach(NAMESPACE)
    ask(rig, engine, PREFIX)
    assert not bucket.blocks
    ask(rig, engine, PREFIX)
    assert len(bucket.blocks) == 5
    rig.check()


def test_blocks_that_were_refused_are_lost_with_ram_and_only_they(make_rig: MakeRig) -> None:
    rig, engine = make(make_rig, admission="second_touch")
    ask(rig, engine, PREFIX)
    ask(rig, engine, PREFIX)
    other = Prefix(NAMESPACE, 2, 6)
    ask(rig, engine, other)
    rig.store.evict(wire.Evict(["ram"], drop=True), lambda _: None)
    rig.settle()
    assert rig.lookup(engine, PREFIX.keys) == [TierKind.SSD] * 6
    assert rig.lookup(engine, other.keys) == []
    assert rig.stats()["tiers"]["ssd"]["blocks"] == 6
    rig.check()


def test_what_was_learned_keeps_writes_down(make_rig: MakeRig) -> None:
    """Short prompts come again, long ones never do."""
    rig = make_rig(
        ram_bytes=60 * 8192,
        ssd=memory(TierKind.SSD, 80),
        ssd_config=SsdConfig(admission="learned", max_bytes=80 * 8192),
    )
    engine = rig.attach(NAMESPACE)
    for number in range(60):
        ask(rig, engine, Prefix(NAMESPACE, number % 5, 2))
        ask(rig, engine, Prefix(NAMESPACE, 1000 + number, 40))
    before = on_written(rig)
    for number in range(60, 70):
        ask(rig, engine, Prefix(NAMESPACE, number % 5, 2))
        ask(rig, engine, Prefix(NAMESPACE, 1000 + number, 40))
    assert on_written(rig) - before < 10 * 40 / 3
    assert len(rig.lookup(engine, Prefix(NAMESPACE, 3, 2).keys)) == 2
    rig.check()


def on_written(rig: Rig) -> int:
    return int(rig.stats()["tiers"]["ssd"]["admission"]["admitted"])
