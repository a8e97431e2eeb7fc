"""The benchmarks of the planner and the simulator run and print what they say."""

import os
import subprocess
import sys
from pathlib import Path

from policies.trace import write_trace
from tests.support.traces import conversations

ROOT = Path(__file__).parents[2]


def ran(script: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *options],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    return done.stdout


def test_twelve_settings_are_printed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, conversations(2, num_sessions=6).requests)
    lines = ran("simulations.py", str(path)).splitlines()
    assert len(lines) == 1 + 12 + 1
    assert lines[-1].startswith("worst: ")


def test_the_planner_is_timed_at_a_thousand_blocks() -> None:
    assert any(line.split()[:1] == ["1000"] for line in ran("planner.py").splitlines())
