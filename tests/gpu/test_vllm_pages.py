"""Blocks of a KV cache on a GPU, laid out as vLLM does it, come out and in as those of the same KV cache in host
memory, and behind the step that computes them."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kvstore.connectors.vllm_parts.device import DevicePages
from kvstore.connectors.vllm_parts.pages import HostPages
from tests.support.vllm_layouts import NAMED, Caches, LayerSet
from tiers.region import Region

pytestmark = pytest.mark.gpu

_SLOT_BYTES = 1 << 20
_LARGE = Caches((LayerSet("LBNHC", torch.bfloat16, 8, 4, 16, 256),), 24)


@pytest.fixture
def region(shm_dir: Path) -> Iterator[Region]:
    region = Region.create(shm_dir / "region", 64 << 20, 1)
    yield region
    region.close()
    region.unlink()


def pages_on_gpu(caches: Caches, raw: torch.Tensor, staging_bytes: int = 1 << 20) -> DevicePages:
    views = caches.views(raw)
    return DevicePages(caches.layers(views), views, staging_bytes=staging_bytes)


@pytest.mark.parametrize("is_pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("name", [*NAMED, "large"])
def test_blocks_travel_to_the_region_and_back(name: str, region: Region, is_pinned: bool) -> None:
    caches = NAMED.get(name, _LARGE)
    raw = caches.raw(1)
    host = HostPages(caches.layers(caches.views(raw)), raw)
    pages, other = pages_on_gpu(caches, raw.cuda()), caches.raw(2).cuda()
    sources, targets = [2, 0], [1, 2]
    slots = [region.view(i * _SLOT_BYTES, pages.body_bytes) for i in range(2)]
    if is_pinned:
        pages.pin(region.address, region.data_bytes, lambda: True)
    try:
        expected = [memoryview(bytearray(host.body_bytes)) for _ in sources]
        host.gather(sources, expected, None)
        pages.gather(sources, slots, pages.mark())
        assert [bytes(slot) for slot in slots] == [bytes(view) for view in expected]
        pages_on_gpu(caches, other).scatter(slots, targets, None)
        right = caches.raw(2)
        HostPages(caches.layers(caches.views(right)), right).scatter(expected, targets, None)
        assert torch.equal(other.cpu(), right)
    finally:
        pages.unpin(region.address)
        for slot in slots:
            slot.release()


@pytest.mark.parametrize("name", NAMED)
def test_the_trial_at_start_passes_and_leaves_the_kv_cache_as_it_was(name: str) -> None:
    caches = NAMED[name]
    raw = caches.raw(1).cuda()
    pages_on_gpu(caches, raw).try_out()
    assert torch.equal(raw.cpu(), caches.raw(1))


def test_a_store_reads_what_the_step_before_its_mark_has_written_on_a_stream_of_its_own() -> None:
    """vLLM computes on a stream that is not the default one; a store that waited for that read the block before."""
    raw = _LARGE.raw(1).cuda()
    pages = pages_on_gpu(_LARGE, raw, 4 << 20)
    pages.try_out()
    torch.cuda.synchronize()
    out = [memoryview(bytearray(pages.body_bytes)) for _ in range(4)]
    busy = torch.randn(2048, 2048, device="cuda")
    computing = torch.cuda.Stream()
    computing.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(computing):
        for _ in range(50):
            busy = busy @ busy / 50
        raw.fill_(7)
        mark = pages.mark()
    thread = threading.Thread(target=pages.gather, args=([0, 5, 9, 23], out, mark))
    thread.start()
    thread.join()
    assert all(bytes(view) == b"\7" * pages.body_bytes for view in out)


def test_loads_and_stores_overlap_with_steps_without_mixing() -> None:
    raw = _LARGE.raw(1).cuda()
    pages = pages_on_gpu(_LARGE, raw, 2 << 20)

    def move(first: int) -> None:
        blocks = list(range(first, first + 6))
        payloads = [memoryview(bytearray(pages.body_bytes)) for _ in blocks]
        for _ in range(40):
            pages.gather(blocks, payloads, None)
            pages.scatter(payloads, blocks, None)

    threads = [threading.Thread(target=move, args=(first,)) for first in (0, 6, 12)]
    for thread in threads:
        thread.start()
    busy = torch.randn(1024, 1024, device="cuda")
    for _ in range(200):
        busy = busy @ busy / 32
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert torch.equal(raw.cpu(), _LARGE.raw(1))
