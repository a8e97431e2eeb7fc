"""The SSD tier: what survives a restart, that the disk cannot fill, and how it is read and written."""

import errno
import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.block import BlockMeta
from kvstore.core.errors import ConfigError, TierUnavailable
from kvstore.core.outcome import Outcome
from tests.support.blocks import key, meta, payload, recovered
from tests.support.ssd import MIB, OPEN, fetched, segment_files, store
from tiers.region import Region
from tiers.space import DiskSpace
from tiers.ssd import SsdTier

# ---------------------------------------------------------------- restarts


def test_blocks_survive_a_restart_with_their_meta(opened: OPEN) -> None:
    blocks = [meta(i, 5000 + 4096 * (i % 2)) for i in range(20)]
    assert store(opened(), blocks) == [Outcome.OK] * 20
    tier = opened()
    assert sorted(recovered(tier), key=lambda block: block.depth) == blocks
    assert fetched(tier, blocks) == [Outcome.OK] * 20
    assert tier.faults() == {}
    tier.check_integrity()


def test_more_blocks_than_one_scan_reads_at_once_are_all_recovered(
    opened: OPEN, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiers.index._SCAN_ENTRIES", 100)
    blocks = [meta(i, 1) for i in range(1500)]
    store(opened(max_bytes=64 * MIB), blocks)
    assert {block.key for block in recovered(opened(max_bytes=64 * MIB))} == {block.key for block in blocks}


def test_room_that_was_never_published_is_free_after_a_restart(opened: OPEN, folder: Path) -> None:
    tier = opened()
    store(tier, [meta(1)])
    shutil.copy(segment_files(folder)[0], folder / "segments" / "00000777-00012288.seg")
    tier = opened()
    assert len(segment_files(folder)) == 1
    assert fetched(tier, [meta(1)]) == [Outcome.OK]


def test_deleted_blocks_stay_deleted(opened: OPEN) -> None:
    tier = opened()
    store(tier, [meta(1), meta(2)])
    assert tier.delete([key(1), key(3)]) == [Outcome.OK, Outcome.MISS]
    tier = opened()
    assert tier.contains([key(1), key(2)]) == [Outcome.MISS, Outcome.OK]


def test_files_and_folders_are_private(opened: OPEN, folder: Path) -> None:
    tier = opened()
    store(tier, [meta(1)])
    tier.records.put("sessions/a", b"text")
    for path in [folder, *folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


# ---------------------------------------------------------------- the disk cannot fill


def test_a_full_tier_answers_full_and_goes_on(opened: OPEN) -> None:
    tier = opened(max_bytes=4 * MIB)
    blocks = [meta(i) for i in range(400)]
    outcomes = store(tier, blocks)
    assert set(outcomes) == {Outcome.OK, Outcome.FULL}
    kept = [block for block, outcome in zip(blocks, outcomes, strict=True) if outcome is Outcome.OK]
    assert fetched(tier, kept) == [Outcome.OK] * len(kept)
    usage = tier.usage()
    assert usage.used_bytes == len(kept) * 12288
    assert usage.capacity_bytes is not None
    assert usage.used_bytes <= usage.capacity_bytes < usage.used_bytes * 1.1
    assert tier.taken_bytes() <= 4 * MIB
    tier.delete([block.key for block in kept[:50]])
    assert store(tier, [meta(1000 + i) for i in range(50)]) == [Outcome.OK] * 50
    tier.check_integrity()


def test_most_of_the_cap_can_be_used(opened: OPEN) -> None:
    tier = opened(max_bytes=64 * MIB)
    outcomes = [store(tier, [meta(i, 737_280)])[0] for i in range(90)]
    assert outcomes.count(Outcome.OK) * 741_376 > 0.8 * 64 * MIB


def test_room_moves_to_blocks_of_another_size(opened: OPEN) -> None:
    tier = opened(max_bytes=8 * MIB)
    small = [meta(i, 4096) for i in range(2000)]
    kept = [block for block, outcome in zip(small, store(tier, small), strict=True) if outcome is Outcome.OK]
    assert store(tier, [meta(5000, 100_000)]) == [Outcome.FULL]
    tier.delete([block.key for block in kept])
    assert store(tier, [meta(5000 + i, 100_000) for i in range(40)]) == [Outcome.OK] * 40
    assert tier.taken_bytes() <= 8 * MIB
    tier.check_integrity()


def test_churn_never_takes_more_than_the_cap(opened: OPEN) -> None:
    tier = opened(max_bytes=4 * MIB)
    held: list[BlockMeta] = []
    for turn in range(60):
        batch = [meta(turn * 100 + i, 4096 * (1 + (turn // 10 + i) % 3)) for i in range(20)]
        outcomes = store(tier, batch)
        held += [block for block, outcome in zip(batch, outcomes, strict=True) if outcome is Outcome.OK]
        if Outcome.FULL in outcomes:
            tier.delete([block.key for block in held[: len(held) // 2]])
            del held[: len(held) // 2]
        assert tier.taken_bytes() <= 4 * MIB
    assert fetched(tier, held) == [Outcome.OK] * len(held)
    tier.check_integrity()


def test_nothing_grows_below_the_free_space_floor(opened: OPEN, folder: Path) -> None:
    status = os.statvfs(folder.parent)
    tier = opened(min_free_bytes=status.f_blocks * status.f_frsize)
    assert store(tier, [meta(1)]) == [Outcome.FULL]
    assert tier.usage().capacity_bytes == 0
    assert segment_files(folder) == []


def test_below_the_floor_empty_segments_go_back_to_the_disk(opened: OPEN, folder: Path) -> None:
    store(opened(), [meta(1)])
    status = os.statvfs(folder)
    tier = opened(min_free_bytes=status.f_blocks * status.f_frsize)
    assert fetched(tier, [meta(1)]) == [Outcome.OK]
    assert tier.delete([key(1)]) == [Outcome.OK]
    assert segment_files(folder) == []


def test_a_disk_that_is_full_answers_full(opened: OPEN, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened()

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_room)
        assert store(tier, [meta(1)]) == [Outcome.FULL]
    assert store(tier, [meta(1)]) == [Outcome.OK]
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", no_room)
        assert store(tier, [meta(2)]) == [Outcome.FULL]
    assert tier.faults() == {"disk_full": 1}
    assert store(tier, [meta(2)]) == [Outcome.OK]
    tier.check_integrity()


def test_an_index_that_runs_full_is_given_more_room_while_there_is_some(
    opened: OPEN, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its due it cannot run full; here it is due far too little."""
    monkeypatch.setattr(DiskSpace, "index_bytes", lambda _self, _num_slots: 64 << 10)
    tier = opened(max_bytes=4 * MIB, segment_bytes=MIB // 4)
    blocks = [meta(i, 1) for i in range(600)]
    outcomes: list[Outcome] = []
    for start in range(0, 600, 40):
        outcomes += store(tier, blocks[start : start + 40])
        assert tier.taken_bytes() <= 4 * MIB
    assert set(outcomes) == {Outcome.OK, Outcome.FULL}
    assert outcomes.count(Outcome.OK) > 300
    assert fetched(tier, blocks).count(Outcome.OK) == outcomes.count(Outcome.OK)
    deleted = tier.delete([block.key for block in blocks])
    assert deleted.count(Outcome.OK) == outcomes.count(Outcome.OK)
    assert tier.usage().blocks == 0
    tier.check_integrity()


def test_a_disk_that_fails_is_unavailable_and_stores_nothing(opened: OPEN, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened()
    store(tier, [meta(1)])

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fails)
        assert store(tier, [meta(2)]) == [Outcome.UNAVAILABLE]
    assert tier.contains([key(2)]) == [Outcome.MISS]
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails)
        assert fetched(tier, [meta(1)]) == [Outcome.CORRUPT]
    assert tier.faults() == {"write_error": 1, "corrupt": 1}
    tier.check_integrity()


def test_a_start_over_the_cap_drops_whole_segments_first(opened: OPEN) -> None:
    tier = opened(max_bytes=16 * MIB)
    blocks = [meta(i) for i in range(900)]
    assert store(tier, blocks) == [Outcome.OK] * 900
    tier = opened(max_bytes=4 * MIB)
    assert tier.taken_bytes() <= 4 * MIB
    outcomes = fetched(tier, blocks)
    assert 100 < outcomes.count(Outcome.OK) < 400
    assert tier.faults() == {"dropped_over_cap": outcomes.count(Outcome.MISS)}
    assert tier.usage().blocks == outcomes.count(Outcome.OK) == len(recovered(tier))
    tier.check_integrity()


def test_what_a_kill_while_compacting_left_goes_at_the_next_start(opened: OPEN, folder: Path) -> None:
    """The half-written copy of the index stayed, beyond the cap, until the next time the index was compacted."""
    opened()
    (folder / "index.mdb.compact").write_bytes(bytes(MIB))
    opened()
    assert not (folder / "index.mdb.compact").exists()


def test_an_index_that_is_larger_than_the_cap_allows_is_rewritten(opened: OPEN, folder: Path) -> None:
    tier = opened(max_bytes=64 * MIB, segment_bytes=MIB // 4)
    store(tier, [meta(i, 1) for i in range(5000)])
    before = (folder / "index.mdb").stat().st_size
    tier = opened(max_bytes=4 * MIB)
    assert tier.taken_bytes() <= 4 * MIB
    assert (folder / "index.mdb").stat().st_size < before
    assert 0 < tier.usage().blocks < 5000
    tier.check_integrity()


@pytest.mark.parametrize("options", [{"max_bytes": 1000}, {"max_bytes": 2 * MIB, "max_record_bytes": 2 * MIB}])
def test_a_cap_that_leaves_no_room_for_blocks_is_refused(opened: OPEN, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="max_bytes"):
        opened(**options)


# ---------------------------------------------------------------- processes, threads, closing


def test_a_second_owner_is_refused_and_told_who_has_it(opened: OPEN, folder: Path) -> None:
    opened()
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on "):
        SsdTier(folder, max_bytes=16 * MIB, lock_wait_s=0.0)


def test_a_second_owner_waits_for_one_that_is_closing(opened: OPEN, folder: Path) -> None:
    first = opened()
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 1:
            first.close()

    second = SsdTier(folder, max_bytes=16 * MIB, lock_wait_s=5.0, clock=lambda: now[0], sleep=sleep)
    second.close()


def test_a_path_that_cannot_be_a_folder_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierUnavailable):
        SsdTier(tmp_path / "file", max_bytes=16 * MIB)


def test_a_closed_tier_answers_unavailable(opened: OPEN) -> None:
    tier = opened()
    tier.close()
    tier.close()
    assert store(tier, [meta(1)]) == fetched(tier, [meta(1)]) == [Outcome.UNAVAILABLE]
    assert tier.contains([key(1)]) == tier.delete([key(1)]) == [Outcome.UNAVAILABLE]
    with pytest.raises(TierUnavailable):
        tier.records.get("a")


def test_a_slot_is_not_reused_while_an_older_read_runs(opened: OPEN, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened()
    store(tier, [meta(1)])
    is_reading, may_go_on = threading.Event(), threading.Event()
    preadv = os.preadv
    outcomes: list[Outcome] = []

    def slow_preadv(*arguments: Any) -> int:
        is_reading.set()
        assert may_go_on.wait(30)
        return preadv(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", slow_preadv)
        reader = threading.Thread(target=lambda: outcomes.extend(fetched(tier, [meta(1)])))
        reader.start()
        assert is_reading.wait(30)
        tier.delete([key(1)])
        tier._segments._segments[1].cursor = 0
        store(tier, [meta(2)])
        may_go_on.set()
        reader.join()
    assert outcomes == [Outcome.OK]
    assert fetched(tier, [meta(1), meta(2)]) == [Outcome.MISS, Outcome.OK]
    assert tier.faults() == {}
    tier.check_integrity()


def test_readers_beside_a_writer_never_see_wrong_bytes(opened: OPEN) -> None:
    tier = opened(max_bytes=4 * MIB)
    blocks = [meta(i) for i in range(120)]
    faults: list[BaseException] = []
    is_done = threading.Event()

    def read_all() -> None:
        try:
            while not is_done.is_set():
                assert Outcome.CORRUPT not in fetched(tier, blocks)
        except BaseException as error:
            faults.append(error)

    readers = [threading.Thread(target=read_all) for _ in range(3)]
    for reader in readers:
        reader.start()
    for turn in range(40):
        part = blocks[turn % 4 * 30 :][:30]
        store(tier, part)
        tier.delete([block.key for block in blocks[(turn + 2) % 4 * 30 :][:30]])
    is_done.set()
    for reader in readers:
        reader.join()
    assert faults == []
    assert tier.faults() == {}
    tier.check_integrity()


# ---------------------------------------------------------------- direct I/O


def test_blocks_go_straight_between_the_region_and_the_disk(opened: OPEN, tmp_path: Path) -> None:
    region = Region.create(tmp_path / "region", 40 * 8192, 1)
    tier = opened()
    blocks = [meta(i) for i in range(20)]
    for i, block in enumerate(blocks):
        region.view(i * 8192, 8192)[:] = payload(block)
    assert tier.write(blocks, [region.view(i * 8192, 8192) for i in range(20)]) == [Outcome.OK] * 20
    into = [region.view((20 + i) * 8192, 8192) for i in range(20)]
    assert tier.read(blocks, into) == [Outcome.OK] * 20
    assert all(view == payload(block) for view, block in zip(into, blocks, strict=True))
    del into
    region.close()


def test_a_file_system_without_direct_io_is_used_through_the_page_cache(
    opened: OPEN, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open
    refused = []

    def no_direct(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "invalid argument")
        return real_open(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", no_direct)
    tier = opened()
    blocks = [meta(i, 5000) for i in range(20)]
    assert store(tier, blocks) == [Outcome.OK] * 20
    assert fetched(tier, blocks) == [Outcome.OK] * 20
    assert refused


def test_direct_io_that_is_refused_at_the_first_write_is_given_up(
    opened: OPEN, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev
    is_refused: list[bool] = []

    def refuse_once(*arguments: Any) -> int:
        if not is_refused:
            is_refused.append(True)
            raise OSError(errno.EINVAL, "invalid argument")
        return real(*arguments)

    monkeypatch.setattr(os, "pwritev", refuse_once)
    tier = opened()
    assert store(tier, [meta(1)]) == [Outcome.OK]
    assert fetched(tier, [meta(1)]) == [Outcome.OK]


def test_short_reads_and_writes_are_completed(opened: OPEN, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_page(call: Callable[..., int]) -> Callable[..., int]:
        return lambda fd, vector, offset: call(fd, [vector[0][:4096]], offset)

    monkeypatch.setattr(os, "pwritev", one_page(os.pwritev))
    monkeypatch.setattr(os, "preadv", one_page(os.preadv))
    tier = opened()
    assert store(tier, [meta(1), meta(2)]) == [Outcome.OK] * 2
    assert fetched(tier, [meta(1), meta(2)]) == [Outcome.OK] * 2
