"""Decides, namespace by namespace, whether packing a block before it is sent saves time, by what is measured.

Packing costs CPU seconds per byte and saves the share of the transfer that is not sent:

    packs  if  ratio ≥ 1.1  and  (1 - 1/ratio) · seconds per byte sent  >  seconds per byte packed

All three are running means of this process's own blocks, taken where the work is done, so that what other threads take
of the CPU is in them. The ratio depends on the namespace (dtype, model), and so does the element width, which is tried
out on a sample: of 1, 2 and 4 bytes the one that packs best.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore.core.block import BlockMeta
from tiers.planes import PLANES, WIDTHS, Planes

MIN_RATIO: Final = 1.1
# What is not packed is tried again after this many blocks: the link may have become slower.
TRY_AGAIN_BLOCKS: Final = 64
_SAMPLE_BYTES = 256 << 10
# How much a new measurement counts.
_WEIGHT = 0.2
# The time of a small object is all latency.
_MIN_SENT_BYTES = 64 << 10
_MAX_NAMESPACES = 64


@dataclass(slots=True)
class _Namespace:
    """What was measured of one namespace's blocks."""

    width: int
    ratio: float
    pack_s_per_byte: float
    num_skipped: int = 0

    def measured(self, payload_bytes: int, packed_bytes: int, seconds: float) -> None:
        self.ratio = _mean(self.ratio, payload_bytes / packed_bytes)
        self.pack_s_per_byte = _mean(self.pack_s_per_byte, seconds / payload_bytes)


class AutoPacking:
    """Implements `tiers.codec.Transform`. Thread-safe."""

    def __init__(self, planes: Planes = PLANES, clock: Callable[[], float] = time.perf_counter) -> None:
        self._planes = planes
        self._clock = clock
        self._lock = threading.Lock()
        self._namespaces: OrderedDict[bytes, _Namespace] = OrderedDict()
        self._sent_s_per_byte: float | None = None

    @property
    def number(self) -> int:
        return self._planes.number

    def sent(self, num_bytes: int, seconds: float) -> None:
        """Take note of how long it took to send an object of `num_bytes`."""
        if num_bytes < _MIN_SENT_BYTES:
            return
        with self._lock:
            measured = seconds / num_bytes
            known = self._sent_s_per_byte
            self._sent_s_per_byte = measured if known is None else _mean(known, measured)

    def pack(self, meta: BlockMeta, payload: memoryview) -> bytes | None:
        found = self._find(meta.namespace, payload)
        with self._lock:
            if not self._pays(found):
                found.num_skipped += 1
                return None
        packed, seconds = self._timed(payload, found.width)
        with self._lock:
            found.measured(len(payload), len(packed), seconds)
        return packed

    def unpack(self, packed: memoryview, into: memoryview) -> None:
        self._planes.unpack(packed, into)

    def _pays(self, found: _Namespace) -> bool:
        if found.ratio < MIN_RATIO:
            return False
        if self._sent_s_per_byte is None:
            return True
        return (1 - 1 / found.ratio) * self._sent_s_per_byte > found.pack_s_per_byte

    def _find(self, namespace: bytes, payload: memoryview) -> _Namespace:
        with self._lock:
            found = self._namespaces.get(namespace)
            if found is not None and found.num_skipped < TRY_AGAIN_BLOCKS:
                self._namespaces.move_to_end(namespace)
                return found
        # From the middle: a block's first tokens may be unlike the rest.
        start = max(0, len(payload) - _SAMPLE_BYTES) // 2 & ~(max(WIDTHS) - 1)
        sample = payload[start : start + _SAMPLE_BYTES]
        tried = {width: self._timed(sample, width) for width in WIDTHS}
        width = min(tried, key=lambda width: len(tried[width][0]))
        packed, seconds = tried[width]
        found = _Namespace(width, len(sample) / len(packed), seconds / len(sample))
        with self._lock:
            self._namespaces[namespace] = found
            while len(self._namespaces) > _MAX_NAMESPACES:
                self._namespaces.popitem(last=False)
        return found

    def _timed(self, payload: memoryview, width: int) -> tuple[bytes, float]:
        began_s = self._clock()
        packed = self._planes.pack(payload, width)
        return packed, self._clock() - began_s


def _mean(known: float, measured: float) -> float:
    return known + _WEIGHT * (measured - known)
