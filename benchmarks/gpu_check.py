"""Checks this project on the GPU of this machine, in under three minutes: `make gpu-check`.

    1. the tests that need a GPU: kernels against their oracle, the HBM tier, vLLM's blocks, a step of a model
    2. bandwidths: gather and scatter against a copy on the device, the HBM tier and vLLM's blocks against a pinned copy
    3. the main flow: the demo with its engine on the GPU, every token compared

Ends with 0 if all went well, 1 if not, and 3 where there is no GPU (then nothing was checked).
"""

import argparse
import contextlib
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from kernels.quantized import QUANTIZED_DTYPES, QuantizedDtype, payload_bytes_of
from tiers.hbm import HbmTier

ROOT = Path(__file__).resolve().parents[1]

EXIT_NO_GPU = 3
LIMIT_S = 170.0
_RUNS = 30
_WARM_UP_RUNS = 5
# Several times the L2 of any GPU, so that no run finds the last one's bytes there.
_BENCH_BYTES = 1 << 30
_PAGE_BYTES = 4096
# As many as the connector copies before it looks around.
_VLLM_BATCH = 8


@dataclass(frozen=True)
class Shape:
    """A pool to measure, and how many of its pool blocks are one block."""

    name: str
    dtype: torch.dtype
    num_layers: int
    num_kv_heads: int
    head_dim: int
    per_block: int
    pool_block_tokens: int = 16

    @property
    def pool_block_bytes(self) -> int:
        numbers = self.num_layers * 2 * self.pool_block_tokens * self.num_kv_heads * self.head_dim
        return numbers * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.pool_block_bytes * self.per_block


