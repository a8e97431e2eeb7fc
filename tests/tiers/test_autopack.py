"""When packing pays: by ratio, by what sending costs, by what packing costs; with a clock that only packing moves."""

import numpy as np

from kvstore.core.block import BlockMeta
from tests.support.blocks import key
from tiers.autopack import TRY_AGAIN_BLOCKS, AutoPacking
from tiers.planes import Planes

BLOCK_BYTES = 1 << 20
FAST_LINK_S_PER_BYTE, SLOW_LINK_S_PER_BYTE = 1e-10, 1e-7


class Clocked(Planes):
    """Packing a byte takes `s_per_byte` seconds of its clock."""

    def __init__(self, s_per_byte: float = 1e-9) -> None:
        super().__init__()
        self.s_per_byte = s_per_byte
        self.now_s = 0.0
        self.packed_with: list[int] = []

    def clock(self) -> float:
        return self.now_s

    def pack(self, payload: memoryview, width: int) -> bytes:
        self.now_s += len(payload) * self.s_per_byte
        if len(payload) == BLOCK_BYTES:
            self.packed_with.append(width)
        return super().pack(payload, width)


def payload(width: int) -> memoryview:
    values = np.random.default_rng(2).normal(size=BLOCK_BYTES // width).astype(np.float32)
    if width == 1:
        return memoryview(np.random.default_rng(3).bytes(BLOCK_BYTES))
    return memoryview(values.tobytes() if width == 4 else (values.view(np.uint32) >> 16).astype("<u2").tobytes())


def block(namespace: int = 0) -> BlockMeta:
    return BlockMeta(key(1), key(0), bytes([namespace]) * 32, 0, BLOCK_BYTES)


def test_the_width_of_the_elements_is_found_by_trying() -> None:
    planes = Clocked()
    packing = AutoPacking(planes, planes.clock)
    for width in (2, 4):
        assert packing.pack(block(width), payload(width)) is not None
    assert planes.packed_with == [2, 4]


def test_what_hardly_gets_smaller_is_left_as_it_is() -> None:
    planes = Clocked()
    packing = AutoPacking(planes, planes.clock)
    assert packing.pack(block(), payload(1)) is None
    assert planes.packed_with == []


def test_on_a_fast_link_nothing_is_packed_and_on_a_slow_one_it_is() -> None:
    planes = Clocked()
    packing = AutoPacking(planes, planes.clock)
    packing.sent(BLOCK_BYTES, BLOCK_BYTES * FAST_LINK_S_PER_BYTE)
    assert packing.pack(block(), payload(2)) is None
    for _ in range(20):
        packing.sent(BLOCK_BYTES, BLOCK_BYTES * SLOW_LINK_S_PER_BYTE)
    assert packing.pack(block(), payload(2)) is not None


def test_packing_that_became_slow_is_given_up_and_tried_again_later() -> None:
    planes = Clocked()
    packing = AutoPacking(planes, planes.clock)
    packing.sent(BLOCK_BYTES, BLOCK_BYTES * 1e-8)
    assert packing.pack(block(), payload(2)) is not None
    planes.s_per_byte = 1e-6
    assert packing.pack(block(), payload(2)) is not None
    for _ in range(TRY_AGAIN_BLOCKS):
        assert packing.pack(block(), payload(2)) is None
    planes.s_per_byte = 1e-9
    assert packing.pack(block(), payload(2)) is not None


def test_the_time_of_small_objects_says_nothing_of_the_link() -> None:
    planes = Clocked()
    packing = AutoPacking(planes, planes.clock)
    packing.sent(BLOCK_BYTES, BLOCK_BYTES * FAST_LINK_S_PER_BYTE)
    for _ in range(100):
        packing.sent(100, 1.0)
    assert packing.pack(block(), payload(2)) is None


def test_namespaces_are_remembered_up_to_a_bound() -> None:
    planes = Clocked()
    packing = AutoPacking(planes, planes.clock)
    short = memoryview(bytes(1000))
    for number in range(200):
        packing.pack(BlockMeta(key(1), key(0), number.to_bytes(32, "little"), 0, 1000), short)
    assert len(packing._namespaces) == 64
