"""The measurement of what quantised KV costs, on a tiny model: it is about the table, not about what stands in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.tiny import llama, write_folder

_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny", llama())


def test_every_way_of_storing_has_a_row_and_the_exact_one_loses_nothing(model: Path, tmp_path: Path) -> None:
    sizes = ["--passages", "2", "--prefix-tokens", "64", "--scored-tokens", "16", "--greedy-tokens", "4"]
    done = subprocess.run(
        [sys.executable, "benchmarks/kv_quality.py", "--model", model, "--json", tmp_path / "table.json", *sizes],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["stored_as"]: row for row in json.loads((tmp_path / "table.json").read_text())["rows"]}
    assert list(rows) == ["auto", "int8", "fp8", "bfloat16"]
    exact, int8 = rows["auto"], rows["int8"]
    assert (exact["ratio"], exact["divergence_mean"], exact["same_likeliest"], exact["greedy_equal"]) == (1, 0, 1, 1)
    assert (int8["bytes_per_token"], rows["bfloat16"]["ratio"]) == (3 * 2 * 2 * 14, 0.5)
    assert 0 < int8["divergence_mean"] < rows["fp8"]["divergence_mean"]
    assert done.stdout.count("\n| ") == 5
