"""The made-up loads are what they promise to be, and the comparison on them counts what it says."""

import json
import subprocess
import sys
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.eviction import Result, result_of, summary
from benchmarks.made_up_loads import CHATS_AND_AGENTS, TEMPLATES, in_whole_blocks
from policies.eviction.choice import make
from policies.replay import accesses_of, replay
from policies.trace import Trace

_ROOT = Path(__file__).parents[2]
KINDS = CHATS_AND_AGENTS | TEMPLATES


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_is_a_trace_in_which_every_block_has_one_prefix(kind: str) -> None:
    trace = KINDS[kind](np.random.default_rng(4))
    assert len(trace.requests) > 1000
    assert all(one.arrival_s <= later.arrival_s for one, later in pairwise(trace.requests))
    fills: dict[int, int] = {}
    for request in trace.requests:
        assert len(set(request.hash_ids)) == len(request.hash_ids)
        fill = request.prompt_tokens - trace.block_tokens * (len(request.hash_ids) - 1)
        assert 0 < fill < trace.block_tokens
        assert fills.setdefault(request.hash_ids[-1], fill) == fill
    # A number after two different prefixes would be two blocks.
    assert accesses_of(trace).num_blocks == len({name for request in trace.requests for name in request.hash_ids})


def test_in_whole_blocks_the_last_block_of_a_prompt_is_one_that_the_next_turn_brings_again() -> None:
    load = KINDS["chats with documents"](np.random.default_rng(4))
    whole = in_whole_blocks(load)
    assert all(request.prompt_tokens == 512 * len(request.hash_ids) > 0 for request in whole.requests)

    def returning(trace: Trace) -> int:
        """How many last blocks there are in another, longer prompt."""
        inner = {block for request in trace.requests for block in request.hash_ids[:-1]}
        return sum(request.hash_ids[-1] in inner for request in trace.requests)

    assert returning(load) == 0
    assert returning(whole) > 0.3 * len(whole.requests)


def test_a_seed_makes_one_load_and_another_seed_another() -> None:
    chats = KINDS["chats"]
    assert chats(np.random.default_rng(1)) == chats(np.random.default_rng(1))
    assert chats(np.random.default_rng(1)) != chats(np.random.default_rng(2))


def test_each_figure_is_against_the_best_of_the_three_at_that_capacity() -> None:
    kind, seed = "people who come back", 3
    accesses = accesses_of(KINDS[kind](np.random.default_rng([seed, zlib.crc32(kind.encode())])))

    def hits(name: str, share: float) -> float:
        capacity = int(share * accesses.num_blocks)
        return 100 * replay(accesses, capacity, lambda tier, _: make(name, tier, tier.clock)).token_hit_ratio

    found = result_of(kind, seed)
    assert result_of(kind, seed, whole_blocks=True).num_blocks < found.num_blocks
    for at, share in enumerate((0.01, 0.03, 0.1)):
        assert found.best[at] == max(hits(name, share) for name in ("lru", "s3fifo", "arc"))
        assert found.best[at] + found.ahead[at] == pytest.approx(hits("gittins", share))
    assert (found.num_requests, found.num_blocks) == (len(accesses.prompt_tokens), accesses.num_blocks)


def test_the_summary_counts_what_is_more_than_three_tenths_behind() -> None:
    one = Result("chats", 1, 10, 10, (1.0, 1.0, 1.0), (-0.31, -0.3, 0.91))
    others = [one, replace(one, kind="templates", ahead=(-9.0, 0.0, 0.0))]
    assert summary(others, CHATS_AND_AGENTS) == pytest.approx({"figures": 3, "short": 1, "worst": -0.31, "mean": 0.1})
    assert summary(others, TEMPLATES)["worst"] == -9.0
    assert summary([one], TEMPLATES) == {}


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.eviction", *options]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=280, check=False)


def test_it_prints_a_line_a_load_and_what_holds_of_all() -> None:
    options = ("--kinds", "people who come back", "--seeds", "1,2")
    lines = run(*options).stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[:2]] == ["people who come back"] * 2
    assert lines[2].startswith("chats and agents: 6 figures, ")
    report = json.loads(run(*options, "--json").stdout)
    assert [(load["kind"], load["seed"]) for load in report["loads"]] == [
        ("people who come back", 1),
        ("people who come back", 2),
    ]
    assert report["all"]["templates"] == {}
    (whole,) = json.loads(run("--kinds", "people who come back", "--whole-blocks", "--json").stdout)["loads"]
    assert whole["num_blocks"] < report["loads"][0]["num_blocks"]
    figures = [points for load in report["loads"] for points in load["ahead"]]
    assert report["all"]["chats and agents"]["worst"] == min(figures)


def test_a_load_that_is_not_there_is_named() -> None:
    done = run("--kinds", "chatss")
    assert done.returncode == 2
    assert "there is no load 'chatss'; the nearest is 'chats'" in done.stderr


def test_what_is_no_seed_is_refused_in_words() -> None:
    done = run("--seeds", "1,x")
    assert done.returncode == 2
    assert "'1,x' are no whole numbers" in done.stderr
