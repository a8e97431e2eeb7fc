"""The file of a recording: on a thread of its own, never larger than it may be, never in anybody's way."""

import stat
from pathlib import Path

import pytest

from kvstore.core.errors import ConfigError
from kvstore.record_file import RecordFile, check_record


def test_lines_are_there_when_it_is_closed_and_nobody_else_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    record = RecordFile(path)
    for number in range(100):
        record.write(b"%d\n" % number, number == 0)
    record.close()
    record.close()
    assert path.read_bytes() == b"".join(b"%d\n" % number for number in range(100))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_file_makes_way_for_the_next_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    record = RecordFile(path, max_file_bytes=10, num_files=3)
    begins = [True]
    record.on_full = lambda: begins.append(True)
    for number in range(12):
        record.write(b"line%d\n" % number, bool(begins and begins.pop()))
    record.close()
    files = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    assert set(files) == {"trace.jsonl", "trace.jsonl.1", "trace.jsonl.2"}
    assert files["trace.jsonl"] == b"line10\nline11\n"
    assert files["trace.jsonl.2"] == b"line6\nline7\n"


def test_a_recording_that_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"older\n")
    record = RecordFile(path)
    record.write(b"newer\n", True)
    record.close()
    assert path.read_bytes() == b"newer\n"
    assert (tmp_path / "trace.jsonl.1").read_bytes() == b"older\n"


def test_a_place_where_nothing_can_be_written_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose another file"):
        RecordFile(tmp_path / "nowhere" / "trace.jsonl")


def test_where_a_recording_could_be_is_asked_without_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    check_record(path)
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"older\n")
    check_record(path)
    assert path.read_bytes() == b"older\n"
    for bad in (tmp_path, tmp_path / "nowhere" / "trace.jsonl", path / "trace.jsonl"):
        with pytest.raises(ConfigError, match="choose another file"):
            check_record(bad)
