"""Sessions as the connector knows them."""

import pytest

from kvstore.connectors.vllm_parts import sessions
from kvstore.connectors.vllm_parts.consult import Shard
from kvstore.connectors.vllm_parts.sessions import Sessions, Turn
from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.connectors.vllm_parts.wishes import Wishes
from kvstore.core.errors import TierUnavailable
from tests.support.vllm import Clock, MemoryDaemon, namespace


def test_a_session_is_known_once_every_rank_was_asked_for_it() -> None:
    daemon = MemoryDaemon()
    shards = [Shard(namespace(rank, 2), daemon.client()) for rank in range(2)]
    known = Sessions("", Counters(), Clock())
    known.greet(shards[:1], "chat", 1.0)
    assert known.knows("chat", 1) and not known.knows("chat", 2)
    known.greet(shards, "chat", 1.0)
    assert known.knows("chat", 2)


def test_a_greeting_without_an_answer_leaves_the_session_new() -> None:
    daemon = MemoryDaemon(is_away=True)
    known = Sessions("", Counters(), Clock())
    with pytest.raises(TierUnavailable):
        known.greet([Shard(namespace(), daemon.client())], "chat", 1.0)
    assert not known.knows("chat", 1)


def test_a_turn_that_could_not_be_recorded_is_counted() -> None:
    counters = Counters()
    with pytest.raises(TierUnavailable):
        Sessions("", counters, Clock()).save([Shard(namespace(), MemoryDaemon(is_away=True).client())], turn(8))
    report = counters.take()
    assert report is not None and report["counts"] == {"sessions_saved|unavailable": 1}


def test_the_oldest_sessions_are_forgotten_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_MAX_KNOWN", 2)
    shard = Shard(namespace(), MemoryDaemon().client())
    known = Sessions("", Counters(), Clock())
    for name in ("a", "b", "c"):
        known.greet([shard], name, 1.0)
    assert [known.knows(name, 1) for name in ("a", "b", "c")] == [False, True, True]


def turn(length: int) -> Turn:
    return Turn(Wishes(session_id="chat"), list(range(length)), [bytes([1]) * 32])


def test_a_daemon_that_was_killed_before_a_turn_was_on_disk_gets_the_next_one_into_the_same_session() -> None:
    """It took the turn for another branch: a fork, which nobody who asks for the session by its id ever finds."""
    daemon = MemoryDaemon()
    shards = [Shard(namespace(), daemon.client())]
    known = Sessions("", Counters(), Clock())
    known.save(shards, turn(40))
    on_disk = dict(daemon.sessions)
    known.save(shards, turn(80))
    daemon.sessions = on_disk
    known.save(shards, turn(120))
    known.save(shards, turn(160))
    assert list(daemon.sessions) == ["chat"]
    put = daemon.sessions["chat"]
    assert [len(message.token_ids) for message in put.messages] == [40, 80, 40]
    assert put.revision == 2


def test_a_session_that_somebody_else_has_moved_on_is_left_to_them() -> None:
    daemon = MemoryDaemon()
    shards = [Shard(namespace(), daemon.client())]
    known, others = (Sessions("", Counters(), Clock()) for _ in range(2))
    known.save(shards, turn(40))
    others.save(shards, turn(80))
    known.save(shards, turn(60))
    assert sorted(daemon.sessions) == ["chat", "chat~1"]
    assert sum(len(message.token_ids) for message in daemon.sessions["chat"].messages) == 80
