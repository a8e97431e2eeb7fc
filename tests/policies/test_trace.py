"""A trace is read as it stands, the size of its blocks is found, and what is wrong is named with its line."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.errors import ConfigError
from policies.trace import Trace, TraceRequest, read_trace, write_trace

GOOD = {"timestamp": 1500, "input_length": 1025, "output_length": 7, "hash_ids": [4, 5, 9]}


def written(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_every_field_of_a_request_is_read(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, GOOD, "", GOOD | {"timestamp": 1500.5, "extra": 1}))
    assert trace.requests[0] == TraceRequest(1.5, 1025, 7, (4, 5, 9))
    assert trace.requests[1].arrival_s == 1.5005
    assert trace.block_tokens == 512


def test_only_as_many_requests_are_read_as_asked_for(tmp_path: Path) -> None:
    assert len(read_trace(written(tmp_path, GOOD, GOOD, "not JSON"), max_requests=2).requests) == 2


@pytest.mark.parametrize(
    ("prompts", "block_tokens"),
    [
        ([(1024, 2), (1025, 3)], 512),
        ([(10, 1)], 512),
        ([(33, 3), (16, 1)], 16),
        ([(6000, 3)], 2048),
        ([(301, 4), (300, 3)], 100),
    ],
)
def test_the_size_of_a_block_follows_from_the_lengths(
    tmp_path: Path, prompts: list[tuple[int, int]], block_tokens: int
) -> None:
    lines = [GOOD | {"input_length": tokens, "hash_ids": list(range(blocks))} for tokens, blocks in prompts]
    assert read_trace(written(tmp_path, *lines)).block_tokens == block_tokens


def test_a_given_size_of_a_block_is_checked(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    assert read_trace(path, block_tokens=400).block_tokens == 400
    with pytest.raises(ConfigError, match=r"trace\.jsonl:1: 3 hash_ids for 1025 tokens do not fit .* 600 tokens"):
        read_trace(path, block_tokens=600)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "truncated"),
        ("[1]", "object"),
        ({"timestamp": 1500}, "input_length"),
        (GOOD | {"input_length": "1025"}, "input_length"),
        (GOOD | {"hash_ids": [1, 2, 2.5]}, "hash_ids"),
        (GOOD | {"hash_ids": [1, 2, 1]}, "twice"),
        (GOOD | {"hash_ids": []}, "empty"),
        (GOOD | {"input_length": 0}, "between 1 and"),
        (GOOD | {"output_length": -1}, "between 0 and"),
        (GOOD | {"timestamp": -1}, "start of the trace"),
        (GOOD | {"timestamp": 1400}, "goes back"),
        (GOOD | {"hash_ids": [1]}, "do not fit blocks of"),
        (GOOD | {"hash_ids": [1, 2, 3, 4, 5, 6, 7]}, "do not fit blocks of"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, line: object, complaint: str) -> None:
    path = written(tmp_path, GOOD, GOOD | {"input_length": 1024, "hash_ids": [0, 1]}, line)
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:3: ")


def test_a_trace_without_requests_or_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(written(tmp_path, "", ""))
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "missing")


@settings(max_examples=50)
@given(
    st.integers(1, 2000), st.lists(st.tuples(st.integers(1, 50_000), st.integers(0, 10_000)), min_size=1, max_size=9)
)
def test_what_was_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, block_tokens: int, prompts: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    gaps_ms = [arrival for _, arrival in prompts]
    requests = [
        TraceRequest(sum(gaps_ms[:i]) / 1e3, tokens, i, tuple(range(-(-tokens // block_tokens))))
        for i, (tokens, _) in enumerate(prompts)
    ]
    write_trace(path, requests)
    assert read_trace(path, block_tokens=block_tokens) == Trace(tuple(requests), block_tokens)
