"""Host memory that the GPU may copy from and to by itself: registering a mapped range, piece by piece."""

from typing import Any

import torch

# The driver pins a piece at a time, and a refusal tells how far it got.
PIECE_BYTES = 1 << 30
_PORTABLE = 1


class PinnedMemory:
    """The ranges that are pinned by this object. Not thread-safe: ranges are pinned at start and unpinned at the end.

    `runtime` is torch's binding of the CUDA runtime.
    """

    def __init__(self, runtime: Any = None) -> None:
        self._runtime = runtime
        self._ranges: dict[int, int] = {}

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin a page-aligned range of mapped memory. Raises MemoryError where the driver refuses; then nothing of the
        range stays pinned."""
        for start in range(0, num_bytes, PIECE_BYTES):
            error = self._cuda().cudaHostRegister(address + start, min(PIECE_BYTES, num_bytes - start), _PORTABLE)
            if int(error) != 0:
                self._unregister(address, start)
                raise MemoryError(f"cannot pin {num_bytes} bytes of host memory: {error} after {start} bytes")
        self._ranges[address] = num_bytes

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory is unmapped. Idempotent."""
        self._unregister(address, self._ranges.pop(address, 0))

    def unbroken(self, address: int, num_bytes: int) -> list[int]:
        """Return lengths that sum up to `num_bytes`, none of which crosses from one pinned piece into the next: a
        transfer that touches two registrations is refused, though they lie side by side."""
        for base, pinned_bytes in self._ranges.items():
            if base <= address < base + pinned_bytes:
                return _cut_at_pieces(address - base, num_bytes)
        return [num_bytes]

    def _unregister(self, address: int, num_bytes: int) -> None:
        for start in range(0, num_bytes, PIECE_BYTES):
            self._cuda().cudaHostUnregister(address + start)

    def _cuda(self) -> Any:
        if self._runtime is None:
            cuda: Any = torch.cuda
            self._runtime = cuda.cudart()
        return self._runtime


def _cut_at_pieces(offset: int, num_bytes: int) -> list[int]:
    lengths = []
    end = offset + num_bytes
    while offset < end:
        stop = min(end, (offset // PIECE_BYTES + 1) * PIECE_BYTES)
        lengths.append(stop - offset)
        offset = stop
    return lengths
