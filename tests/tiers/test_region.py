"""The shared region: what is refused, what is seen by both sides, what outlives a close."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.core.errors import ConfigError, TierUnavailable
from tiers.region import PAGE_BYTES, Region

EPOCH = 77
SIZE = 64 * PAGE_BYTES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "region"


def test_both_sides_see_bytes_and_generations(path: Path) -> None:
    daemon = Region.create(path, SIZE, EPOCH)
    engine = Region.attach(path, EPOCH)
    assert engine.data_bytes == SIZE
    engine.view(PAGE_BYTES, 5)[:] = b"hello"
    assert bytes(daemon.view(PAGE_BYTES, 5)) == b"hello"
    assert engine.generation(PAGE_BYTES) == 0
    assert daemon.bump(PAGE_BYTES) == 1
    assert engine.generation(PAGE_BYTES) == 1
    assert engine.generation(0) == engine.generation(2 * PAGE_BYTES) == 0
    daemon.close()
    engine.close()


def test_another_process_sees_the_same_region(path: Path) -> None:
    daemon = Region.create(path, SIZE, EPOCH)
    daemon.bump(0)
    script = (
        "import sys; from pathlib import Path; from tiers.region import Region\n"
        f"region = Region.attach(Path(sys.argv[1]), {EPOCH})\n"
        "region.view(8, 2)[:] = b'ok'; print(region.generation(0))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
    assert bytes(daemon.view(8, 2)) == b"ok"
    daemon.close()


def test_the_file_is_private_and_fully_allocated(path: Path) -> None:
    region = Region.create(path, SIZE + 100, EPOCH)
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 >= SIZE
    assert region.data_bytes == SIZE
    region.close()


def test_the_data_area_is_page_aligned(path: Path) -> None:
    region = Region.create(path, SIZE, EPOCH)
    assert region.address % PAGE_BYTES == 0
    region.close()


def test_prefault_reports_progress_up_to_the_whole(path: Path) -> None:
    seen: list[tuple[int, int]] = []
    region = Region.create(path, 130 << 20, EPOCH, prefault=lambda done, total: seen.append((done, total)))
    assert len(seen) == 3
    assert seen[-1][0] == seen[-1][1] > 130 << 20
    region.close()


def test_a_file_system_that_is_too_small_is_named_with_need_and_have(path: Path) -> None:
    room = os.statvfs(path.parent)
    with pytest.raises(ConfigError, match=r"needs \d+ bytes, but .* has \d+ free"):
        Region.create(path, 2 * room.f_blocks * room.f_frsize, EPOCH)
    assert not path.exists()


def test_an_existing_file_is_never_reused(path: Path) -> None:
    path.write_bytes(b"something")
    with pytest.raises(ConfigError):
        Region.create(path, SIZE, EPOCH)
    assert path.read_bytes() == b"something"


def test_a_region_of_another_epoch_is_refused(path: Path) -> None:
    Region.create(path, SIZE, EPOCH).close()
    with pytest.raises(TierUnavailable, match="another start"):
        Region.attach(path, EPOCH + 1)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 8192])
def test_a_file_that_is_no_region_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(TierUnavailable):
        Region.attach(path, EPOCH)


def test_a_truncated_region_is_refused(path: Path) -> None:
    Region.create(path, SIZE, EPOCH).close()
    os.truncate(path, SIZE)
    with pytest.raises(TierUnavailable, match="damaged"):
        Region.attach(path, EPOCH)


def test_a_missing_region_is_refused(path: Path) -> None:
    with pytest.raises(TierUnavailable):
        Region.attach(path, EPOCH)


def test_views_outside_of_the_data_area_are_refused(path: Path) -> None:
    region = Region.create(path, SIZE, EPOCH)
    for offset, num_bytes in [(-1, 1), (0, SIZE + 1), (SIZE, 1), (0, -1)]:
        with pytest.raises(ValueError):
            region.view(offset, num_bytes)
    for offset in (-PAGE_BYTES, 1, SIZE):
        with pytest.raises(ValueError):
            region.generation(offset)
    region.close()


def test_a_view_outlives_close_and_unlink(path: Path) -> None:
    region = Region.create(path, SIZE, EPOCH)
    view = region.view(0, 4)
    region.close()
    region.close()
    region.unlink()
    region.unlink()
    view[:] = b"late"
    assert bytes(view) == b"late"
    assert not path.exists()
