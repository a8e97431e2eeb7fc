from typing import Any, cast

import pytest

from kvstore.client import Client
from kvstore.connectors.vllm_parts.consult import Shard
from kvstore.connectors.vllm_parts.sessions import Sessions
from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.connectors.vllm_parts.telling import telling
from kvstore.connectors.vllm_parts.tracked import Tracked
from kvstore.connectors.vllm_parts.wishes import Wishes
from kvstore.core.errors import ProtocolError
from kvstore.wire import ErrorCode, Report
from tests.support.vllm import Clock, FakeRequest, MemoryClient, MemoryDaemon, hashes_of, namespace

HASHES = hashes_of(range(8))


class Refusing(MemoryClient):
    def session_put(self, put: Any, deadline_s: float | None = None) -> Any:
        raise ProtocolError(ErrorCode.BUSY, "not now")

    def hint(self, keys: Any, **hints: Any) -> None:
        raise ProtocolError(ErrorCode.BUSY, "no room for a pin")


@pytest.mark.parametrize("wishes", [Wishes("chat"), Wishes(pin=True)])
def test_a_request_whose_wishes_are_refused_is_reported_all_the_same(wishes: Wishes) -> None:
    daemon = MemoryDaemon()
    shard = Shard(namespace(), cast(Client, Refusing(daemon)))
    tracked = Tracked(FakeRequest("r", range(8)), wishes, 0.0)
    report = Report("r", 8, 0, 0, 0, 0, 8, {}, "prefill", 0.1)
    work = telling(Sessions("", Counters(), Clock()), tracked, HASHES, HASHES[1:], report)
    with pytest.raises(ProtocolError):
        work([shard])
    (told,) = daemon.reports
    assert told.last_block == shard.keys(HASHES[1:])[0]
