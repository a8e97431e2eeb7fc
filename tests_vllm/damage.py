"""Damages stored bytes behind their owner's back."""

import struct
from pathlib import Path

import numpy as np

_PAGE_BYTES = 4096
# Room for what may stand at the head of a record, so that it is the payload that changes.
_SPARED_BYTES = 1024
# magic, version, reserved, epoch, data_bytes, data_start: see tiers/region.py.
_REGION_HEADER = struct.Struct("<8sIIQQQ")


def flip_signs(folder: Path, suffix: str) -> int:
    """Change the sign of most float32 numbers in every file with that suffix below `folder`; return how many."""
    flipped = 0
    for path in sorted(folder.rglob(f"*{suffix}")):
        pages = _pages(path, 0)
        pages[:, _SPARED_BYTES + 3 :: 4] ^= 0x80
        flipped += pages[:, _SPARED_BYTES + 3 :: 4].size
    return flipped


def shuffle_region(shm_dir: Path) -> None:
    """Turn round every page of the blocks in RAM, in the one region that lies in the folder."""
    pages = _data_of(shm_dir)
    pages[:] = pages[:, ::-1].copy()


def flip_some(shm_dir: Path, every: int) -> None:
    """Change a byte in each `every`-th page of the blocks in RAM, in the one region that lies in the folder."""
    pages = _data_of(shm_dir)
    pages[::every, _SPARED_BYTES] ^= 0x80


def _data_of(shm_dir: Path) -> np.ndarray:
    (path,) = shm_dir.iterdir()
    with path.open("rb") as file:
        start = _REGION_HEADER.unpack(file.read(_REGION_HEADER.size))[5]
    return _pages(path, start)


def _pages(path: Path, start: int) -> np.ndarray:
    """Map the file's pages from `start` on, [num_pages, page_bytes] uint8."""
    mapped = np.memmap(path, np.uint8, "r+")
    end = len(mapped) - (len(mapped) - start) % _PAGE_BYTES
    return mapped[start:end].reshape(-1, _PAGE_BYTES)
