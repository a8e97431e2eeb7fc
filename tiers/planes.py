"""Lossless compression of KV: the bytes of all elements split into planes, and each plane packed where that pays.

The high byte of a 16-bit float (sign and exponent) takes few values, its low byte (mantissa) takes all of them; mixed,
as they lie in memory, the one hides the other. So

    a0 a1 b0 b1 c0 c1 …   ──►   a0 b0 c0 …  |  a1 b1 c1 …

and each plane is either stored as it is or entropy-coded by zstd. On the KV of SmolLM2-135M that leaves 69% of
bfloat16, 87% of float16, 85% of float32, at 1.3 to 1.9 GB/s and back at 2.8 to 3.5 (benchmarks/s3_compression.py).
Matches are rare, so zstd is told not to look for them: level 1 as it comes was a third as fast and packed less.

The packed form, little-endian:

    width, bits that say which planes are packed: 1 byte each │ length of each plane: 4 bytes each │ planes │ last bytes

`width` is the number of planes, and the last bytes are those that make no whole element.
"""

import struct
import threading
from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard

from kvstore.core.errors import CorruptBlock

WIDTHS: Final = (1, 2, 4)
_HEAD = struct.Struct("<BB")
_LENGTH = struct.Struct("<I")
_HASH_LOG, _MIN_MATCH = 6, 7
_Bytes = npt.NDArray[np.uint8]


class Planes:
    """Thread-safe."""

    @property
    def number(self) -> int:
        """As `Transform.number`."""
        return 1

    def __init__(self) -> None:
        # zstd's own objects belong to one thread each.
        self._local = threading.local()

    def pack(self, payload: memoryview, width: int) -> bytes:
        """Return the payload packed with elements of `width` bytes, at worst a few bytes longer than it was."""
        data = np.frombuffer(payload, np.uint8)
        num_elements = len(data) // width
        mask = 0
        parts: list[bytes | memoryview] = []
        for number, plane in enumerate(_split(data[: num_elements * width], width)):
            packed = self._compressor().compress(plane.data) if num_elements else b""
            if len(packed) < num_elements:
                mask |= 1 << number
                parts.append(packed)
            else:
                parts.append(plane.data)
        lengths = b"".join(_LENGTH.pack(len(part)) for part in parts)
        return b"".join((_HEAD.pack(width, mask), lengths, *parts, data[num_elements * width :].data))

    def unpack(self, packed: memoryview, into: memoryview) -> None:
        """As `Transform.unpack`. Takes no more memory than twice `into`, whatever `packed` claims."""
        if len(packed) < _HEAD.size:
            raise CorruptBlock("the packed payload is too short")
        width, mask = _HEAD.unpack_from(packed)
        at = _HEAD.size + width * _LENGTH.size
        if width not in WIDTHS or mask >> width or len(packed) < at:
            raise CorruptBlock("the packed payload does not begin like one")
        place = np.frombuffer(into, np.uint8)
        num_elements = len(place) // width
        planes = []
        for number in range(width):
            (num_bytes,) = _LENGTH.unpack_from(packed, _HEAD.size + number * _LENGTH.size)
            planes.append(self._plane(packed[at : at + num_bytes], num_elements, is_packed=bool(mask >> number & 1)))
            at += num_bytes
        rest = packed[at:]
        if len(rest) != len(place) - num_elements * width:
            raise CorruptBlock("the packed payload has another length than it says")
        _join(planes, place[: num_elements * width])
        place[num_elements * width :] = np.frombuffer(rest, np.uint8)

    def _plane(self, stored: memoryview, num_elements: int, *, is_packed: bool) -> _Bytes:
        plane: bytes | memoryview = stored
        if is_packed:
            try:
                # A frame says how long its content is, and zstd makes room for that much before it looks further.
                if zstandard.frame_content_size(stored) != num_elements:
                    raise CorruptBlock("a plane has another length than its payload")
                plane = self._decompressor().decompress(stored, max_output_size=num_elements, allow_extra_data=False)
            except zstandard.ZstdError as error:
                raise CorruptBlock("a plane cannot be unpacked") from error
        if len(plane) != num_elements:
            raise CorruptBlock("a plane has another length than its payload")
        return np.frombuffer(plane, np.uint8)

    def _compressor(self) -> zstandard.ZstdCompressor:
        if not hasattr(self._local, "compressor"):
            parameters = zstandard.ZstdCompressionParameters.from_level(
                1, hash_log=_HASH_LOG, min_match=_MIN_MATCH, write_content_size=True
            )
            self._local.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        compressor: zstandard.ZstdCompressor = self._local.compressor
        return compressor

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        if not hasattr(self._local, "decompressor"):
            self._local.decompressor = zstandard.ZstdDecompressor()
        decompressor: zstandard.ZstdDecompressor = self._local.decompressor
        return decompressor


PLANES: Final = Planes()


def _split(data: _Bytes, width: int) -> list[_Bytes]:
    if width == 1:
        return [data]
    if width == 2:
        # Twice as fast as strided copies.
        elements = data.view("<u2")
        return [elements.astype(np.uint8), (elements >> 8).astype(np.uint8)]
    return [np.ascontiguousarray(data[number::width]) for number in range(width)]


def _join(planes: list[_Bytes], place: _Bytes) -> None:
    if len(planes) == 2:
        elements = planes[1].astype("<u2")
        elements <<= 8
        elements |= planes[0]
        place.view("<u2")[:] = elements
        return
    for number, plane in enumerate(planes):
        place[number :: len(planes)] = plane
