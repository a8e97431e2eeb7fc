"""Copies of vLLM's blocks by the GPU's code, with the kernels in Triton's interpreter and lanes without streams. Run by
`test_device.py`, in a process of its own, as `tests/kernels/interpreted.py` is and for the same reasons."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.pinned import PinnedMemory
from kvstore.connectors.vllm_parts import device as device_module
from kvstore.connectors.vllm_parts.device import DevicePages
from kvstore.connectors.vllm_parts.pages import HostPages
from kvstore.core.errors import ConfigError
from tests.support.vllm_layouts import NAMED, ORDERS, Caches, LayerSet

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/connectors/vllm_parts/test_device.py instead"


class Lane:
    """A lane without a stream that notes what it is asked for."""

    def __init__(self, log: list[object] | None = None) -> None:
        self.log: list[object] = [] if log is None else log

    def mark(self) -> object:
        return "mark"

    @contextmanager
    def entered(self, after: object) -> Iterator[None]:
        self.log.append(("entered", after))
        try:
            yield
        finally:
            self.log.append("left")

    def on_device(self) -> AbstractContextManager[None]:
        self.log.append("on device")
        return nullcontext()


def pages_of(caches: Caches, raw: torch.Tensor, rows: int = 2, lanes: tuple[Lane, Lane] | None = None) -> DevicePages:
    views = caches.views(raw)
    layers = caches.layers(views)
    staging_bytes = rows * sum(layer.page_bytes for layer in layers)
    return DevicePages(layers, views, lanes or (Lane(), Lane()), PinnedMemory(), staging_bytes)


def host_pages_of(caches: Caches, raw: torch.Tensor) -> HostPages:
    return HostPages(caches.layers(caches.views(raw)), raw)


def empty(count: int, num_bytes: int) -> list[memoryview]:
    return [memoryview(bytearray(num_bytes)) for _ in range(count)]


def check(caches: Caches, sources: list[int], targets: list[int], rows: int) -> None:
    """Move blocks out of one KV cache into another, and do the same in host memory."""
    raw, other = caches.raw(1), caches.raw(2)
    pages, host = pages_of(caches, raw, rows), host_pages_of(caches, raw.clone())
    assert pages.payload_bytes == host.payload_bytes
    outs, expected = (empty(len(sources), host.body_bytes) for _ in range(2))
    pages.gather(sources, outs, None)
    host.gather(sources, expected, None)
    assert outs == expected
    assert torch.equal(raw, caches.raw(1)), "reading changed the KV cache"

    right = other.clone()
    pages_of(caches, other, rows).scatter(outs, targets, None)
    host_pages_of(caches, right).scatter(outs, targets, None)
    assert torch.equal(other, right), "other bytes than the blocks' own were written, or wrong ones"
    again = empty(len(targets), host.body_bytes)
    pages_of(caches, other, rows).gather(targets, again, None)
    assert again == outs


@pytest.mark.parametrize("name", NAMED)
def test_blocks_are_copied_as_in_host_memory_whatever_the_layout(name: str) -> None:
    check(NAMED[name], [2, 0], [1, 2], rows=1)


layer_sets = st.builds(
    LayerSet,
    layout=st.sampled_from(sorted(ORDERS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]),
    num_layers=st.integers(1, 3),
    heads=st.none() | st.integers(1, 3),
    tokens=st.integers(1, 4),
    content=st.integers(1, 9),
)


@st.composite
def moves(draw: st.DrawFn) -> tuple[Caches, list[int], list[int], int]:
    sets = tuple(draw(st.lists(layer_sets, min_size=1, max_size=2)))
    num_blocks = draw(st.integers(1, 5))
    caches = Caches(sets, num_blocks, 4 * draw(st.integers(0, 4)))
    sources = draw(st.lists(st.integers(0, num_blocks - 1), min_size=1, max_size=4))
    count = min(len(sources), num_blocks)
    targets = draw(st.permutations(range(num_blocks)))[:count]
    return caches, sources[:count], targets, draw(st.integers(1, 3))


@settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(moves())
def test_any_blocks_of_any_layout_come_back_equal_and_leave_the_others_alone(
    move: tuple[Caches, list[int], list[int], int],
) -> None:
    check(*move)


def test_layers_in_buffers_of_their_own_are_copied_together() -> None:
    first, second = torch.arange(40, dtype=torch.float32).view(5, 8), torch.arange(30, dtype=torch.float32).view(5, 6)
    views = {"a": first, "b": second}
    layers = Caches((), 5).layers(views)
    out = empty(1, 14 * 4)
    pages = DevicePages(layers, views, (Lane(), Lane()), PinnedMemory())
    pages.gather([3], out, None)
    assert torch.frombuffer(out[0], dtype=torch.float32).tolist() == [*range(24, 32), *range(18, 24)]


def test_everything_of_a_direction_happens_inside_of_its_lane_and_behind_the_mark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy launched outside would race with the step, and be under way still when its block is another's."""
    caches = NAMED["float32"]
    log: list[object] = []
    pages = pages_of(caches, caches.raw(1), rows=2, lanes=(Lane(log), Lane(log)))
    transfer = DevicePages._transfer

    def noted(self: DevicePages, row: torch.Tensor, view: memoryview, *, to_host: bool) -> None:
        log.append("out" if to_host else "in")
        transfer(self, row, view, to_host=to_host)

    monkeypatch.setattr(DevicePages, "_transfer", noted)
    monkeypatch.setattr(device_module, "gather_pages", lambda table, blocks, rows: log.append(f"gather {len(rows)}"))
    monkeypatch.setattr(device_module, "scatter_pages", lambda rows, blocks, table: log.append(f"scatter {len(rows)}"))
    views = empty(3, pages.body_bytes)
    pages.gather([0, 1, 2], views, "the step")
    assert log == [("entered", "the step"), "gather 2", "out", "out", "gather 1", "out", "left"]
    log.clear()
    pages.scatter(views, [0, 1, 2], "the zeroing")
    assert log == [("entered", "the zeroing"), "in", "in", "scatter 2", "in", "scatter 1", "left"]


