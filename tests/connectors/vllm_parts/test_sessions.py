"""Sessions as the connector knows them."""

import pytest

from kvstore.connectors.vllm_parts import sessions
from kvstore.connectors.vllm_parts.consult import Shard
from kvstore.connectors.vllm_parts.sessions import Sessions
from kvstore.connectors.vllm_parts.stats import Counters
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


def test_the_oldest_sessions_are_forgotten_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_MAX_KNOWN", 2)
    shard = Shard(namespace(), MemoryDaemon().client())
    known = Sessions("", Counters(), Clock())
    for name in ("a", "b", "c"):
        known.greet([shard], name, 1.0)
    assert [known.knows(name, 1) for name in ("a", "b", "c")] == [False, True, True]
