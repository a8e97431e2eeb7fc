"""`kvstore plan` compares the ways to the first token from figures alone, and names what it cannot use."""

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from kvstore.cli import app
from kvstore.core.errors import ConfigError
from kvstore.core.outcome import TierKind
from policies.cost import LoadCost
from policies.interval import Question, compare
from policies.profiles import machine
from policies.saved_profile import SavedProfile, save

H100 = ["--profile", "h100/llama-3.1-8b"]
SAVED = SavedProfile(
    "org/Small",
    "CPU, float32",
    "here",
    256,
    16,
    737_280,
    1.0,
    "calibrate",
    (0.05, 3e-3, 0.0, 0.0, 0.0),
    {"s3": (0.05, 6e-8)},
)


def planned(*options: str) -> dict[str, object]:
    ran = CliRunner().invoke(app, ["plan", *options, "--json"])
    assert ran.exit_code == 0, ran.output
    return dict(json.loads(ran.stdout))


def test_the_plans_are_those_of_the_planner() -> None:
    answer = planned("--tier", "ram:16000", "--tier", "s3:16000", "--new", "200", *H100)
    figures = machine("H100", "Llama-3.1-8B")
    tiers = [TierKind.RAM] * 1000 + [TierKind.S3] * 1000
    loads = {TierKind.RAM: LoadCost(1e-4, 1 / 50e9), TierKind.S3: LoadCost(0.1, 1e-9)}
    found = compare(Question(32_200, 16, 16 * 131_072, 0, tiers), figures.prefill, loads)
    assert answer["seconds"] == pytest.approx(found.best.seconds)
    assert answer["plans"]["two-ended"]["seconds"] == pytest.approx(found.two_ended.seconds)  # type: ignore[index]
    assert answer["chosen"] == "best interval"


def test_a_table_says_what_is_chosen_and_where_loading_begins_to_pay() -> None:
    ran = CliRunner().invoke(app, ["plan", "--prefix", "32000", "--new", "200", "--tier", "s3", *H100])
    assert ran.exit_code == 0
    lines = ran.stdout.splitlines()
    assert lines[0] == "h100/llama-3.1-8b: 32000 cached and 200 new tokens, 32000 in s3"
    plans = ["recompute all", "load all", "prefix cut", "two-ended", "best interval"]
    assert [line[:13].strip() for line in lines[2:7]] == plans
    assert lines[7].startswith("chosen: two-ended, 1.1")
    assert lines[8].startswith("loading all from s3 (100 ms and 954 MiB/s) is faster than computing from ")


def test_links_and_queues_can_be_given() -> None:
    slow = planned("--prefix", "3000", "--tier", "s3", *H100)
    fast = planned("--prefix", "3000", "--tier", "s3", "--latency", "s3:1ms", "--bandwidth", "s3:50GB", *H100)
    busy = planned("--prefix", "3000", "--tier", "s3", "--queue", "gpu:5s", *H100)
    assert slow["seconds"] > 2 * fast["plans"]["load all"]["seconds"]  # type: ignore[index, operator]
    assert busy["plans"]["recompute all"]["seconds"] > 5  # type: ignore[index]


def test_a_plan_that_computes_nothing_meanwhile_is_called_load_all() -> None:
    answer = planned("--prefix", "1000", "--tier", "s3", "--latency", "s3:1ms", "--bandwidth", "s3:50GB", *H100)
    assert answer["seconds"] == answer["plans"]["load all"]["seconds"]  # type: ignore[index]
    assert answer["chosen"] == "load all"


def test_where_loading_does_not_pay_it_says_up_to_which_prefix_it_looked() -> None:
    """H100s begin to gain at 182,624 tokens; with blocks of one token no more than 16,384 are looked at."""
    ran = CliRunner().invoke(app, ["plan", "--prefix", "320", "--tier", "s3", "--block-tokens", "1", *H100])
    assert ran.stdout.splitlines()[-1].endswith("faster than computing for no prefix of up to 16384 tokens")


def test_a_prefix_that_fills_no_block_is_said_to_be_computed() -> None:
    ran = CliRunner().invoke(app, ["plan", "--prefix", "10", "--tier", "ram", *H100])
    assert ran.stdout.splitlines()[1].startswith("no whole block of 16 tokens is cached")


def test_what_was_measured_here_is_found_by_part_of_its_name_or_as_the_newest(tmp_path: Path) -> None:
    path = save(tmp_path, SAVED)
    for name in ([], ["--profile", "small"], ["--profile", str(path)]):
        answer = planned("--prefix", "1600", "--tier", "s3", "--new", "16", "--profile-dir", str(tmp_path), *name)
        assert answer["profile"] == "org/Small on CPU, float32"
        assert answer["block_bytes"] == 737_280
        load_all = answer["plans"]["load all"]  # type: ignore[index]
        assert load_all["seconds"] == pytest.approx(0.05 + 100 * 737_280 * 6e-8 + 0.05 + 16 * 3e-3)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--tier", "tape", "--prefix", "9"], "ram, ssd, s3"),
        (["--tier", "ram:x"], "no number"),
        (["--tier", "ram"], "ram:16000"),
        (["--tier", "ram", "--tier", "s3", "--prefix", "9"], "ram:16000"),
        (["--tier", "ram:10", "--prefix", "9"], "sum"),
        (["--tier", "s3:99", "--queue", "disk:1s"], "gpu"),
        (["--tier", "s3:99", "--latency", "s3:soon"], "soon"),
        (["--tier", "s3:99", "--latency", "ram:1ms"], "nothing lies in ram"),
        (["--tier", "s3:99", "--bandwidth", "ssd:1GB"], "nothing lies in ssd"),
        (["--tier", "s3:99", "--queue", "ssd:1s"], "nothing lies in ssd"),
        (["--tier", "s3:99", "--bandwidth", "s3:0B"], "above 0"),
    ],
)
def test_what_makes_no_plan_is_refused_by_name(options: list[str], named: str) -> None:
    ran = CliRunner().invoke(app, ["plan", *options, *H100])
    assert ran.exit_code == 2
    assert named in ran.output


def test_a_tier_that_was_not_measured_and_a_profile_that_is_not_there_say_what_to_do(tmp_path: Path) -> None:
    save(tmp_path, SAVED)
    here = ["--prefix", "160", "--profile-dir", str(tmp_path)]
    ran = CliRunner().invoke(app, ["plan", "--tier", "ssd", *here])
    assert ran.exit_code == 2
    assert "kvstore calibrate" in ran.output
    ran = CliRunner().invoke(app, ["plan", "--tier", "s3", "--profile", "large", *here])
    assert isinstance(ran.exception, ConfigError)
    assert "Small" in str(ran.exception) and "H100" in str(ran.exception)
    ran = CliRunner().invoke(app, ["plan", "--tier", "s3", "--profile", f"{tmp_path}/not-here.json", *here])
    assert str(ran.exception) == f"no profile {tmp_path}/not-here.json: there is no such file"
    save(tmp_path, msgspec.structs.replace(SAVED, step=None))
    assert isinstance(CliRunner().invoke(app, ["plan", "--tier", "s3", *here]).exception, ConfigError)


def test_who_names_a_gpu_and_a_model_needs_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without one, as in some containers, got a traceback."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert planned("--tier", "ram:16000", *H100)["chosen"]
    ran = CliRunner().invoke(app, ["plan", "--tier", "ram:16000"])
    assert isinstance(ran.exception, ConfigError) and "--profile-dir" in str(ran.exception)
