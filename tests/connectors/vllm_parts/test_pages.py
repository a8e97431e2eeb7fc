"""Block copies out of and into arrays that lie as vLLM's KV caches do."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.connectors.vllm_parts.pages import HostPages, describe, describe_all
from kvstore.connectors.vllm_parts.seal import SEAL_BYTES
from kvstore.core.errors import ConfigError


class ArrayTensor:
    """An array that answers as a tensor."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array
        self.shape = array.shape
        self.dtype = array.dtype
        self.device = "cpu"

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)

    def element_size(self) -> int:
        return self._array.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self._array.itemsize for stride in self._array.strides)


def caches(whole: npt.NDArray[Any]) -> dict[str, ArrayTensor]:
    """One view per layer of an array [layers, blocks, …]."""
    return {f"layer.{index}": ArrayTensor(whole[index]) for index in range(len(whole))}


def pages_of(whole: npt.NDArray[Any], num_blocks: int) -> HostPages:
    views = caches(whole)
    return HostPages(describe_all(views, list(views), num_blocks), whole)


def numbered(*shape: int) -> npt.NDArray[np.float32]:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


LAYOUTS = {
    # layers, blocks, heads, tokens, content; in which order they lie.
    "layer by layer": numbered(3, 5, 2, 4, 6),
    "tokens before heads": numbered(3, 5, 4, 2, 6).swapaxes(2, 3),
    "block by block": numbered(5, 3, 2, 4, 6).swapaxes(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_payload_holds_the_blocks_pages_layer_after_layer_and_nothing_else(layout: str) -> None:
    whole = LAYOUTS[layout].copy(order="K")
    pages = pages_of(whole, 5)
    assert pages.payload_bytes == 3 * 2 * 4 * 6 * 4 + SEAL_BYTES
    out = memoryview(bytearray(pages.body_bytes))
    pages.gather([3], [out], None)
    expected = [np.sort(whole[layer, 3].ravel()) for layer in range(3)]
    got = np.frombuffer(out, np.float32).reshape(3, -1)
    assert all(np.array_equal(np.sort(one), other) for one, other in zip(got, expected, strict=True))

    before = whole.copy(order="K")
    whole[:, 1] = 0
    pages.scatter([out], [1], None)
    assert np.array_equal(whole[:, 1], before[:, 3])
    whole[:, 1] = before[:, 1]
    assert np.array_equal(whole, before), "another block was touched"


def test_kernel_blocks_of_one_pool_block_are_copied_together() -> None:
    whole = numbered(2, 8, 2, 4, 6)
    pages = pages_of(whole, 4)
    out = memoryview(bytearray(pages.body_bytes))
    pages.gather([1], [out], None)
    assert np.array_equal(np.frombuffer(out, np.float32).reshape(2, -1), whole[:, 2:4].reshape(2, -1))


def test_layers_of_several_sizes_and_places_are_copied_each() -> None:
    views = {"a": ArrayTensor(numbered(4, 3, 8)), "b": ArrayTensor(numbered(4, 5, 8) + 1000)}
    pages = HostPages(describe_all(views, ["a", "b"], 4), views)
    out = memoryview(bytearray(pages.body_bytes))
    pages.gather([2], [out], None)
    got = np.frombuffer(out, np.float32)
    assert np.array_equal(got[:24], np.arange(48, 72))
    assert np.array_equal(got[24:], np.arange(80, 120) + 1000)


def test_layers_that_share_their_memory_are_taken_once() -> None:
    whole = numbered(1, 4, 2, 8)
    views = {"own": ArrayTensor(whole[0]), "shared": ArrayTensor(whole[0])}
    assert [layer.name for layer in describe_all(views, ["own", "shared"], 4)] == ["own"]


def test_a_cache_whose_blocks_are_scattered_is_refused_by_its_layers_name() -> None:
    heads_first = numbered(2, 5, 4, 6).swapaxes(0, 1)
    with pytest.raises(ConfigError, match=r"model\.layer\.7 does not keep a block's bytes together"):
        describe("model.layer.7", ArrayTensor(heads_first), 5)


def test_another_order_within_a_page_is_another_form() -> None:
    one = describe("x", ArrayTensor(LAYOUTS["layer by layer"][0]), 5)
    other = describe("x", ArrayTensor(LAYOUTS["tokens before heads"][0]), 5)
    assert one.page_bytes == other.page_bytes
    assert one.form != other.form
