"""The comparison of whole and layered copies on a tiny model: it is about the answers, not about the seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.tiny import llama, write_folder

_ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_both_ways_load_everything_from_ram_and_answer_the_same(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "tiny", llama())
    sizes = ["--tokens", "128", "--new", "9", "--rounds", "2", "--hbm-bytes", "16MiB", "--ram-size", "16MiB"]
    done = subprocess.run(
        [sys.executable, "benchmarks/layer_overlap.py", "--model", model, *sizes],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert 0 < report["off"]["min_s"] <= report["off"]["median_s"] and report["on"]["median_s"] > 0
    assert report["settings"]["tokens"] == 128
