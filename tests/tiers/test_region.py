"""The shared region: what is refused, what is seen by both sides, what outlives a close."""

import errno
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.core.errors import ConfigError, TierUnavailable
from tiers import pages
from tiers.backing import Backing
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


def test_a_large_data_area_begins_at_a_huge_page(path: Path) -> None:
    region = Region.create(path, 32 << 20, EPOCH)
    again = Region.attach(path, EPOCH)
    assert path.stat().st_size == (2 << 20) + (32 << 20)
    region.view(0, 2)[:] = b"ok"
    assert bytes(again.view(0, 2)) == b"ok"
    region.close()
    again.close()


def test_a_region_of_huge_pages_is_a_whole_number_of_them(path: Path) -> None:
    """Its file must be, or it cannot be mapped; the attached side knows nothing of the page size."""
    region = Region.create(path, 5 << 19, EPOCH, backing=Backing(page_bytes=1 << 20))
    assert region.data_bytes == 2 << 20
    assert path.stat().st_size == 3 << 20
    again = Region.attach(path, EPOCH)
    assert again.data_bytes == 2 << 20
    region.close()
    again.close()


@pytest.mark.parametrize("policy", ["never", "always"])
def test_an_attached_region_knows_whether_it_lies_on_huge_pages(tmp_path: Path, policy: str) -> None:
    """Then the SSD tier lets the disk read and write its slots without a copy."""
    folder = tmp_path / "shm"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size=128m,huge={policy}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root, where it may mount, can choose a tmpfs's pages")
    try:
        region = Region.create(folder / "region", 33 << 20, EPOCH)
        again = Region.attach(folder / "region", EPOCH)
        assert region.is_huge() is again.is_huge() is (policy == "always")
        again.close()
        region.close()
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_prefaulted_region_in_dev_shm_lies_on_huge_pages_though_that_has_none_by_itself() -> None:
    system = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    kernel = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if kernel < (6, 1) or not system.exists() or "[deny]" in system.read_text():
        pytest.skip("this kernel makes no huge pages on demand")
    path = Path(f"/dev/shm/kvstore-test-{os.getpid()}-{time.monotonic_ns()}")
    region = Region.create(path, 65 << 20, EPOCH, prefault=lambda *_: None)
    try:
        again = Region.attach(path, EPOCH)
        assert region.is_huge()
        assert again.is_huge()
        assert again.address % (2 << 20) == 0
        assert path.stat().st_blocks * 512 == path.stat().st_size
        again.view((64 << 20) + 5, 4)[:] = b"last"
        assert bytes(region.view((64 << 20) + 5, 4)) == b"last"
        again.close()
    finally:
        region.close()
        region.unlink()


@pytest.mark.parametrize(("error", "asked"), [(0, 3), (errno.EINVAL, 1), (errno.ENOMEM, 1), (errno.EBUSY, 1)])
def test_where_the_kernel_has_no_more_huge_pages_the_rest_is_allocated_in_small_ones(
    monkeypatch: pytest.MonkeyPatch, error: int, asked: int
) -> None:
    """Each further try would have it move memory about for nothing."""
    calls: list[tuple[int, int, int]] = []
    collapse, populate, huge, step = 25, 23, 2 << 20, 64 << 20

    def madvise(address: int, num_bytes: int, advice: int) -> int:
        calls.append((address, num_bytes, advice))
        return error if advice == collapse else 0

    monkeypatch.setattr("tiers.pages._madvise", madvise)
    assert pages.populate(huge, 3 * step, 1, huge=True)
    assert [call[:2] for call in calls if call[2] == collapse] == [(huge + i * step, step) for i in range(asked)]
    assert [call for call in calls if call[1] > 4096 and call[2] == populate] == [
        (huge + i * step, step, populate) for i in range(3)
    ]


