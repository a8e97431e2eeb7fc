"""`kvstore replay` on a trace that is made here."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore import cli
from policies.trace import TraceRequest, write_trace

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """8 blocks of 512 tokens; the third request is the first one again."""
    path = tmp_path / "trace.jsonl"
    prompts = [(0, 1, 2, 3), (0, 4, 5, 6, 7), (0, 1, 2, 3)]
    write_trace(path, [TraceRequest(float(i), 512 * len(ids), 10, ids) for i, ids in enumerate(prompts)])
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvstore", "replay", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return ended.value.code if isinstance(ended.value.code, int) else 0, out, err

    return run


def test_one_policy_at_one_capacity_is_one_json_object(run: Run, trace: Path) -> None:
    code, out, _ = run(str(trace), "--capacity-fraction", "1", "--policy", "lru", "--block-tokens", "512", "--json")
    assert code == 0
    printed = json.loads(out)
    assert printed["token_hit_ratio"] == printed["infinite_token_hit_ratio"] == (1 + 4) / 13
    assert (printed["policy"], printed["capacity_blocks"], printed["unique_blocks"]) == ("lru", 8, 8)
    assert (printed["input_tokens"], printed["hit_tokens"]) == (13 * 512, 5 * 512)


def test_all_policies_at_several_capacities_are_a_list(run: Run, trace: Path) -> None:
    code, out, _ = run(str(trace), "--capacity-blocks", "5", "--capacity-fraction", "0.5", "--json")
    assert code == 0
    rows: list[dict[str, Any]] = json.loads(out)
    assert {row["capacity_blocks"] for row in rows} == {4, 5}
    assert {"lru", "fifo", "lfu", "s3fifo", "arc", "belady"} <= {row["policy"] for row in rows}


def test_a_share_of_the_blocks_is_rounded_down_exactly(run: Run, tmp_path: Path) -> None:
    """0.29 · 100 is 28.999… in binary fractions."""
    path = tmp_path / "hundred.jsonl"
    write_trace(path, [TraceRequest(0.0, 51_200, 1, tuple(range(100)))])
    code, out, _ = run(str(path), "--capacity-fraction", "0.29", "--policy", "lru", "--json")
    assert code == 0
    assert json.loads(out)["capacity_blocks"] == 29


def test_a_capacity_in_bytes_is_as_many_blocks_as_fit(run: Run, trace: Path) -> None:
    code, out, _ = run(str(trace), "--capacity-bytes", "11MiB", "--block-bytes", "2MiB", "--policy", "lru", "--json")
    assert code == 0
    assert json.loads(out)["capacity_blocks"] == 5


def test_without_json_it_prints_a_table(run: Run, trace: Path) -> None:
    code, out, _ = run(str(trace), "--capacity-fraction", "1", "--policy", "lru,belady")
    assert code == 0
    assert [line.split()[:4] for line in out.splitlines()[1:]] == [
        ["lru", "8", "100.0%", "38.5%"],
        ["belady", "8", "100.0%", "38.5%"],
    ]


def test_several_policies_are_named_in_one_option_or_in_several(run: Run, trace: Path) -> None:
    for options in (["--policy", "lru,arc"], ["--policy", "lru", "--policy", "arc"]):
        code, out, _ = run(str(trace), "--capacity-blocks", "5", "--json", *options)
        assert code == 0
        assert [row["policy"] for row in json.loads(out)] == ["lru", "arc"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--policy", "mru"], "'mru' is not"),
        (["--policy", ","], "is not 'all'"),
        (["--capacity-fraction", "1.5"], "not a share between 0 and 1"),
        (["--capacity-fraction", "a"], "not a share between 0 and 1"),
        (["--capacity-fraction", "1/0"], "not a share between 0 and 1"),
        (["--capacity-blocks", "-1"], "at least 0"),
        (["--capacity-bytes", "1GiB"], "bytes of a block"),
        (["--capacity-bytes", "1GiB", "--block-bytes", "0"], "bytes of a block"),
        (["--capacity-bytes", "1G", "--block-bytes", "1MiB"], "no size"),
        (["--block-tokens", "100"], "do not fit blocks of 100 tokens"),
        (["--target", "0.5"], "goes with --size only"),
        (["--model", "Llama-3.1-8B"], "goes with --size only"),
        (["--admission", "learned"], "needs --ssd-blocks"),
        (["--ssd-policy", "lru"], "needs --ssd-blocks"),
        (["--plot", "plot.svg"], "should end in .png"),
        (["--plot", "/nowhere/at/all/plot.png"], "there is no folder"),
    ],
)
def test_what_cannot_be_meant_is_refused(run: Run, trace: Path, arguments: list[str], complaint: str) -> None:
    code, out, err = run(str(trace), *arguments)
    assert (code, out) == (2, "")
    assert complaint in " ".join(err.replace("│", " ").split())


def test_a_trace_that_is_not_there_is_refused(run: Run, tmp_path: Path) -> None:
    code, out, err = run(str(tmp_path / "none.jsonl"))
    assert (code, out) == (2, "")
    assert "none.jsonl" in err


@pytest.mark.leaks  # matplotlib keeps its fonts open
def test_a_plot_is_a_png_file(run: Run, trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    code, out, _ = run(str(trace), "--policy", "lru,belady", "--plot", str(path))
    assert code == 0
    assert f"the plot is {path}" in out
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_plot_is_refused_before_any_work(
    run: Run, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
    )
    code, out, err = run(str(trace), "--plot", str(tmp_path / "plot.png"))
    assert (code, out) == (2, "")
    assert "pip install 'tiered-kvstore[plot]'" in err


@pytest.mark.parametrize(("hints", "hit_blocks"), [("none", 1 + 1), ("returns", 1 + 4)])
def test_a_hint_that_a_session_returns_keeps_it(run: Run, trace: Path, hints: str, hit_blocks: int) -> None:
    code, out, _ = run(str(trace), "--capacity-blocks", "5", "--policy", "lru", "--hints", hints, "--json")
    assert code == 0
    assert json.loads(out)["hit_tokens"] == 512 * hit_blocks


def test_prompts_in_pieces_are_replayed_under_all_policies_that_do_not_know_the_future(run: Run, trace: Path) -> None:
    code, out, _ = run(str(trace), "--capacity-blocks", "8", "--piece-blocks", "2", "--concurrent", "2", "--json")
    assert code == 0
    rows = json.loads(out)
    assert "belady" not in {row["policy"] for row in rows} and len(rows) == 6
    assert {row["hit_tokens"] for row in rows} == {512 * (1 + 4)}
    code, _, err = run(str(trace), "--piece-blocks", "2", "--policy", "belady")
    assert code == 2
    assert "--piece-blocks" in err


def test_unknown_hints_are_refused(run: Run, trace: Path) -> None:
    code, _, err = run(str(trace), "--hints", "all")
    assert code == 2
    assert "'all' is neither 'none' nor 'returns'" in err


def test_ram_and_ssd_together_say_what_is_written_for_which_hits(run: Run, trace: Path) -> None:
    code, out, _ = run(str(trace), "--ram-blocks", "2", "--ssd-blocks", "8", "--admission", "second_touch", "--json")
    assert code == 0
    row = json.loads(out)
    assert (row["policy"], row["ssd_policy"]) == ("gittins", "lru"), "as the daemon without any settings"
    assert (row["admission"], row["unique_blocks"]) == ("second_touch", 8)
    # The second prompt shares one block with the first, the third is the first.
    assert (row["hit_tokens"], row["ssd_writes"], row["ssd_write_ratio"]) == (512 + 512, 4, 0.5)
    code, out, _ = run(str(trace), "--ssd-blocks", "8", "--policy", "lru,arc", "--json")
    assert [(row["policy"], row["admission"]) for row in json.loads(out)] == [
        (policy, admission) for policy in ("lru", "arc") for admission in ("always", "second_touch", "learned")
    ]
    code, out, _ = run(str(trace), "--ssd-blocks", "8", "--ssd-policy", "lru,arc", "--admission", "always", "--json")
    assert [(row["policy"], row["ssd_policy"]) for row in json.loads(out)] == [("gittins", "lru"), ("gittins", "arc")]
    code, out, _ = run(str(trace), "--ssd-blocks", "8", "--admission", "always", "--admission", "learned", "--json")
    assert [row["admission"] for row in json.loads(out)] == ["always", "learned"]
    code, out, _ = run(str(trace), "--ssd-blocks", "8")
    assert code == 0 and "second_touch" in out
    code, _, error = run(str(trace), "--ssd-blocks", "8", "--admission", "sometimes")
    assert code != 0 and "learned" in error
    code, _, error = run(str(trace), "--ssd-blocks", "8", "--capacity-blocks", "3")
    assert code != 0 and "--ssd-blocks" in error


def test_size_finds_how_much_ram_and_ssd_a_trace_needs(run: Run, trace: Path) -> None:
    """The 5 blocks that hit need room for all 8 under LRU; 40% of them, two, need room for one."""
    code, out, _ = run(
        str(trace),
        "--size",
        "--policy",
        "lru",
        "--target",
        "1",
        "--ram-share",
        "0.4",
        "--model",
        "llama-3.1-8b",
        "--json",
    )
    assert code == 0
    printed = json.loads(out)
    assert (printed["ssd_blocks"], printed["ram_blocks"]) == (8, 1)
    assert printed["token_hit_ratio"] == printed["infinite_token_hit_ratio"]
    assert printed["block_bytes"] == 512 * 128 * 1024
    assert printed["ssd_bytes"] == 8 * printed["block_bytes"]


def test_size_without_a_model_counts_blocks(run: Run, trace: Path) -> None:
    code, out, _ = run(str(trace), "--size")
    assert code == 0
    assert "SSD behind it" in out and "GiB" not in out
    assert out.startswith("90% of what an infinite cache hits, with gittins:")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--size", "--model", "gpt"), "'gpt' is none of Llama"),
        (("--size", "--policy", "belady"), "goes with one of lru"),
        (("--size", "--ram-blocks", "4"), "goes with --policy, --target"),
        (("--size", "--capacity-blocks", "4"), "goes with --policy, --target"),
    ],
)
def test_size_refuses_what_it_cannot_answer(run: Run, trace: Path, arguments: tuple[str, ...], complaint: str) -> None:
    code, _, err = run(str(trace), *arguments)
    assert code == 2
    assert complaint in " ".join(err.replace("│", " ").split())
