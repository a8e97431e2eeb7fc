"""`make gpu-check` on a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_ends_with_its_own_code() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_check.py"],
        cwd=_ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3
    assert "no CUDA device" in done.stderr
    assert "nothing was checked" in done.stderr
    assert not done.stdout
