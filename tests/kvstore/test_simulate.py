"""`kvstore simulate` prints one line per way of using the cache, or JSON, and names what it cannot use."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstore.cli import app
from kvstore.core.errors import ConfigError
from policies.simulator.setting import STRATEGIES
from policies.trace import write_trace
from tests.support.traces import conversations


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_trace(path, conversations(5, num_sessions=15).requests)
    return path


def test_a_table_has_a_line_for_every_strategy(trace: Path) -> None:
    ran = CliRunner().invoke(app, ["simulate", str(trace), "--gpus", "2"])
    assert ran.exit_code == 0
    lines = ran.stdout.splitlines()
    assert lines[0].split()[:2] == ["strategy", "mean"]
    # By these names they can be asked for.
    assert [line.split()[0] for line in lines[1:]] == list(STRATEGIES)


def test_json_has_the_figures_and_what_they_follow_from(trace: Path) -> None:
    options = ["--strategy", "ours", "--strategy", "recompute", "--rate", "2", "--s3-latency", "40ms", "--json"]
    ran = CliRunner().invoke(app, ["simulate", str(trace), *options])
    answer = json.loads(ran.stdout)
    at_once = CliRunner().invoke(app, ["simulate", str(trace), "--strategy", "ours,recompute", *options[4:]])
    assert json.loads(at_once.stdout) == answer
    assert list(answer["strategies"]) == ["recompute", "ours"]
    figures = answer["strategies"]["ours"]
    assert 0 < figures["ttft_p50_s"] <= figures["ttft_p90_s"] <= figures["ttft_p99_s"]
    assert figures["computed_tokens"] < answer["strategies"]["recompute"]["computed_tokens"]
    assert answer["tiers"]["s3"] == {"latency_s": 0.04, "bytes_per_s": 1e9, "capacity_blocks": None}
    assert answer["tiers"]["ssd"]["capacity_blocks"] == 1_070_000_000_000 // (512 * 131_072)
    assert (answer["rate"], answer["block_tokens"], answer["engines"]) == (2.0, 512, 4)


def test_only_the_first_requests_are_simulated_if_so_asked(trace: Path) -> None:
    ran = CliRunner().invoke(app, ["simulate", str(trace), "--requests", "7", "--strategy", "load", "--json"])
    assert json.loads(ran.stdout)["requests"] == 7


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--strategy", "best"], "'best' is none of recompute"),
        (["--rate", "0"], "is not above 0"),
        (["--s3-bandwidth", "0"], "is not above 0"),
        (["--dram", "12X"], "is no size"),
        (["--gpus", "0"], "--gpus"),
    ],
)
def test_a_wrong_option_is_named(trace: Path, options: list[str], complaint: str) -> None:
    ran = CliRunner().invoke(app, ["simulate", str(trace), *options], env={"COLUMNS": "200"})
    assert ran.exit_code == 2
    assert complaint in ran.stderr


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--gpu", "B200"], "no profile of the GPU 'B200'"),
        (["--model", "Llama-3.1-70B", "--gpus", "3"], "3 are no multiple"),
        (["--block-tokens", "77"], r"trace\.jsonl:1: .* do not fit"),
    ],
)
def test_what_does_not_fit_together_is_a_wrong_configuration(trace: Path, options: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        CliRunner().invoke(app, ["simulate", str(trace), *options], catch_exceptions=False)
