"""Kernels where no GPU is: a file of tests in a process of its own, in which Triton interprets them."""

import os
import subprocess
import sys
from pathlib import Path


def assert_passes_in_the_interpreter(tests: Path) -> None:
    """Run the file and fail with what it printed. The interpreter is chosen when kernels are imported, so not here."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
