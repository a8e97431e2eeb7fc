"""The record of a decision names plans as people do, stays small, and is refused where it makes no sense."""

import dataclasses
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.outcome import TierKind
from policies.decision import (
    MAX_PLANS,
    MAX_RUNS,
    Decision,
    Happened,
    PlanKind,
    PlanSeconds,
    Run,
    Situation,
    Why,
    check,
    kind_of,
    runs_of,
)

PLAN = PlanSeconds(PlanKind.INTERVAL, 2, 5, 0.5, 0.25)
HAPPENED = Happened(0.6, 0.01, 2, 5, {TierKind.RAM: 3, TierKind.S3: 1}, {TierKind.RAM: 0.01}, 0.4, 1, 1, 1, 7, 2.0)
SITUATION = Situation(200, 16, 1000, 3, (Run(TierKind.RAM, 3), Run(TierKind.S3, 4)), 0.1, {TierKind.S3: 0.2}, True)
DECISION = Decision("chatcmpl-1", 1.7e9, SITUATION, (PLAN,), PLAN, Why.LATENCY, HAPPENED, -0.01, PLAN)


def test_every_interval_has_the_name_of_its_plan() -> None:
    names = {(s, e): kind_of(s, e, 3) for s in range(4) for e in range(s, 4)}
    assert {at for at, kind in names.items() if kind is PlanKind.LOAD_ALL} == {(i, i) for i in range(4)}
    assert names[0, 3] is PlanKind.RECOMPUTE_ALL
    assert names[1, 3] is names[2, 3] is PlanKind.PREFIX_CUT
    assert names[0, 1] is names[0, 2] is PlanKind.TWO_ENDED
    assert names[1, 2] is PlanKind.INTERVAL
    assert kind_of(0, 0, 0) is PlanKind.NO_CHOICE


@given(st.lists(st.sampled_from(TierKind), max_size=300))
def test_runs_are_few_and_count_every_block_where_it_lies(tiers: list[TierKind]) -> None:
    runs = runs_of(tiers)
    assert len(runs) <= MAX_RUNS
    for tier in TierKind:
        assert sum(run.blocks for run in runs if run.tier is tier) == tiers.count(tier)
    if len(runs) < MAX_RUNS - len(TierKind):
        assert [run.tier for run in runs for _ in range(run.blocks)] == tiers


def test_a_record_passes_its_check_and_comes_through_msgpack_as_it_was() -> None:
    check(DECISION)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(DECISION), type=Decision) == DECISION


def changed(**changes: Any) -> Decision:
    return dataclasses.replace(DECISION, **changes)


def situation(**changes: Any) -> Decision:
    return changed(situation=dataclasses.replace(SITUATION, **changes))


def happened(**changes: Any) -> Decision:
    return changed(happened=dataclasses.replace(HAPPENED, **changes))


BAD = [
    changed(request_id=""),
    changed(request_id="x" * 201),
    changed(request_id="a\x1b[2J"),
    changed(unix_s=math.nan),
    changed(unix_s=-1.0),
    changed(plans=(PLAN,) * (MAX_PLANS + 1)),
    changed(plans=(dataclasses.replace(PLAN, start=6),)),
    changed(chosen=dataclasses.replace(PLAN, end=8)),
    changed(chosen=dataclasses.replace(PLAN, start=-1)),
    changed(chosen=dataclasses.replace(PLAN, seconds=math.inf)),
    changed(best_afterwards=dataclasses.replace(PLAN, gpu_s=-1.0)),
    changed(regret_s=math.nan),
    changed(regret_s=-math.inf),
    situation(cached=(Run(TierKind.RAM, 1),) * (MAX_RUNS + 1)),
    situation(cached=(Run(TierKind.RAM, -1), Run(TierKind.RAM, 8))),
    situation(prompt_tokens=159),
    situation(prompt_tokens=1 << 40),
    situation(block_tokens=-16),
    situation(gpu_queue_s=math.nan),
    situation(tier_queue_s={TierKind.S3: -0.1}),
    happened(ttft_s=math.nan),
    happened(ttft_s=-1.0),
    happened(waited_s=1e7),
    happened(late=8),
    happened(failed=-1),
    happened(usable=8),
    happened(loaded={TierKind.RAM: 4, TierKind.S3: 4}),
    happened(load_s={TierKind.RAM: math.inf}),
    happened(start=6),
    happened(saved_prefill_s=-0.5),
]


@pytest.mark.parametrize("decision", BAD, ids=range(len(BAD)))
def test_a_record_that_makes_no_sense_is_refused(decision: Decision) -> None:
    with pytest.raises(ValueError):
        check(decision)
