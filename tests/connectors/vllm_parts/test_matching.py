"""How long a request waits to hear what is cached for it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.connectors.vllm_parts.consult import Answer, Consult, Inquiry
from kvstore.connectors.vllm_parts.costs import Costs, blank_profile
from kvstore.connectors.vllm_parts.matching import Matcher
from kvstore.connectors.vllm_parts.settings import Settings
from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.connectors.vllm_parts.tracked import Tracked
from kvstore.connectors.vllm_parts.wishes import Wishes
from kvstore.core.outcome import TierKind
from tests.support.vllm import BLOCK_TOKENS, Clock, FakeRequest


class Rig:
    """A consult that answers when the test does."""

    def __init__(self, *, awaits: bool = True, is_silent: bool = False, **settings: Any) -> None:
        self.clock = Clock()
        self.asked: list[Inquiry] = []
        consult = SimpleNamespace(
            ask=self.asked.append, awaits=lambda _: awaits, gate=SimpleNamespace(is_silent=is_silent)
        )
        self.matcher = Matcher(
            replace(Settings(Path("/nowhere")), **settings),
            BLOCK_TOKENS,
            1,
            64,
            cast(Consult, consult),
            Costs(blank_profile("m", "d", 64, BLOCK_TOKENS, 64), None, self.clock),
            Counters(),
            lambda _: 0.0,
            self.clock,
            self.clock,
        )
        self.tracked = Tracked(FakeRequest("r", list(range(40))), Wishes("chat"), self.clock.now)
        self.matcher.begin(self.tracked)

    def waits(self) -> float:
        """Ask for the match until it is there; return how long that took."""
        began = self.clock.now
        while self.matcher.match(self.tracked, 0) is None:
            self.clock.now += 0.01
            assert self.clock.now < began + 10
        return self.clock.now - began


def test_a_silent_daemon_is_waited_for_no_longer_though_the_session_is_new() -> None:
    """Each turn of a session waited two seconds, again and again."""
    assert Rig().waits() == pytest.approx(0.25, abs=0.02)
    assert Rig(is_silent=True).waits() == pytest.approx(0.05, abs=0.02)


def test_a_bucket_that_may_have_more_is_waited_for_and_then_what_was_found_is_taken() -> None:
    rig = Rig()
    rig.asked[0].early = Answer(0, (TierKind.RAM,) * 3, "never_stored", asked=True)
    assert rig.waits() == pytest.approx(2.0, abs=0.02)
    assert rig.tracked.match is not None and len(rig.tracked.match.tiers) == 3


def test_a_bucket_that_was_too_slow_the_last_time_is_not_waited_for() -> None:
    rig = Rig(awaits=False)
    rig.asked[0].early = Answer(0, (TierKind.RAM,) * 3, "never_stored", asked=True)
    assert rig.waits() == pytest.approx(0.25, abs=0.02)


def test_no_request_waits_longer_than_the_deadline() -> None:
    rig = Rig(deadline_s=0.1)
    rig.asked[0].early = Answer(0, (TierKind.RAM,) * 3, "never_stored", asked=True)
    assert rig.waits() == pytest.approx(0.1, abs=0.02)
