"""Packing by byte planes: never another bit, never more memory than the payload is worth."""

import contextlib
import random
import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import CorruptBlock
from tiers.planes import PLANES, WIDTHS

widths = st.sampled_from(WIDTHS)


def unpacked(packed: bytes, num_bytes: int) -> bytes:
    into = bytearray(num_bytes)
    PLANES.unpack(memoryview(packed), memoryview(into))
    return bytes(into)


def floats(count: int, width: int) -> bytes:
    """Values such as KV has, as bfloat16 or float32."""
    values = np.random.default_rng(1).normal(size=count).astype(np.float32)
    return values.tobytes() if width == 4 else (values.view(np.uint32) >> 16).astype("<u2").tobytes()


@given(st.binary(max_size=300), widths)
def test_any_bytes_come_back(payload: bytes, width: int) -> None:
    assert unpacked(PLANES.pack(memoryview(payload), width), len(payload)) == payload


@given(st.integers(1, 5000), st.integers(0, 3), widths, st.integers(0, 255))
def test_repetitive_bytes_of_any_length_come_back(count: int, extra: int, width: int, step: int) -> None:
    payload = bytes(i * step & 0xFF for i in range(count)) + bytes(extra)
    assert unpacked(PLANES.pack(memoryview(payload), width), len(payload)) == payload


@pytest.mark.parametrize(("width", "ratio"), [(2, 1.3), (4, 1.1)])
def test_floats_take_fewer_bytes_by_planes_than_as_they_lie(width: int, ratio: float) -> None:
    payload = floats(100_000, width)
    packed = PLANES.pack(memoryview(payload), width)
    assert len(payload) / len(packed) > ratio
    assert len(packed) < len(PLANES.pack(memoryview(payload), 1))
    assert unpacked(packed, len(payload)) == payload


def test_what_cannot_be_packed_grows_by_its_head_alone() -> None:
    payload = random.Random(1).randbytes(10_000)
    for width in WIDTHS:
        assert len(PLANES.pack(memoryview(payload), width)) == len(payload) + 2 + 4 * width


@given(st.binary(max_size=200), st.integers(0, 100))
def test_bytes_that_were_never_packed_are_corrupt_or_of_the_right_length(packed: bytes, num_bytes: int) -> None:
    with contextlib.suppress(CorruptBlock):
        unpacked(packed, num_bytes)


@given(st.data(), widths)
def test_a_changed_byte_is_corrupt_or_other_bytes_and_no_other_fault(data: st.DataObject, width: int) -> None:
    payload = floats(200, 2)
    packed = bytearray(PLANES.pack(memoryview(payload), width))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(CorruptBlock):
        unpacked(bytes(packed), len(payload))


def test_a_frame_that_would_fill_the_memory_is_refused() -> None:
    """A few bytes of zstd can stand for gigabytes, and zstd makes room for what a frame says of itself."""
    bomb = zstandard.compress(bytes(256 << 20))
    packed = struct.pack("<BBI", 1, 1, len(bomb)) + bomb
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBlock, match="another length"):
            unpacked(packed, 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_threads_do_not_mix_their_payloads() -> None:
    payloads = [floats(20_000 + 1000 * number, 2) for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        packed = list(pool.map(lambda payload: PLANES.pack(memoryview(payload), 2), payloads * 4))
        found = list(pool.map(unpacked, packed, [len(payload) for payload in payloads * 4]))
    assert found == payloads * 4
