"""The count of sessions: exact where there are few, a few at a time where there are many."""

from collections.abc import Callable

import pytest

from kvstore import wire
from kvstore.core.outcome import TierKind
from kvstore.store import census
from kvstore.store.census import SessionCensus
from kvstore.store.session import SessionTable
from tests.support.chats import Prefix
from tests.support.rig import Rig, memory
from tests.support.sessions import NAMESPACE, Bucket, put

MakeRig = Callable[..., Rig]


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    """Five sessions that are in the bucket, two of them pinned, and, once they are there, one of no block at all and
    one whose blocks nobody has."""
    rig = make_rig(ssd=memory(TierKind.SSD), **Bucket().options())
    engine = rig.attach(NAMESPACE)
    for seed in range(1, 6):
        rig.put(engine, NAMESPACE, Prefix(NAMESPACE, seed, 3).keys)
        rig.store.session_put(engine, put(3, session_id=f"chat-{seed}", seed=seed, pin=seed < 3))
    rig.store.session_put(engine, put(2, session_id="lost", seed=7))
    rig.store.session_put(engine, put(1, session_id="short", seed=8, keys=b""))
    rig.settle(seconds=2.0)
    return rig


EXPECTED = {"count": 7, "pinned": 2, "durable": {"none": 1, "ssd": 0, "s3": 6}}


def test_few_sessions_are_counted_when_asked_for(rig: Rig) -> None:
    assert rig.stats()["sessions"] == EXPECTED
    assert rig.stats()["sessions"] == SessionCensus(rig.store._session_table).snapshot()


def test_many_are_counted_a_few_at_a_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request for the statistics counted them all, one by one, while every engine waited."""
    monkeypatch.setattr(census, "_AT_ONCE", 2)
    asked: list[int] = []
    durable_of = SessionTable.durable_of
    monkeypatch.setattr(
        SessionTable, "durable_of", lambda table, some: asked.append(len(some)) or durable_of(table, some)
    )
    counting = SessionCensus(rig.store._session_table)
    assert counting.snapshot() == {"count": 7, "pinned": 0, "durable": {"none": 0, "ssd": 0, "s3": 0}}
    for _ in range(5):
        counting.step()
    assert counting.snapshot() == EXPECTED
    assert max(asked) == 2
    rig.store.sessions.delete(wire.SessionDelete("lost"), lambda _: None)
    rig.settle()
    for _ in range(8):
        counting.step()
    assert counting.snapshot() == {"count": 6, "pinned": 2, "durable": {"none": 0, "ssd": 0, "s3": 6}}
