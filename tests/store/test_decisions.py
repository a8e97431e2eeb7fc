"""The daemon keeps the last decisions in bounded space, for those who may see them, and sums up what they cost."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvstore import wire
from kvstore.core.errors import ProtocolError
from kvstore.core.outcome import TierKind
from kvstore.store.decisions import MAX_ENTRY_BYTES, Decisions
from kvstore.wire import ErrorCode
from policies.decision import MAX_RUNS, Happened, Run, Situation, Why
from tests.support.decisions import HAPPENED, PLANS, SITUATION, decision, decision_view


def report(request_id: str = "chatcmpl-1", **changes: Any) -> wire.Report:
    fields: dict[str, Any] = {
        "prompt_tokens": 200,
        "hbm": 48,
        "ram": 48,
        "ssd": 0,
        "s3": 16,
        "recomputed": 88,
        "miss": {"plan": 48, "never_stored": 40},
        "plan": "interval",
        "ttft_s": 0.6,
        "saved_prefill_s": 2.0,
        "decision": decision(request_id),
    }
    return wire.Report(request_id, **(fields | changes))


def kept(*reports: wire.Report, max_kept: int = 1000) -> Decisions:
    decisions = Decisions(lambda: 1_700_000_001.0, max_kept)
    for one in reports:
        decisions.check(one)
        decisions.add(one, "model")
    return decisions


def ids(decisions: Decisions, tenant: str | None = None, limit: int = 1000) -> Sequence[str]:
    return [wire.decision_view(entry).id for entry in decisions.list(wire.DecisionList(tenant, limit)).decisions]


def test_a_report_can_be_asked_for_as_it_was() -> None:
    found = kept(report()).get(wire.DecisionGet("chatcmpl-1"))
    assert [wire.decision_view(entry) for entry in found.decisions] == [decision_view()]


def test_a_report_without_a_decision_is_kept_too() -> None:
    found = kept(report(decision=None)).get(wire.DecisionGet("chatcmpl-1"))
    assert wire.decision_view(found.decisions[0]) == decision_view(decision=None)


def test_the_newest_come_first_and_the_oldest_go() -> None:
    decisions = kept(*(report(f"r{i}") for i in range(5)), max_kept=3)
    assert ids(decisions) == ["r4", "r3", "r2"] and len(decisions) == 3
    assert ids(decisions, limit=2) == ["r4", "r3"]
    assert decisions.list(wire.DecisionList(limit=2)).total == 3
    assert decisions.snapshot()["chosen"] == {"interval": 5}


def test_an_id_that_comes_again_replaces_what_was_known_of_it() -> None:
    decisions = kept(report("a"), report("b"), report("a", ttft_s=0.9), max_kept=2)
    assert ids(decisions) == ["a", "b"]
    assert wire.decision_view(decisions.get(wire.DecisionGet("a")).decisions[0]).ttft_s == 0.9


def test_a_tenant_that_is_named_sees_its_own_requests_alone() -> None:
    decisions = kept(report("a", tenant="one"), report("b", tenant="two"), report("c"))
    assert ids(decisions) == ["c", "b", "a"]
    assert ids(decisions, "one") == ["a"] and ids(decisions, "") == ["c"] and ids(decisions, "three") == []
    assert decisions.get(wire.DecisionGet("a", "one")) == decisions.get(wire.DecisionGet("a"))
    for tenant in ("two", ""):
        with pytest.raises(ProtocolError) as caught:
            decisions.get(wire.DecisionGet("a", tenant))
        assert caught.value.code == ErrorCode.NOT_FOUND


def test_an_unknown_request_is_told_to_be_unknown() -> None:
    with pytest.raises(ProtocolError, match="nothing is known") as caught:
        kept(report()).get(wire.DecisionGet("x" * 100_000))
    assert caught.value.code == ErrorCode.NOT_FOUND and len(str(caught.value)) < 500


def test_the_beginning_of_an_id_finds_its_request() -> None:
    """vLLM answers `cmpl-9756` and knows the request as `cmpl-9756-0-b1f3`."""
    decisions = kept(report("cmpl-9756-0-b1f3"), report("cmpl-8888-0-aaaa"))
    assert decisions.get(wire.DecisionGet("cmpl-9756")) == decisions.get(wire.DecisionGet("cmpl-9756-0-b1f3"))
    with pytest.raises(ProtocolError, match="nothing is known"):
        decisions.get(wire.DecisionGet(""))


def test_a_whole_id_is_meant_as_such_though_others_begin_so() -> None:
    decisions = kept(report("a"), report("ab"))
    assert wire.decision_view(decisions.get(wire.DecisionGet("a")).decisions[0]).id == "a"


def test_where_several_ids_begin_alike_they_are_named_the_newest_first_and_not_without_end() -> None:
    decisions = kept(*(report(f"cmpl-1-{i}") for i in range(20)))
    with pytest.raises(ProtocolError, match=r"20 requests begin with 'cmpl-1': cmpl-1-19, cmpl-1-18, .*, …") as caught:
        decisions.get(wire.DecisionGet("cmpl-1"))
    assert caught.value.code == ErrorCode.CONFLICT and "cmpl-1-2," not in str(caught.value)


def test_a_beginning_finds_no_other_tenants_request() -> None:
    decisions = kept(report("cmpl-1-a", tenant="one"), report("cmpl-1-b", tenant="two"))
    assert wire.decision_view(decisions.get(wire.DecisionGet("cmpl-1", "two")).decisions[0]).id == "cmpl-1-b"
    with pytest.raises(ProtocolError, match="nothing is known"):
        decisions.get(wire.DecisionGet("cmpl-1", "three"))


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ProtocolError):
        kept(report()).list(wire.DecisionList(limit=-1))


def test_what_wrong_choices_cost_is_summed_up_and_gains_are_not_set_off() -> None:
    decisions = kept(
        report("a", decision=decision("a", regret_s=0.25)),
        report("b", decision=decision("b", regret_s=-0.5)),
        report("c", decision=decision("c", regret_s=0.5, why=Why.NOT_MEASURED)),
        report("d", decision=decision("d", regret_s=4.0, why=Why.PINNED)),
        report("e", decision=decision("e", regret_s=None, best_afterwards=None, chosen=PLANS[0])),
        report("f", decision=None),
    )
    assert decisions.snapshot() == {
        "chosen": {"interval": 4, "load_all": 1},
        "why": {"latency": 3, "not_measured": 1, "pinned": 1},
        "judged": 3,
        "lost_s": 0.75,
    }


# ---------------------------------------------------------------- whatever an engine may send

HOSTILE = [
    decision("another"),
    decision(regret_s=math.nan),
    decision(regret_s=math.inf),
    decision(unix_s=-1.0),
    decision(plans=PLANS * 1000),
    decision(situation=dataclasses.replace(SITUATION, cached=(Run(TierKind.RAM, 0),) * 100_000)),
    decision(situation=dataclasses.replace(SITUATION, resident_blocks=-3)),
    decision(situation=dataclasses.replace(SITUATION, tier_queue_s={TierKind.RAM: math.nan})),
    decision(happened=dataclasses.replace(HAPPENED, ttft_s=-1.0)),
    decision(happened=dataclasses.replace(HAPPENED, loaded={TierKind.RAM: 1 << 60})),
]


@pytest.mark.parametrize("bad", HOSTILE, ids=range(len(HOSTILE)))
def test_a_decision_that_makes_no_sense_is_refused_before_anything_is_counted(bad: Any) -> None:
    with pytest.raises(ValueError):
        Decisions.check(report(decision=bad))


def test_a_tenant_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="tenant"):
        Decisions.check(report(tenant="t" * 201))


@pytest.mark.parametrize("request_id", ["", "x" * 201, "a\x1b[2Jb"])
def test_an_id_that_nobody_could_ask_for_is_counted_and_not_kept(request_id: str) -> None:
    """Reports were taken with any id before there were decisions."""
    assert len(kept(report(request_id, decision=None))) == 0


def test_words_that_are_no_words_are_left_out() -> None:
    miss = {"\x1b[2J": 1, "x" * 65: 2, "evicted": 3} | {f"reason_{i}": 1 for i in range(1000)}
    decisions = kept(report(plan="<script>", miss=miss))
    view = wire.decision_view(decisions.get(wire.DecisionGet("chatcmpl-1")).decisions[0])
    assert view.plan == "other" and view.miss["evicted"] == 3 and len(view.miss) < 32


def test_the_largest_record_that_is_taken_stays_small() -> None:
    runs = tuple(Run(TierKind(1 + i % 3), 1 << 20) for i in range(MAX_RUNS))
    blocks = sum(run.blocks for run in runs)
    plans = tuple(dataclasses.replace(PLANS[1], end=blocks) for _ in range(8))
    counts = dict.fromkeys(TierKind, 1 << 20)
    happened = Happened(1.5, 0.5, 0, blocks, counts, dict.fromkeys(TierKind, 1.5), 1.5, 9, 9, 9, blocks, 1.5)
    situation = Situation(1 << 32, 16, 1 << 30, 0, runs, 0.5, dict.fromkeys(TierKind, 0.5), True)
    name = "\U0001f642" * 200
    large = decision(
        name, situation=situation, plans=plans, chosen=plans[0], happened=happened, best_afterwards=plans[0]
    )
    miss = {f"{'x' * 60}_{i}": 1 << 31 for i in range(1000)}
    decisions = kept(report(name, tenant="\U0001f642" * 200, miss=miss, decision=large))
    (entry,) = decisions.list(wire.DecisionList()).decisions
    assert len(entry) < MAX_ENTRY_BYTES and wire.decision_view(entry).decision == large


def test_an_older_engines_report_is_read() -> None:
    """Tenant and decision came later."""
    fields: dict[str, Any] = msgspec.msgpack.decode(wire.encode(report()))
    del fields["tenant"], fields["decision"]
    assert wire.decode_request(msgspec.msgpack.encode(fields)) == report(decision=None)
