"""A recorded load is a trace that the replay reads, and names nobody."""

import json
from pathlib import Path

import msgspec
import pytest

from kvstore import wire
from kvstore.core.key import join_keys
from kvstore.store.recording import Recording
from policies.replay import accesses_of
from policies.trace import read_trace
from tests.support.chats import BLOCK_TOKENS, Prefix, namespace
from tests.support.clock import Clock

NAMESPACE = namespace()


class Load:
    def __init__(self) -> None:
        self.clock = Clock()
        self.lines: list[tuple[bytes, bool]] = []
        self.recording = Recording(lambda line, begins: self.lines.append((line, begins)), self.clock)

    def ask(self, prefix: Prefix, owner: int = 1) -> None:
        self.clock.now += 1.0
        self.recording.asked(owner, BLOCK_TOKENS, join_keys(prefix.keys))

    def report(self, prefix: Prefix, owner: int = 1, output_tokens: int = 7, more_tokens: int = 1) -> None:
        tokens = prefix.num_blocks * BLOCK_TOKENS + more_tokens
        report = wire.Report("r", tokens, 0, 0, 0, 0, tokens, {}, "prefill", 0.1)
        self.recording.reported(owner, _with(report, output_tokens, prefix.keys[-1]))

    @property
    def parsed(self) -> list[dict[str, object]]:
        return [json.loads(line) for line, _ in self.lines]


def _with(report: wire.Report, output_tokens: int, last_block: bytes) -> wire.Report:
    return msgspec.structs.replace(report, output_tokens=output_tokens, last_block=last_block)


def test_requests_are_lines_with_lengths_times_and_numbers(tmp_path: Path) -> None:
    load = Load()
    first, again = Prefix(NAMESPACE, 1, 3), Prefix(NAMESPACE, 1, 4)
    load.ask(first)
    load.report(first)
    load.ask(again)
    load.report(again)
    assert load.parsed == [
        {"timestamp": 0, "input_length": 13, "output_length": 7, "hash_ids": [0, 1, 2, 3]},
        {"timestamp": 1000, "input_length": 17, "output_length": 7, "hash_ids": [0, 1, 2, 4, 5]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(line for line, _ in load.lines))
    read = accesses_of(read_trace(path))
    assert read.block_tokens == BLOCK_TOKENS and read.num_blocks == 6


def test_nothing_of_a_key_is_in_a_line() -> None:
    load = Load()
    prefix = Prefix(NAMESPACE, 1, 3)
    load.ask(prefix)
    load.report(prefix)
    (line, _) = load.lines[0]
    numbers = json.loads(line)["hash_ids"]
    assert max(numbers) < 10
    assert not any(
        key.hex().encode() in line or str(int.from_bytes(key[:8], "little")).encode() in line for key in prefix.keys
    )


def test_lines_keep_the_order_of_the_questions_whoever_is_ready_first() -> None:
    load = Load()
    slow, fast = Prefix(NAMESPACE, 1, 2), Prefix(NAMESPACE, 2, 2)
    load.ask(slow)
    load.ask(fast)
    load.report(fast)
    assert not load.lines
    load.report(slow)
    assert [line["timestamp"] for line in load.parsed] == [0, 1000]


def test_a_question_that_nobody_reports_holds_the_others_up_for_a_while_only() -> None:
    load = Load()
    load.ask(Prefix(NAMESPACE, 1, 2))
    done = Prefix(NAMESPACE, 2, 2)
    load.ask(done)
    load.report(done)
    assert not load.lines
    load.clock.now += 200.0
    load.ask(Prefix(NAMESPACE, 3, 2))
    assert len(load.lines) == 1
    load.recording.close()
    assert len(load.lines) == 1


def test_what_was_reported_is_written_at_the_end() -> None:
    load = Load()
    load.ask(Prefix(NAMESPACE, 1, 2))
    done = Prefix(NAMESPACE, 2, 2)
    load.ask(done)
    load.report(done)
    load.recording.close()
    assert len(load.lines) == 1


def test_reports_of_others_and_of_unknown_requests_are_passed_over() -> None:
    load = Load()
    prefix = Prefix(NAMESPACE, 1, 2)
    load.report(prefix)
    load.ask(prefix)
    load.report(prefix, owner=2)
    load.report(prefix, more_tokens=50)
    load.recording.close()
    assert not load.lines


def test_another_file_numbers_and_times_anew() -> None:
    load = Load()
    for seed in range(3):
        prefix = Prefix(NAMESPACE, seed, 2)
        load.ask(prefix)
        load.report(prefix)
        if seed == 1:
            load.recording.file_is_full()
    assert [begins for _, begins in load.lines] == [True, False, True]
    assert load.parsed[2]["timestamp"] == 0 and load.parsed[2]["hash_ids"] == [0, 1, 2]


@pytest.mark.parametrize("num_open", [5000])
def test_open_questions_are_bounded(num_open: int) -> None:
    load = Load()
    for seed in range(num_open):
        load.clock.now += 0.001
        load.recording.asked(1, BLOCK_TOKENS, seed.to_bytes(32, "little"))
    assert len(load.recording._open) <= 4096 + 1
    assert len(load.recording._by_end) <= 4096 + 1
