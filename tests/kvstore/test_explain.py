"""`kvstore explain` tells a decision in words, bars and a table, and never more than fits."""

import dataclasses
import sys
from typing import Any

import msgspec
import pytest

from kvstore import cli
from kvstore.commands import explain as command
from kvstore.commands.decision_text import bars, explained, seconds
from kvstore.core.outcome import TierKind
from policies.decision import Decision, PlanKind, PlanSeconds, Run, Situation, Why
from tests.support.consoles import FakeClient
from tests.support.decisions import HAPPENED, PLANS, SITUATION, decision, decision_view


def rows(made: Decision) -> dict[str, str]:
    return {name: bar for name, bar, _ in bars(made)}


def happened(**changes: Any) -> Decision:
    return decision(happened=dataclasses.replace(HAPPENED, **changes))


def test_a_bar_has_a_sign_for_every_block_where_there_is_room() -> None:
    assert rows(decision()) == {"lay in": "HHHRRR3333..", "planned": "---<<<##<<##", "done": "---<<<###<##"}
    legends = [legend for _, _, legend in bars(decision())]
    assert legends[0] == "H hbm 3   R ram 3   3 s3 4   . nowhere 2"
    assert legends[2] == "- in HBM already 3   < loaded 4   # computed 5"


def test_a_bar_of_many_blocks_is_a_line_long_and_hides_none() -> None:
    runs = (Run(TierKind.RAM, 1), Run(TierKind.SSD, 100_000), Run(TierKind.S3, 1))
    situation = Situation(16 * 100_010, 16, 1000, 3, runs)
    chosen = PlanSeconds(PlanKind.INTERVAL, 50_000, 50_001, 1.0, 1.0)
    shown = rows(decision(situation=situation, plans=(), chosen=chosen, happened=None))
    assert set(shown) == {"lay in", "planned"}
    assert set(shown["lay in"]) == {"H", "R", "S", "3", "."} and set(shown["planned"]) == {"-", "<", "#"}
    assert len(shown["lay in"]) == len(shown["planned"]) < 90


def test_the_account_names_plans_choice_reason_course_and_regret() -> None:
    text = explained(decision_view())
    lines = [line for line in text.splitlines() if line.startswith("  compute a middle piece")]
    assert len(lines) == 1 and lines[0].endswith("<- chosen")
    assert text.count("<- chosen") == 1
    assert "Chosen: compute a middle piece while both ends load, since it has the least predicted time" in text
    assert "first token after 0.6 s, of which 0.01 s before the decision" in text
    assert "3 blocks came from ram in 0.05 s" in text and "1 block came from s3 in 0.4 s" in text
    assert "1 block not needed any more" in text
    assert "predicted 0.5 s from the decision on, really 0.59 s (+18%)" in text
    assert "regret: 0.08 s, 13% of the time" in text
    assert "GPU 0.1 s, s3 0.2 s" in text
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_what_came_late_or_failed_is_told() -> None:
    text = explained(decision_view(decision=happened(late=2, failed=3, abandoned=0)))
    assert "2 blocks came too late" in text and "3 blocks not there, or not valid" in text


def test_a_negative_regret_is_none() -> None:
    assert "regret: -0.06 s, -10% of the time: none" in explained(decision_view(decision=decision(regret_s=-0.06)))


def test_guesses_are_called_guesses() -> None:
    situation = dataclasses.replace(SITUATION, is_measured=False)
    text = explained(decision_view(decision=decision(situation=situation, why=Why.NOT_MEASURED)))
    assert "partly guessed" in text and "too little was measured yet to compare" in text


def test_a_plan_that_was_pinned_and_not_compared_is_listed_without_seconds() -> None:
    pinned = PlanSeconds(PlanKind.INTERVAL, 1, 2, 0.0, 0.0)
    text = explained(decision_view(decision=decision(chosen=pinned, why=Why.PINNED)))
    assert text.count("<- chosen") == 1 and "since the request asked for it" in text
    assert "predicted 0 s" not in text


def test_the_best_of_a_kind_that_is_none_is_left_out() -> None:
    cut = PlanSeconds(PlanKind.PREFIX_CUT, 7, 7, 0.9, 0.1)
    text = explained(decision_view(decision=decision(plans=(PLANS[0], cut), chosen=PLANS[0])))
    assert "load the front" not in text and text.count("<- chosen") == 1


