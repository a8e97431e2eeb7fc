"""A file in memory: where it lies, and how long."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiers.mapping import Mapping

HUGE = 2 << 20


def opened(path: Path, num_bytes: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("num_bytes", [4096, HUGE, 3 * HUGE + 4096])
def test_it_is_the_file_and_begins_at_a_huge_page(tmp_path: Path, num_bytes: int) -> None:
    descriptor = opened(tmp_path / "file", num_bytes)
    mapping = Mapping(descriptor, num_bytes)
    os.close(descriptor)
    assert mapping.address % HUGE == 0
    assert len(mapping.view) == num_bytes
    mapping.view[-3:] = b"end"
    assert (tmp_path / "file").read_bytes()[-3:] == b"end"
    mapping.close()
    assert not is_mapped(tmp_path / "file")


def test_views_outlive_it_and_the_last_one_unmaps_the_file(tmp_path: Path) -> None:
    descriptor = opened(tmp_path / "file", HUGE)
    mapping = Mapping(descriptor, HUGE)
    os.close(descriptor)
    part = mapping.view[100:105]
    mapping.close()
    mapping.close()
    part[:] = b"still"
    assert (tmp_path / "file").read_bytes()[100:105] == b"still"
    del mapping, part
    assert not is_mapped(tmp_path / "file")


def test_where_there_is_no_room_to_choose_from_it_begins_anywhere(tmp_path: Path) -> None:
    script = (
        "import os, resource, sys; from pathlib import Path; from tiers.mapping import Mapping\n"
        "descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); os.ftruncate(descriptor, 64 << 20)\n"
        "pages = int(Path('/proc/self/statm').read_text().split()[0])\n"
        "limit = pages * 4096 + (65 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "mapping = Mapping(descriptor, 64 << 20)\n"
        "mapping.view[-4:] = b'last'; mapping.close(); print('mapped')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "file")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "mapped", done.stderr
    assert (tmp_path / "file").read_bytes()[-4:] == b"last"


def test_what_cannot_be_mapped_is_refused(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError, match="Permission denied"):
        Mapping(descriptor, 4096)
    os.close(descriptor)
