"""The comparison with peers: what counts as falling short, and a tiny run with those that need no installation."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

_ROOT = Path(__file__).parents[2]
_PEERS = _ROOT / "benchmarks" / "peers"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/peers/table.py; its folder holds scripts and is no package."""
    monkeypatch.syspath_prepend(str(_PEERS))
    return importlib.import_module("table")


@pytest.mark.parametrize(
    ("ratio", "peers_share", "short"),
    [
        (1.3, 0.5, False),
        (1.29, 0.5, True),
        (1.29, None, True),
        (0.98, 0.9, False),
        (0.98, 0.89, True),
        (0.96, 0.99, True),
        (0.96, None, True),
    ],
)
def test_we_fall_short_where_we_are_not_clearly_faster_unless_the_peer_is_at_the_ceiling(
    table: ModuleType, ratio: float, peers_share: float | None, short: bool
) -> None:
    assert table.falls_short(ratio, peers_share) is short


def test_the_fastest_entry_of_a_peer_and_of_the_ceiling_counts(table: ModuleType) -> None:
    seconds = {
        "cold_read": {
            "ceiling, buffered": [2.0, 2.0, 9.0],
            "ceiling, direct": [1.0, 1.0, 9.0],
            "kvstore": [2.0, 2.0, 0.1],
            "fs": [5.0, 5.0, 0.1],
            "fs, direct": [4.0, 4.0, 9.0],
            "files": [1.05, 1.05, 9.0],
        }
    }
    (row,) = table.as_json(seconds, 10**9)
    assert row["best"]["ceiling"]["entry"] == "ceiling, direct"
    assert row["best"]["lmcache"]["entry"] == "fs, direct"
    assert row["ratios"] == {"lmcache": 2.0, "files": 0.525}
    assert row["short_of"] == ["files"]
    assert row["best"]["kvstore"]["figure"] == 0.5
    header, cells = table.lines([row])
    assert [len(line) for line in cells] == [len(header)]
    assert dict(zip(header, cells[0], strict=True))["kvstore/lmcache"] == "2.00"


def test_what_a_peer_cannot_do_is_left_empty(table: ModuleType) -> None:
    (row,) = table.as_json({"write": {"files": [1.0]}}, 10**9)
    assert row["ratios"] == {}
    assert row["short_of"] == []


@pytest.mark.parametrize("peer", ["lmcache", "redis"])
def test_every_requirement_of_a_peer_is_pinned(peer: str) -> None:
    lines = (_PEERS / f"requirements-{peer}.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    assert all(line.count("==") == 1 and " " not in line for line in pins)


def test_a_tiny_run_measures_all_sides_of_every_row(tmp_path: Path, shm_dir: Path) -> None:
    report = tmp_path / "peers.json"
    command = [sys.executable, str(_PEERS / "run.py"), "--only", "files", "--json", str(report)]
    command += ["--block-bytes", "65536", "--blocks", "4", "--rounds", "2", "--lookup-tokens", "2048"]
    ran = subprocess.run(
        [*command, "--dir", str(tmp_path / "runs"), "--shm-dir", str(shm_dir)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    measured = json.loads(report.read_text())
    assert measured["left_out"] == {}, ran.stderr
    rows = {row["op"]: row for row in measured["sizes"]["65536"]["rows"]}
    both = {"daemon_store", "daemon_fetch", "durable_write", "cold_read", "lookup"}
    assert {op for op, row in rows.items() if "files" in row["ratios"]} == both
    assert set(rows) == both | {"core_store", "core_fetch", "paged_store", "paged_fetch", "write", "ping"}
    for op in both - {"lookup"}:
        assert {"ceiling", "kvstore", "files"} <= set(rows[op]["best"])
        assert {one["runs"] for one in rows[op]["best"].values()} == {2}
    assert rows["lookup"]["best"]["files"]["runs"] == 40
    assert "store through the daemon" in ran.stdout
    assert list((tmp_path / "runs").iterdir()) == []