def test_without_a_choice_there_is_no_table_and_no_regret() -> None:
    nothing = decision(
        situation=dataclasses.replace(SITUATION, cached=()),
        plans=(),
        chosen=PlanSeconds(PlanKind.NO_CHOICE, 0, 0, 0.0, 0.0),
        why=Why.NOTHING_CACHED,
        happened=dataclasses.replace(HAPPENED, start=0, end=0, loaded={}, abandoned=0, usable=0),
        regret_s=None,
        best_afterwards=None,
    )
    text = explained(decision_view(decision=nothing))
    assert "nothing to choose: no block of this prompt is cached" in text and "regret: none" in text
    assert "Plans" not in text


def test_an_engine_that_tells_no_decision_still_has_its_account() -> None:
    text = explained(decision_view(decision=None))
    assert "did not tell" in text and "from hbm 48, ram 48, s3 16; computed 88 tokens" in text


def test_no_control_character_of_an_engine_reaches_the_terminal() -> None:
    text = explained(decision_view("a\x1b[2J", model="\x1b]0;x\x07", tenant="\r\x1b[1A", decision=None))
    assert "\x1b" not in text and "\r" not in text and "\x07" not in text


def test_strange_records_are_shown_without_a_fault() -> None:
    strange = Situation(0, 0, 0, 5, (Run(TierKind.S3, 0), Run(TierKind.RAM, 4)))
    text = explained(decision_view(decision=decision(situation=strange, chosen=PLANS[3], happened=None)))
    assert "RRRR" in text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0 s"), (1234.5, "1230 s"), (0.01234, "0.0123 s"), (1e-7, "<0.0001 s")]
)
def test_seconds_have_three_digits(value: float, text: str) -> None:
    assert seconds(value) == text


# ---------------------------------------------------------------- the command


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    client = FakeClient()
    client.decisions = [decision_view("chatcmpl-1"), decision_view("cmpl-2", decision=None)]
    monkeypatch.setattr(command, "connect", lambda *_: client)
    return client


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvstore", "explain", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    return code if isinstance(code, int) else int(bool(code))


def test_one_request_is_explained(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "chatcmpl-1", "--tenant", "t") == 0
    assert capsys.readouterr().out == explained(client.decisions[0])
    assert client.calls == [("decision_get", "chatcmpl-1", "t")] and client.closed


def test_the_last_ones_are_a_table(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["request", "age", "tokens"]
    assert first.startswith("chatcmpl-1") and "3 hbm + 3 ram + 4 s3" in first and "interval" in first
    assert first.split()[-5:] == ["0.5", "0.59", "0.6", "0.08", "2"]
    assert second.startswith("cmpl-2")
    assert run(monkeypatch, "--limit", "1") == 0
    assert "1 of 2" in capsys.readouterr().err


def test_json_is_what_the_http_api_gives(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--json") == 0
    listed = msgspec.json.decode(capsys.readouterr().out)
    assert run(monkeypatch, "chatcmpl-1", "--json") == 0
    shown = msgspec.json.decode(capsys.readouterr().out)
    assert listed == {"decisions": [shown, listed["decisions"][1]], "total": 2}
    assert shown["decision"]["situation"]["cached"][0] == {"tier": "ram", "blocks": 3}


def test_an_unknown_request_ends_with_4_and_says_where_to_look(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "nobody") == 4
    error = capsys.readouterr().err
    assert "nothing is known of request 'nobody'" in error and "kvstore explain" in error
    assert "sessions" not in error


def test_where_nothing_is_known_it_says_why_that_may_be(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client.decisions = []
    assert run(monkeypatch) == 0
    out, err = capsys.readouterr()
    assert out == "" and "no request is known" in err and "pinned to 'recompute'" in err
    assert run(monkeypatch, "--tenant", "t") == 0
    assert "no request of tenant 't' is known" in capsys.readouterr().err
    assert run(monkeypatch, "--json") == 0
    assert msgspec.json.decode(capsys.readouterr().out) == {"decisions": [], "total": 0}
