"""Host memory that the GPU may copy from and to by itself: registering a mapped range, piece by piece.

One registration of a very large range fails on some drivers (Mooncake's issue 1382: above 64 GiB), and tells nothing of
how far it came. Pieces have one size, counted from where the range begins, and a transfer is cut where they meet:
blocks of several sizes share the range, so no border lies between slots of all of them. Of 2 MiB blocks one in 512 is
cut at the most.
"""

from collections.abc import Callable
from typing import Any

import torch

# Whole huge pages, and small enough that whoever waits for one piece does not wait for long.
PIECE_BYTES = 1 << 30
_PORTABLE = 1


class PinnedMemory:
    """The ranges that are pinned by this object. One thread pins and unpins, others may ask meanwhile.

    `runtime` is torch's binding of the CUDA runtime.
    """

    def __init__(self, runtime: Any = None) -> None:
        self._runtime = runtime
        # Replaced, never changed, so that others can read it.
        self._ranges: dict[int, int] = {}

    def pin(self, address: int, num_bytes: int, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Pin a page-aligned range of mapped memory; asks before each piece whether it goes on. Raises MemoryError
        where the driver refuses. Then, and where it does not go on, nothing of the range stays pinned.

        Transfers may run meanwhile: from here on they are cut at the pieces, of which each is pinned or not.
        """
        self._ranges = {**self._ranges, address: num_bytes}
        for start in range(0, num_bytes, PIECE_BYTES):
            error = 0
            if goes_on():
                error = int(
                    self._cuda().cudaHostRegister(address + start, min(PIECE_BYTES, num_bytes - start), _PORTABLE)
                )
                if error == 0:
                    continue
            self._unregister(address, start)
            self._forget(address)
            if error:
                raise MemoryError(f"cannot pin {num_bytes} bytes of host memory: {error} after {start} bytes")
            return

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory is unmapped. Idempotent."""
        self._unregister(address, self._ranges.get(address, 0))
        self._forget(address)

    def unbroken(self, address: int, num_bytes: int) -> list[int]:
        """Return lengths that sum up to `num_bytes`, none of which crosses from one pinned piece into the next: a
        transfer that touches two registrations is refused, though they lie side by side."""
        for base, pinned_bytes in self._ranges.items():
            if base <= address < base + pinned_bytes:
                return _cut_at_pieces(address - base, num_bytes)
        return [num_bytes]

    def _forget(self, address: int) -> None:
        self._ranges = {begin: size for begin, size in self._ranges.items() if begin != address}

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
