"""Compiles every kernel ahead of time for the GPUs we name, on a machine that may have none, and says what each takes.

    python -m kernels.compile            # a table: kernel, architecture, registers, stack bytes, cubin bytes
    python -m kernels.compile --out DIR  # and leaves the cubin files there

Must not run under TRITON_INTERPRET=1, which replaces the compiler.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.gather import NUM_WARPS, TILE_LANES, gather_kernel
from kernels.pages import TILES_PER_PROGRAM, gather_pages_kernel, scatter_pages_kernel
from kernels.quantize import dequantize_kernel, kernel_constants, quantize_constants, quantize_kernel
from kernels.quantized import QUANTIZED_DTYPES, QuantizedDtype
from kernels.scatter import scatter_kernel

ARCHITECTURES = (80, 90)
_LANE_TYPES = {8: "*i64", 4: "*i32", 2: "*i16", 1: "*i8"}
# Pools to compile for: heads and head_dim of a large model, of the demo's model, and heads stored before tokens.
_COPIED: dict[str, dict[str, Any]] = {
    "llama_8b_bf16": {"lane": 8, "tokens": 16, "heads": 8, "head_lanes": 32, "is_flat": True},
    "smollm2_f32": {"lane": 8, "tokens": 16, "heads": 3, "head_lanes": 32, "is_flat": True},
    "heads_first_bf16": {"lane": 8, "tokens": 16, "heads": 8, "head_lanes": 32, "is_flat": False},
    "odd_i8": {"lane": 1, "tokens": 5, "heads": 3, "head_lanes": 7, "is_flat": False},
}
_QUANTIZED: dict[str, dict[str, Any]] = {
    "llama_8b_bf16": {"pool": "*bf16", "tokens": 16, "heads": 8, "group": 32, "groups_per_head": 4, "is_flat": True},
    "smollm2_f32": {"pool": "*fp32", "tokens": 16, "heads": 3, "group": 32, "groups_per_head": 2, "is_flat": True},
    "heads_first_f16": {"pool": "*fp16", "tokens": 16, "heads": 8, "group": 20, "groups_per_head": 4, "is_flat": False},
}
# Pages by the widest lane that fits them, and whether they begin at multiples of 16 bytes.
_PAGED: dict[str, dict[str, Any]] = {
    "aligned_i64": {"lane": 8, "is_aligned": True},
    "plain_i64": {"lane": 8, "is_aligned": False},
    "odd_i8": {"lane": 1, "is_aligned": False},
}
_LIMITS = {"*bf16": 3.3895313892515355e38, "*fp32": 3.4028234663852886e38, "*fp16": 65504.0}


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel for one architecture. `stack_bytes` counts local memory: more than 0 means spilled registers."""

    name: str
    architecture: int
    cubin: bytes
    registers: int | None
    stack_bytes: int | None


def compile_all(architecture: int) -> Iterator[Compiled]:
    """Compile every kernel in every shape for sm_<architecture>, one after the other."""
    for name, kernel in (("gather", gather_kernel), ("scatter", scatter_kernel)):
        for shape_name, shape in _COPIED.items():
            yield _compile_copy(f"{name}_{shape_name}", kernel, shape, architecture)
    for name, kernel in (("gather_pages", gather_pages_kernel), ("scatter_pages", scatter_pages_kernel)):
        for shape_name, shape in _PAGED.items():
            yield _compile_paged(f"{name}_{shape_name}", kernel, shape, architecture)
    for name, kernel in (("quantize", quantize_kernel), ("dequantize", dequantize_kernel)):
        for store_dtype in QUANTIZED_DTYPES:
            for shape_name, shape in _QUANTIZED.items():
                label = f"{name}_{store_dtype}_{shape_name}"
                yield _compile_quantized(label, kernel, store_dtype, dict(shape), architecture)


def _compile_copy(name: str, kernel: Any, shape: dict[str, Any], architecture: int) -> Compiled:
    lane = _LANE_TYPES[shape["lane"]]
    types = {"pool": lane, "payloads": lane, "pool_blocks": "*i64"}
    constants = {
        "POOL_BLOCKS_PER_BLOCK": 16,
        "SEGMENT_LANES": shape["tokens"] * shape["heads"] * shape["head_lanes"],
        "NUM_HEADS": shape["heads"],
        "HEAD_LANES": shape["head_lanes"],
        "IS_FLAT": shape["is_flat"],
        "TILE": TILE_LANES,
    }
    return _compile(name, kernel, types, constants, architecture, has_aligned_strides=shape["lane"] == 8)


def _compile_paged(name: str, kernel: Any, shape: dict[str, Any], architecture: int) -> Compiled:
    types = {"entries": "*i64", "blocks": "*i64", "rows": _LANE_TYPES[shape["lane"]]}
    constants = {"IS_ALIGNED": shape["is_aligned"], "TILE": TILE_LANES, "TILES": TILES_PER_PROGRAM}
    return _compile(name, kernel, types, constants, architecture, has_aligned_strides=shape["is_aligned"])


def _compile_quantized(
    name: str, kernel: Any, store_dtype: QuantizedDtype, shape: dict[str, Any], architecture: int
) -> Compiled:
    pool = shape.pop("pool")
    types = {"pool": pool, "pool_blocks": "*i64", "codes": "*u8", "scales": "*i16"}
    constants = kernel_constants(store_dtype, per_block=16, **shape)
    constants |= quantize_constants(store_dtype) if kernel is quantize_kernel else {"LIMIT": _LIMITS[pool]}
    return _compile(name, kernel, types, constants, architecture, has_aligned_strides=True)


def _compile(
    name: str,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    architecture: int,
    *,
    has_aligned_strides: bool,
) -> Compiled:
    """`types` are those of the tensors; what is neither a tensor nor a constant is a stride."""
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32") for argument in kernel.arg_names
    }
    # What the just-in-time compiler finds out at launch: tensors start at a multiple of 16 bytes, and in pools
    # worth tuning for, so do strides.
    aligned = [
        (i,)
        for i, argument in enumerate(kernel.arg_names)
        if argument in types or (argument not in constants and has_aligned_strides)
    ]
    attributes = {place: [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", architecture, 32)
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    cubin = triton.compile(source, target=target, options=options).asm["cubin"]
    registers, stack_bytes = _resources(cubin)
    return Compiled(name, architecture, cubin, registers, stack_bytes)


def _resources(cubin: bytes) -> tuple[int | None, int | None]:
    """Return registers per thread and stack bytes by triton's own cuobjdump, or None where it is missing."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.is_file():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, timeout=60, check=False)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout + done.stderr)
    return (int(found[1]), int(found[2])) if found else (None, None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.compile", description="Compile all kernels ahead of time.")
    parser.add_argument("--out", type=Path, help="leave the cubin files in this folder")
    arguments = parser.parse_args()
    for architecture in ARCHITECTURES:
        for kernel in compile_all(architecture):
            size = len(kernel.cubin)
            print(f"{kernel.name}\tsm_{architecture}\t{kernel.registers}\t{kernel.stack_bytes}\t{size}", flush=True)
            if arguments.out is not None:
                arguments.out.mkdir(parents=True, exist_ok=True)
                (arguments.out / f"{kernel.name}.sm_{architecture}.cubin").write_bytes(kernel.cubin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
