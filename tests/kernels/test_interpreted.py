"""Runs `interpreted.py` in a process where Triton interprets its kernels."""

from pathlib import Path

import pytest

from tests.support.interpreter import assert_passes_in_the_interpreter


@pytest.mark.slow
def test_the_kernels_pass_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert_passes_in_the_interpreter(Path(__file__).with_name("interpreted.py"))