SHAPES = [
    Shape("SmolLM2-135M float32, 16-token blocks", torch.float32, 30, 3, 64, per_block=1),
    Shape("Llama-3.1-8B bfloat16, 16-token blocks", torch.bfloat16, 32, 8, 128, per_block=1),
    Shape("Llama-3.1-8B bfloat16, 256-token blocks", torch.bfloat16, 32, 8, 128, per_block=16),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Example: make gpu-check")
    parser.add_argument("--without-flow", action="store_true", help="leave out the main flow")
    parser.add_argument("--flow", type=Path, metavar="REPORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu-check: this machine has no CUDA device that torch can use; nothing was checked", file=sys.stderr)
        return EXIT_NO_GPU
    if arguments.flow is not None:
        return _flow(arguments.flow)
    deadline = time.monotonic() + LIMIT_S
    _print_machine()
    results = {"tests": _in_process("the GPU tests", ["-m", "pytest", "-q", "tests/gpu"], deadline)}
    _print_bandwidths()
    if not arguments.without_flow:
        with tempfile.TemporaryDirectory() as folder:
            command = [str(Path(__file__)), "--flow", str(Path(folder) / "report.json")]
            results["main flow"] = _in_process("the main flow", command, deadline)
    failed = [name for name, passed in results.items() if not passed]
    print(f"gpu-check: {', '.join(failed)} failed" if failed else "gpu-check: everything passed")
    return 1 if failed else 0


def _print_machine() -> None:
    # Only here: a machine without a GPU may have none.
    import triton

    gpu = torch.cuda.get_device_properties(0)
    print(
        f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB, {os.cpu_count()} CPU cores; "
        f"torch {torch.__version__}, triton {triton.__version__}",
        flush=True,
    )


def _in_process(what: str, arguments: list[str], deadline: float) -> bool:
    """Run Python on `arguments` with what is left of the time; return whether it ended with 0."""
    print(f"\n{what}", flush=True)
    left_s = deadline - time.monotonic()
    try:
        done = subprocess.run([sys.executable, *arguments], cwd=ROOT, timeout=max(left_s, 1.0), check=False)
    except subprocess.TimeoutExpired:
        print(f"{what}: not done after {left_s:.0f} s, all that was left of {LIMIT_S:.0f}", file=sys.stderr)
        return False
    return done.returncode == 0


# ---------------------------------------------------------------- bandwidths


def _print_bandwidths() -> None:
    print(f"\nGB/s, median (p10 to p90) of {_RUNS} runs; on the device, bytes read and bytes written both count")
    for shape in SHAPES:
        num_blocks = max(1, _BENCH_BYTES // shape.block_bytes)
        print(f"\n{shape.name}: {num_blocks} blocks of {shape.block_bytes / 2**20:.2f} MiB")
        _print_on_device(shape, num_blocks)
        _print_to_host(shape, num_blocks)
        _print_vllm(shape, max(1, num_blocks // 4))
        torch.cuda.empty_cache()


def _print_on_device(shape: Shape, num_blocks: int) -> None:
    from kernels.gather import gather
    from kernels.scatter import scatter

    pool = _random_pool(shape, num_blocks)
    order = torch.randperm(num_blocks * shape.per_block).view(num_blocks, shape.per_block).cuda()
    payloads = torch.empty(num_blocks, pool[0].numel() * shape.per_block, dtype=shape.dtype, device="cuda")
    other = torch.empty_like(payloads)
    moved_bytes = 2 * payloads.nbytes
    copy = _Rates(_device_seconds(lambda: other.copy_(payloads)), moved_bytes)
    copy.show("copy on the device")
    _Rates(_device_seconds(lambda: gather(pool, order, payloads)), moved_bytes).show("gather", copy)
    _Rates(_device_seconds(lambda: scatter(payloads, order, pool)), moved_bytes).show("scatter", copy)
    for store_dtype in QUANTIZED_DTYPES:
        _print_quantising(pool, order, store_dtype, copy)


def _print_quantising(pool: torch.Tensor, order: torch.Tensor, store_dtype: QuantizedDtype, copy: "_Rates") -> None:
    from kernels.quantize import dequantize_scatter, quantize_gather

    payload_bytes = payload_bytes_of(pool, order.shape[1], store_dtype)
    payloads = torch.empty(len(order), payload_bytes, dtype=torch.uint8, device="cuda")
    moved_bytes = pool.nbytes + payloads.nbytes
    out = _device_seconds(lambda: quantize_gather(pool, order, payloads, store_dtype))
    _Rates(out, moved_bytes).show(f"gather, quantised to {store_dtype}", copy)
    into = _device_seconds(lambda: dequantize_scatter(payloads, order, pool, store_dtype))
    _Rates(into, moved_bytes).show(f"scatter, dequantised from {store_dtype}", copy)


def _print_to_host(shape: Shape, num_blocks: int) -> None:
    # One copy after the other crosses the link; a quarter of the bytes is plenty there.
    num_blocks = max(1, num_blocks // 4)
    pool = _random_pool(shape, num_blocks)
    order = torch.randperm(num_blocks * shape.per_block).view(num_blocks, shape.per_block).tolist()
    flat = pool.view(torch.uint8).flatten()
    pinned = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
    out = _Rates(_device_seconds(lambda: pinned.copy_(flat, non_blocking=True)), pool.nbytes)
    into = _Rates(_device_seconds(lambda: flat.copy_(pinned, non_blocking=True)), pool.nbytes)
    out.show("one pinned copy to the host")
    into.show("one pinned copy to the device")
    for store_dtype in (None, *QUANTIZED_DTYPES):
        tier = HbmTier(pool, shape.per_block * shape.pool_block_tokens, store_dtype)
        _print_tier(tier, order, pool.nbytes, f" ({store_dtype})" if store_dtype else "", out, into)


def _print_tier(
    tier: HbmTier, order: list[list[int]], pool_bytes: int, suffix: str, out: "_Rates", into: "_Rates"
) -> None:
    """Rates are of the pool's bytes, also where fewer cross the link."""
    with _slots(tier, len(order), tier.payload_bytes) as slots:

        def store() -> None:
            for group, slot in zip(order, slots, strict=True):
                tier.gather(group, slot)

        def load() -> None:
            for group, slot in zip(order, slots, strict=True):
                tier.scatter(slot, group)

        _Rates(_host_seconds(store), pool_bytes).show(f"HBM tier, by blocks, to the host{suffix}", out)
        _Rates(_host_seconds(load), pool_bytes).show(f"HBM tier, by blocks, to the device{suffix}", into)


def _print_vllm(shape: Shape, num_blocks: int) -> None:
    """The connector's copies of blocks as large, from layers one after another: vLLM's default layout."""
    from kernels.pages import PageRun, gather_pages, page_table, scatter_pages
    from kvstore.connectors.vllm_parts.device import DevicePages
    from kvstore.connectors.vllm_parts.pages import describe_all

    tokens = shape.pool_block_tokens * shape.per_block
    whole = torch.randn(shape.num_layers, num_blocks, tokens, shape.num_kv_heads, 2 * shape.head_dim, device="cuda").to(
        shape.dtype
    )
    caches = {f"layer.{index}": layer.transpose(1, 2) for index, layer in enumerate(whole)}
    layers = describe_all(caches, list(caches), num_blocks)
    table = page_table([PageRun(each.address, each.stride_bytes, each.page_bytes) for each in layers], whole.device)
    order = torch.randperm(num_blocks)
    rows = torch.empty(num_blocks, shape.block_bytes, dtype=torch.uint8, device="cuda")
    blocks = order.cuda()
    moved_bytes = 2 * rows.nbytes
    _Rates(_device_seconds(lambda: gather_pages(table, blocks, rows)), moved_bytes).show("gather, vLLM's layers")
    _Rates(_device_seconds(lambda: scatter_pages(rows, blocks, table)), moved_bytes).show("scatter, vLLM's layers")
    on_device = DevicePages(layers, caches)
    on_device.try_out()
    with _slots(on_device, num_blocks, on_device.body_bytes) as slots:
        batches = [slice(first, first + _VLLM_BATCH) for first in range(0, num_blocks, _VLLM_BATCH)]
        ids = order.tolist()

        def store() -> None:
            mark = on_device.mark()
            for some in batches:
                on_device.gather(ids[some], slots[some], mark)

        def load() -> None:
            for some in batches:
                on_device.scatter(slots[some], ids[some], None)

        _Rates(_host_seconds(store), whole.nbytes).show(f"vLLM's blocks, {_VLLM_BATCH} at a time, to the host")
        _Rates(_host_seconds(load), whole.nbytes).show(f"vLLM's blocks, {_VLLM_BATCH} at a time, to the device")


class _Pinning(Protocol):
    def pin(self, address: int, num_bytes: int, goes_on: Callable[[], bool]) -> None: ...

    def unpin(self, address: int) -> None: ...


@contextlib.contextmanager
def _slots(pinning: _Pinning, num_blocks: int, num_bytes: int) -> Iterator[list[memoryview]]:
    """Yield page-aligned views of mapped, pinned memory, as a region has them."""
    stride = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
    memory = memoryview(mmap.mmap(-1, stride * num_blocks))
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    pinning.pin(address, len(memory), lambda: True)
    try:
        yield [memory[i * stride : i * stride + num_bytes] for i in range(num_blocks)]
    finally:
        pinning.unpin(address)


def _random_pool(shape: Shape, num_blocks: int) -> torch.Tensor:
    # Not zeros: they hide wrong indexing, and some hardware moves them faster.
    return torch.randn(
        num_blocks * shape.per_block,
        shape.num_layers,
        2,
        shape.pool_block_tokens,
        shape.num_kv_heads,
        shape.head_dim,
        device="cuda",
    ).to(shape.dtype)


class _Rates:
    """What a set of runs achieved, in GB/s."""

    def __init__(self, seconds: list[float], moved_bytes: int) -> None:
        ordered = sorted(moved_bytes / run / 1e9 for run in seconds)
        self.p10, self.median, self.p90 = (ordered[int(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9))

    def show(self, name: str, best: "_Rates | None" = None) -> None:
        share = f"{self.median / best.median:5.0%} of that" if best is not None else ""
        print(f"  {name:42}{self.median:8.1f} ({self.p10:.1f} to {self.p90:.1f})  {share}", flush=True)


def _device_seconds(work: Callable[[], object]) -> list[float]:
    """Time by events on the device, so that launching costs nothing."""
    for _ in range(_WARM_UP_RUNS):
        work()
    cuda: Any = torch.cuda
    marks = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(_RUNS)]
    for begin, end in marks:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in marks]


def _host_seconds(work: Callable[[], object]) -> list[float]:
    """Time by the clock: what is measured waits for its own copies."""
    seconds = []
    for run in range(_WARM_UP_RUNS + _RUNS):
        began = time.perf_counter()
        work()
        if run >= _WARM_UP_RUNS:
            seconds.append(time.perf_counter() - began)
    return seconds


# ---------------------------------------------------------------- the main flow


def _flow(report: Path) -> int:
    """Run the demo, a few sessions of it, with the engine on the GPU; float32, since there tokens are comparable."""
    from kvstore.demo.main import Scale, run

    smollm2 = SHAPES[0]
    scale = Scale(
        model="SmolLM2-135M-Instruct, float32, on the GPU",
        model_arguments=("--device", "cuda", "--dtype", "float32"),
        pool_block_bytes=smollm2.pool_block_bytes,
        resumed=3,
        displaced=1,
        timed=2,
        hbm_blocks=320,
        reference_hbm_blocks=600,
    )
    return run(report, scale)


if __name__ == "__main__":
    sys.exit(main())
