"""The GPU's copies, run by the kernels' interpreter in a process of its own: shapes, strides and order, not streams."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

_SCRIPT = """
import contextlib
import torch
from kernels.pinned import PinnedMemory
from kvstore.connectors.vllm_parts.device import DevicePages
from kvstore.connectors.vllm_parts.pages import HostPages, describe_all

class Lane:
    def __init__(self): self.after = []
    def mark(self): return "mark"
    def entered(self, after):
        self.after.append(after)
        return contextlib.nullcontext()

def check(raw, order, dtype):
    # [layers, blocks, heads, tokens, content]
    whole = raw.to(dtype).permute(order)
    caches = {f"layer.{i}": whole[i] for i in range(whole.shape[0])}
    layers = describe_all(caches, list(caches), whole.shape[1])
    lanes = Lane(), Lane()
    device = DevicePages(layers, caches, lanes, PinnedMemory(), staging_bytes=2 * layers[0].page_bytes * len(layers))
    host = HostPages(layers, caches)
    assert device.payload_bytes == host.payload_bytes
    outs = [memoryview(bytearray(host.body_bytes)) for _ in range(3)]
    expected = [memoryview(bytearray(host.body_bytes)) for _ in range(3)]
    device.gather([4, 0, 2], outs, "after the step")
    host.gather([4, 0, 2], expected, None)
    assert outs == expected
    assert lanes[0].after == ["after the step"]
    before = whole.clone()
    device.scatter(outs, [1, 3, 0], None)
    for target, source in ((1, 4), (3, 0), (0, 2)):
        assert torch.equal(whole[:, target], before[:, source])
    assert torch.equal(whole[:, 2], before[:, 2]) and torch.equal(whole[:, 4], before[:, 4])

numbers = lambda *shape: torch.arange(torch.Size(shape).numel()).reshape(shape)
check(numbers(3, 5, 2, 4, 6), (0, 1, 2, 3, 4), torch.float32)
check(numbers(3, 5, 4, 2, 6), (0, 1, 3, 2, 4), torch.bfloat16)
check(numbers(5, 3, 2, 4, 6), (1, 0, 2, 3, 4), torch.float32)
check(numbers(1, 5, 2, 4, 6), (0, 1, 2, 3, 4), torch.float16)
print("whole")
"""


def test_blocks_are_gathered_and_scattered_as_in_host_memory_whatever_the_layout() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.stdout.strip() == "whole", done.stderr


def test_layers_in_several_buffers_are_refused() -> None:
    torch = pytest.importorskip("torch")
    from kvstore.connectors.vllm_parts.device import pool_of
    from kvstore.connectors.vllm_parts.pages import describe_all
    from kvstore.core.errors import ConfigError

    caches = {"a": torch.zeros(4, 8), "b": torch.zeros(4, 8)}
    with pytest.raises(ConfigError, match="one distance from each other in one buffer"):
        pool_of(describe_all(caches, ["a", "b"], 4), caches)