def test_a_page_that_is_in_use_this_moment_is_tried_again_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small page among thousands of huge ones would have the SSD tier copy all that it reads and writes."""
    busy = [3]
    asked: list[int] = []

    def madvise(address: int, num_bytes: int, advice: int) -> int:
        if advice != 25:
            return 0
        asked.append(address)
        busy[0] -= 1
        return errno.EAGAIN if busy[0] >= 0 else 0

    monkeypatch.setattr("tiers.pages._madvise", madvise)
    assert pages.populate(2 << 20, 128 << 20, 1, huge=True)
    assert len(asked) == 3 + 2
    asked.clear()
    busy[0] = 1000
    assert pages.populate(2 << 20, 128 << 20, 1, huge=True)
    assert 2 < len(asked) < 32


def test_a_file_system_that_is_full_is_told_before_huge_pages_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A touch would end the process."""
    asked: list[int] = []

    def madvise(address: int, num_bytes: int, advice: int) -> int:
        asked.append(advice)
        return errno.EFAULT

    monkeypatch.setattr("tiers.pages._madvise", madvise)
    with pytest.raises(OSError, match="No space left"):
        pages.populate(2 << 20, 64 << 20, 1, huge=True)
    assert asked == [23, 23]


def test_an_attached_region_can_be_populated_and_keeps_its_bytes(path: Path) -> None:
    region = Region.create(path, SIZE, EPOCH)
    region.view(PAGE_BYTES, 4)[:] = b"here"
    again = Region.attach(path, EPOCH)
    again.populate()
    assert bytes(again.view(PAGE_BYTES, 4)) == b"here"
    again.close()
    assert not again.populate()
    region.close()


def test_on_a_kernel_that_cannot_populate_the_region_is_whole_all_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiers.pages.populate", lambda *_, **__: False)
    seen: list[int] = []
    region = Region.create(path, SIZE, EPOCH, prefault=lambda done, _: seen.append(done))
    assert seen[-1] == path.stat().st_size <= path.stat().st_blocks * 512
    region.close()


def test_memory_that_may_not_be_locked_is_refused_with_the_limit(path: Path) -> None:
    script = (
        "import resource, sys; from pathlib import Path; from tiers.region import Region\n"
        "from tiers.backing import Backing; from kvstore.core.errors import ConfigError\n"
        "import ctypes; resource.setrlimit(resource.RLIMIT_MEMLOCK, (8192, 8192))\n"
        # CAP_IPC_LOCK (14) of the bounding set and with it of this process: root would not be limited.
        "libc = ctypes.CDLL(None); libc.prctl(24, 14, 0, 0, 0)\n"
        "import os; os.getuid() or os.setuid(65534)\n"
        "try: Region.create(Path(sys.argv[1]), 1 << 20, 1, backing=Backing(is_locked=True))\n"
        "except ConfigError as error: print(error)"
    )
    path.parent.chmod(0o777)
    done = subprocess.run(
        [sys.executable, "-c", script, f"/dev/shm/{path.parent.name}-locked"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "a limit of 8192 bytes" in done.stdout, done.stderr
    assert "RLIMIT_MEMLOCK" in done.stdout


def test_memory_can_be_locked_and_bound_where_that_is_allowed(path: Path) -> None:
    region = Region.create(path, SIZE, EPOCH, prefault=lambda *_: None, backing=Backing(numa_node=0))
    region.close()
    path.unlink()
    limit_bytes = pages.lock_limit_bytes()
    if limit_bytes is None or limit_bytes >= 2 * SIZE:
        Region.create(path, SIZE, EPOCH, prefault=lambda *_: None, backing=Backing(is_locked=True)).close()


def test_a_node_that_does_not_exist_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="NUMA node 1000"):
        Region.create(path, SIZE, EPOCH, backing=Backing(numa_node=1000))
    assert not path.exists()


def test_huge_pages_are_counted_in_our_mapping_alone(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "7f00000000-7f00200000 rw-s 00000000 00:01 7 /dev/shm/a\nShmemPmdMapped:     2048 kB\n"
        "7f00400000-7f00a00000 rw-s 00000000 00:01 7 /dev/shm/b\nRss: 6144 kB\nShmemPmdMapped:     4096 kB\n"
        "Shared_Hugetlb: 0 kB\nPrivate_Hugetlb: 2048 kB\nVmFlags: rd wr sh\n"
    )
    assert pages.huge_bytes(0x7F00400000, smaps) == 6 << 20
    assert pages.huge_bytes(0x7F00500000, smaps) == 0


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
