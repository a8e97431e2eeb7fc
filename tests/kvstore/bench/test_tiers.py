"""`kvstore bench tiers` as a whole: its keys, its table, its command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.bench import report, tiers
from kvstore.bench.settings import PARTS, BenchSettings
from tests.support.bench import Rounds

KEYS = {
    "ram": ("store_ratio", "fetch_ratio", "paged_ratio"),
    "ssd": (
        "write_ratio",
        "read_ratio",
        "write_direct_ratio",
        "read_direct_ratio",
        "churn_ratio",
        "peak_bytes",
        "max_bytes",
    ),
    "s3": ("put_ratio", "get_ratio"),
    "lookup": ("p50_ms", "ping_p50_ms", "loaded_p99_ms"),
    "catalog": ("rss_mib", "recover_s"),
}


@pytest.mark.usefixtures("s3_server")
def test_the_report_has_every_key_where_the_docs_say(settings: BenchSettings, rounds: Rounds) -> None:
    measured = tiers.run(settings, rounds)
    for section, keys in KEYS.items():
        for key in keys:
            assert isinstance(measured[section][key], int | float), f"{section}.{key}"
    worst_ratio = min(figures["store_ratio"] for figures in measured["ram"]["sizes"].values())
    assert measured["ram"]["store_ratio"] == worst_ratio
    documented = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text()
    for section, keys in KEYS.items():
        for key in keys:
            assert f"`{section}.{key}`" in documented
    assert rounds.done == pytest.approx(rounds.promised)
    table = report.rows(measured)
    assert {len(row) for row in table} == {len(report.COLUMNS)}
    assert {row[0].split()[0] for row in table} == {"ram", "ssd", "s3", "lookup", "daemon", "catalog"}
    assert any("load average" in note for note in report.notes(measured))
    json.dumps(measured)


def test_the_command_prints_json_alone_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstore", "bench", "tiers", "--json", "--only", "ram", "--rounds", "1"]
    ran = subprocess.run(
        [*command, "--block-bytes", "64KiB", "--blocks", "2", "--ssd-dir", str(tmp_path / "here")],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    measured = json.loads(ran.stdout)
    assert measured["settings"]["sizes"] == {"64KiB": 2}
    assert set(measured) == {"machine", "settings", "ram"}
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("arguments", [["--only", "hbm"], ["--block-bytes", "2M"], ["--rounds", "0"]])
def test_the_command_refuses_what_makes_no_sense(arguments: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "kvstore", "bench", "tiers", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 2
    assert arguments[0] in ran.stderr


def test_every_part_can_be_named() -> None:
    assert set(KEYS) | {"daemon"} == set(PARTS)


def benched(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "from kvstore.cli import main; main()", "bench", "tiers", "--rounds", "1"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_a_machine_that_does_not_suffice_is_told_of_without_a_traceback(tmp_path: Path) -> None:
    """It ended with a traceback, or with the advice to start the daemon, which has nothing to do with it."""
    file = tmp_path / "file"
    file.touch()
    tries = (
        ("--only", "ssd", "--ssd-dir", str(file), "--blocks", "2", "--block-bytes", "64KiB"),
        ("--only", "ram", "--ssd-dir", str(tmp_path), "--blocks", "2", "--block-bytes", "100TiB"),
    )
    for arguments in tries:
        done = benched(*arguments)
        assert done.returncode == 1
        assert "the benchmark cannot go on" in done.stderr
        assert "Traceback" not in done.stderr
        assert "Is it running" not in done.stderr
    assert list(tmp_path.iterdir()) == [file]
