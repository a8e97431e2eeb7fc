"""Looking for the daemon while nobody asks."""

import time
from dataclasses import dataclass, field
from typing import cast

from kvstore.client import Client
from kvstore.connectors.vllm_parts.gate import Gate
from kvstore.connectors.vllm_parts.scout import scout
from kvstore.core.errors import TierUnavailable
from kvstore.core.key import BlockKey

ROOT = BlockKey(bytes(32))


@dataclass
class SlowToAttach:
    """As a client in an engine that is starting: to attach takes all the time that there is, each time anew."""

    is_attached: bool = False
    calls: list[str] = field(default_factory=list)

    def attach(self, deadline_s: float) -> None:
        self.calls.append("attach")
        self.is_attached = True

    def lookup(self, keys: list[BlockKey], deadline_s: float) -> None:
        self.calls.append("lookup")
        if not self.is_attached:
            self.is_attached = True
            raise TierUnavailable("no time was left to ask the daemon")


def test_a_daemon_to_which_it_took_long_to_attach_is_not_taken_for_a_silent_one() -> None:
    gate = Gate("scheduler", time.monotonic)
    client = SlowToAttach()
    scout(gate, [(cast(Client, client), ROOT)])
    assert gate.is_attached and not gate.is_silent
    assert client.calls == ["attach", "lookup"], "a daemon that fell silent since is noticed, too"
