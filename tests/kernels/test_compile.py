"""Every kernel compiles for the GPUs we name, on a machine without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_kernel_compiles_for_sm_80_and_sm_90_without_spilling(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    # In its own process: the interpreter's switch, and triton's cache, are per process.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "kernels.compile", "--out", str(tmp_path / "cubins")],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    kernels = ("gather", "gather_pages", "scatter", "scatter_pages", "quantize", "dequantize")
    longest_first = sorted(kernels, key=len, reverse=True)
    assert {(next(kernel for kernel in longest_first if row[0].startswith(kernel)), row[1]) for row in rows} == {
        (kernel, architecture) for kernel in kernels for architecture in ("sm_80", "sm_90")
    }
    for name, architecture, registers, stack_bytes, num_bytes in rows:
        cubin = (tmp_path / "cubins" / f"{name}.{architecture}.cubin").read_bytes()
        assert cubin.startswith(b"\x7fELF")
        assert len(cubin) == int(num_bytes)
        # "None" where triton came without its cuobjdump.
        assert registers == "None" or int(registers) <= 64
        assert stack_bytes in ("None", "0")
