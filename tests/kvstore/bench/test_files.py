"""The plain files that the SSD tier is compared with, and whether their pages have left the cache."""

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.bench.files import PlainFile, drop_cache
from kvstore.bench.memory import PAGE_BYTES, Buffers


@pytest.mark.parametrize("direct", [False, True])
def test_a_plain_file_gives_back_what_was_written_from_a_cold_cache(tmp_path: Path, direct: bool) -> None:
    source, target = Buffers(4, 2 * PAGE_BYTES, 1), Buffers(4, 2 * PAGE_BYTES, 2)
    file = PlainFile(tmp_path / "plain", 4, 2 * PAGE_BYTES, direct=direct)
    try:
        with ThreadPoolExecutor(2) as threads:
            assert file.write([[(0, source.views[0]), (1, source.views[1])], [(3, source.views[3])]], threads) > 0
            assert drop_cache(tmp_path) == 0.0
            assert file.read([3, 0, 1], target.views, threads) > 0
    finally:
        file.close()
    assert [target.views[i] == source.views[i] for i in (0, 1, 3)] == [True] * 3
    assert not (tmp_path / "plain").exists()


def test_pages_that_stay_in_the_cache_are_noticed(tmp_path: Path) -> None:
    """What a process has locked is not dropped, and a read of it would measure memory."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * (8 * PAGE_BYTES))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8 * PAGE_BYTES) as mapping:
        start = ctypes.c_char.from_buffer(mapping)
        where = ctypes.c_void_p(ctypes.addressof(start))
        assert ctypes.CDLL(None).mlock(where, ctypes.c_size_t(8 * PAGE_BYTES)) == 0
        assert drop_cache(tmp_path) == 1.0
        del start
    assert drop_cache(tmp_path) == 0.0