def test_a_block_that_is_not_there_and_a_wrong_length_are_refused_before_anything_is_copied() -> None:
    caches = NAMED["float32"]
    log: list[object] = []
    pages = pages_of(caches, caches.raw(1), lanes=(Lane(log), Lane(log)))
    whole, short = empty(1, pages.body_bytes), empty(1, pages.body_bytes - 1)
    for blocks, views in (([5], whole), ([-1], whole), ([0], short), ([0, 1], whole)):
        with pytest.raises(ValueError):
            pages.gather(blocks, views, None)
        with pytest.raises(ValueError):
            pages.scatter(views, blocks, None)
    assert log == []


@pytest.mark.parametrize("name", NAMED)
def test_the_trial_at_start_leaves_the_kv_cache_as_it_was(name: str) -> None:
    caches = NAMED[name]
    raw = caches.raw(1)
    pages_of(caches, raw).try_out()
    assert torch.equal(raw, caches.raw(1))


def test_the_trial_at_start_finds_copies_that_go_to_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = NAMED["float32"]
    pages = pages_of(caches, caches.raw(1))
    scatter, gather = device_module.scatter_pages, device_module.gather_pages
    monkeypatch.setattr(device_module, "scatter_pages", lambda rows, blocks, table: scatter(rows, blocks + 1, table))
    monkeypatch.setattr(device_module, "gather_pages", lambda table, blocks, rows: gather(table, blocks + 1, rows))
    with pytest.raises(ConfigError, match="came out wrong on cpu"):
        pages.try_out()


def test_staging_is_bounded_and_no_larger_than_the_kv_cache() -> None:
    caches = NAMED["float32"]
    assert len(pages_of(caches, caches.raw(1), rows=3)._in_rows) == 3
    assert len(pages_of(caches, caches.raw(1), rows=300)._in_rows) == caches.num_blocks


def test_the_region_is_pinned_for_the_workers_own_device() -> None:
    """A new thread has the first GPU: pinning there took memory of another rank's."""

    class Runtime:
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            log.append(("pinned", num_bytes))
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            log.append("unpinned")
            return 0

    caches = NAMED["float32"]
    log: list[object] = []
    views = caches.views(caches.raw(1))
    pages = DevicePages(caches.layers(views), views, (Lane(log), Lane(log)), PinnedMemory(Runtime()))
    pages.pin(1 << 40, 4096, lambda: True)
    pages.unpin(1 << 40)
    assert log == ["on device", ("pinned", 4096), "on device", "unpinned"]
