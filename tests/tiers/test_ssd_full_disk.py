"""The SSD tier on a file system that really is full: what is there is read, what goes makes room, nothing else."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.outcome import Outcome
from tests.support.blocks import key, meta
from tests.support.ssd import fetched, store
from tiers.ssd import SsdTier

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root, where it may mount, can make a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def opened(disk: Path, max_bytes: int = 8 * MIB) -> SsdTier:
    return SsdTier(disk / "ssd", max_bytes=max_bytes, lock_wait_s=0.0)


def fill(disk: Path) -> None:
    """Take what is left of the disk, to the last page."""
    with open(disk / "other", "ab", buffering=0) as file:
        try:
            while file.write(bytes(4096)) == 4096:
                pass
        except OSError:
            pass
    status = os.statvfs(disk)
    assert status.f_bavail == 0


def test_a_full_disk_is_evicted_from_and_written_to_again(disk: Path) -> None:
    """A deletion, too, writes pages of the index. On a full disk there were none, so nothing could be evicted, and so
    nothing could ever be stored again."""
    tier = opened(disk)
    blocks = [meta(number) for number in range(60)]
    assert store(tier, blocks) == [Outcome.OK] * 60
    fill(disk)
    room = len([outcome for outcome in store(tier, [meta(100 + i) for i in range(400)]) if outcome is Outcome.OK])
    assert tier.delete([block.key for block in blocks[:30]]) == [Outcome.OK] * 30
    assert store(tier, [meta(1000 + i) for i in range(30)]) == [Outcome.OK] * 30
    assert fetched(tier, blocks) == [Outcome.MISS] * 30 + [Outcome.OK] * 30
    for turn in range(20):
        assert tier.delete([key(1000 + i) for i in range(30 * turn, 30 * turn + 30)]) == [Outcome.OK] * 30
        assert store(tier, [meta(1000 + i) for i in range(30 * turn + 30, 30 * turn + 60)]) == [Outcome.OK] * 30
    assert tier.usage().blocks == 60 + room
    tier.check_integrity()
    tier.close()


def test_a_full_disk_is_opened_again(disk: Path) -> None:
    tier = opened(disk)
    blocks = [meta(number) for number in range(60)]
    store(tier, blocks)
    tier.close()
    fill(disk)
    tier = opened(disk)
    assert fetched(tier, blocks) == [Outcome.OK] * 60
    assert tier.delete([block.key for block in blocks[:30]]) == [Outcome.OK] * 30
    assert store(tier, blocks[:30]) == [Outcome.OK] * 30
    tier.close()


def test_a_full_disk_that_is_over_a_lower_cap_too_is_brought_below_it(disk: Path) -> None:
    tier = opened(disk)
    blocks = [meta(number) for number in range(400)]
    kept = [block for block, outcome in zip(blocks, store(tier, blocks), strict=True) if outcome is Outcome.OK]
    tier.close()
    fill(disk)
    tier = opened(disk, max_bytes=3 * MIB)
    assert tier.taken_bytes() <= 3 * MIB
    assert 0 < fetched(tier, kept).count(Outcome.OK) < len(kept)
    tier.check_integrity()
    tier.close()


def test_an_index_without_its_room_on_a_full_disk_gets_it_from_the_segments(disk: Path) -> None:
    """So it is where an index was made before its room was taken beforehand, or was restored by a tool that leaves
    holes."""
    tier = opened(disk)
    blocks = [meta(number) for number in range(200)]
    assert store(tier, blocks) == [Outcome.OK] * 200
    tier.close()
    index = disk / "ssd" / "index.mdb"
    content = index.read_bytes().rstrip(b"\0")
    index.write_bytes(content + bytes(-len(content) % 4096))
    fill(disk)
    tier = opened(disk)
    left = fetched(tier, blocks).count(Outcome.OK)
    assert 0 < left < 200
    assert tier.faults() == {"dropped_disk_full": 200 - left}
    tier.check_integrity()
    assert set(tier.delete([block.key for block in blocks])) == {Outcome.OK, Outcome.MISS}
    assert tier.usage().blocks == 0
    tier.close()


def test_a_disk_that_fills_up_in_the_middle_of_a_batch_costs_what_did_not_fit(disk: Path) -> None:
    tier = opened(disk, max_bytes=10 * MIB)
    store(tier, [meta(number) for number in range(60)])
    with open(disk / "other", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, os.statvfs(disk).f_bavail * 4096 - 2 * MIB)
    blocks = [meta(1000 + number, 100_000) for number in range(60)]
    outcomes = store(tier, blocks)
    assert set(outcomes) == {Outcome.OK, Outcome.FULL}
    assert fetched(tier, blocks) == [Outcome.OK if outcome is Outcome.OK else Outcome.MISS for outcome in outcomes]
    tier.check_integrity()
    tier.close()
