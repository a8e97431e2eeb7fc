"""RAM that is too small, disks that are full, damaged, or gone, and workers that die: requests are still answered."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.core.outcome import Outcome, TierKind
from tests.support.chats import Prefix, namespace
from tests.support.daemons import DaemonProcess, fetch, store, store_all
from tests.support.waiting import until

MakeDaemon = Callable[..., DaemonProcess]
NAMESPACE = namespace()


def taken_bytes(folder: Path) -> int:
    taken = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the daemon goes on meanwhile
            taken += path.lstat().st_blocks * 512
    return taken


def take_away(folder: Path) -> None:
    """Remove the folder at once: the daemon makes it anew when it notices, and that may be in the middle."""
    away = folder.with_name("away")
    folder.rename(away)
    shutil.rmtree(away)


def segments(daemon: DaemonProcess) -> list[Path]:
    found = sorted((daemon.ssd_dir / "segments").glob("*.seg"))
    assert found
    return found


def test_a_fetch_larger_than_ram_gets_every_block(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(ram_size="4MiB")
    prefix = Prefix(NAMESPACE, 1, 2000)
    with contextlib.closing(daemon.engine()) as client:
        store_all(client, NAMESPACE, prefix.keys)
        assert len(client.lookup(prefix.keys).tiers) == 2000
        outcomes, sources = fetch(client, NAMESPACE, prefix.keys)
        assert set(outcomes) == {Outcome.OK} and TierKind.SSD in sources
    assert daemon.errors() == {}


def test_stores_faster_than_the_disk_are_told_to_wait_and_nothing_is_lost(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(ram_size="4MiB")
    told: set[Outcome] = set()
    with contextlib.closing(daemon.engine()) as client:
        os.kill(daemon.worker("ssd"), signal.SIGSTOP)
        for seed in range(8):
            told |= set(store(client, NAMESPACE, Prefix(NAMESPACE, seed, 100).keys))
        assert told == {Outcome.OK, Outcome.BUSY}
        assert client.store(Prefix(NAMESPACE, 7, 100).keys, NAMESPACE.root(), 0).retry_s > 0
        os.kill(daemon.worker("ssd"), signal.SIGCONT)
        for seed in range(8):
            store_all(client, NAMESPACE, Prefix(NAMESPACE, seed, 100).keys)
        for seed in range(8):
            assert set(fetch(client, NAMESPACE, Prefix(NAMESPACE, seed, 100).keys)[0]) == {Outcome.OK}


def test_a_full_ssd_gives_up_the_coldest_and_never_takes_more_than_it_may(make_daemon: MakeDaemon) -> None:
    # By age: what the default policy keeps depends on how long everything took.
    daemon = make_daemon(ram_size="8MiB", ram_policy="lru", ssd_max_bytes="16MiB", ssd_segment_bytes="1MiB")
    with contextlib.closing(daemon.engine()) as client:
        for seed in range(12):
            store_all(client, NAMESPACE, Prefix(NAMESPACE, seed, 300).keys)
            assert taken_bytes(daemon.ssd_dir) <= 16 << 20
        daemon.wait_written()
        newest, oldest = Prefix(NAMESPACE, 11, 300).keys, Prefix(NAMESPACE, 0, 300).keys
        assert set(fetch(client, NAMESPACE, newest)[0]) == {Outcome.OK}
        assert len(client.lookup(oldest).tiers) == 0 and client.lookup(oldest).why == "evicted"
        ssd = daemon.stats()["tiers"]["ssd"]
        assert ssd["evicted_blocks"] > 1000 and ssd["blocks"] > 400
        assert taken_bytes(daemon.ssd_dir) <= 16 << 20
        daemon.restart()
        assert len(client.lookup(newest).tiers) > 200


@pytest.mark.parametrize("seed", range(2))
def test_flipped_bits_on_the_disk_become_misses(make_daemon: MakeDaemon, seed: int) -> None:
    daemon = make_daemon()
    prefix = Prefix(NAMESPACE, 1, 200)
    with contextlib.closing(daemon.engine()) as client:
        store_all(client, NAMESPACE, prefix.keys)
        daemon.wait_written()
        daemon.kill()
        damage = random.Random(seed)
        for path in segments(daemon):
            data = bytearray(path.read_bytes())
            for _ in range(20):
                data[damage.randrange(2_000_000)] ^= 1 << damage.randrange(8)
            path.write_bytes(data)
        daemon.start()
        assert client.lookup(prefix.keys).tiers == [TierKind.SSD] * 200
        outcomes, _ = fetch(client, NAMESPACE, prefix.keys)
        assert set(outcomes) == {Outcome.OK, Outcome.CORRUPT}
        num_bad = outcomes.count(Outcome.CORRUPT)
        assert 0 < num_bad <= 20
        until(lambda: daemon.errors().get("ssd_corrupt", 0) == num_bad)
        first_bad = outcomes.index(Outcome.CORRUPT)
        found = client.lookup(prefix.keys)
        assert len(found.tiers) == first_bad and found.why == "corrupt"
        store_all(client, NAMESPACE, prefix.keys)
        daemon.wait_written()
        client.evict(["ram"])
        assert set(fetch(client, NAMESPACE, prefix.keys)[0]) == {Outcome.OK}


def test_truncated_segments_become_misses(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    prefix = Prefix(NAMESPACE, 1, 200)
    with contextlib.closing(daemon.engine()) as client:
        store_all(client, NAMESPACE, prefix.keys)
        daemon.wait_written()
        client.evict(["ram"])
        os.truncate(segments(daemon)[0], 1_000_000)
        outcomes, _ = fetch(client, NAMESPACE, prefix.keys)
        assert outcomes.count(Outcome.OK) >= 50 and outcomes.count(Outcome.CORRUPT) >= 50
        assert set(outcomes) == {Outcome.OK, Outcome.CORRUPT}
        daemon.kill()
        os.truncate(segments(daemon)[0], 100_000)
        daemon.start()
        shown = prefix.keys[: max(1, len(client.lookup(prefix.keys).tiers))]
        assert set(fetch(client, NAMESPACE, shown)[0]) <= {Outcome.OK, Outcome.CORRUPT}
        store_all(client, NAMESPACE, prefix.keys)
        assert set(fetch(client, NAMESPACE, prefix.keys)[0]) == {Outcome.OK}


@pytest.mark.parametrize("what", ["index.mdb", "records.mdb", "segments", "everything"])
def test_files_that_are_removed_between_two_starts_cost_what_was_in_them(make_daemon: MakeDaemon, what: str) -> None:
    daemon = make_daemon()
    prefix = Prefix(NAMESPACE, 1, 20)
    with contextlib.closing(daemon.engine()) as client:
        store_all(client, NAMESPACE, prefix.keys)
        daemon.wait_written()
        daemon.kill()
        for path in [daemon.ssd_dir] if what == "everything" else daemon.ssd_dir.glob(f"{what}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        daemon.start()
        shown = client.lookup(prefix.keys).tiers
        assert len(shown) == (20 if what == "records.mdb" else 0)
        store_all(client, NAMESPACE, prefix.keys)
        daemon.wait_written()
        client.evict(["ram"])
        assert set(fetch(client, NAMESPACE, prefix.keys)[0]) == {Outcome.OK}


def test_a_disk_that_vanishes_under_the_daemon_stops_neither_it_nor_ram(make_daemon: MakeDaemon) -> None:
    """Asking how full the disk is raised, in the thread that writes: from then on no write was ever answered."""
    daemon = make_daemon(ram_size="4MiB", ram_policy="lru")
    with contextlib.closing(daemon.engine()) as client:
        store_all(client, NAMESPACE, Prefix(NAMESPACE, 1, 100).keys)
        daemon.wait_written()
        take_away(daemon.ssd_dir)
        for seed in range(2, 7):
            store_all(client, NAMESPACE, Prefix(NAMESPACE, seed, 300).keys)
            assert set(fetch(client, NAMESPACE, Prefix(NAMESPACE, seed, 300).keys)[0]) == {Outcome.OK}
        assert client.ping() > 0
    assert daemon.stop() == 0


def test_a_file_system_at_its_floor_stops_neither_the_daemon_nor_ram(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(ram_size="4MiB", ram_policy="lru", ssd_min_free_bytes="100TiB")
    with contextlib.closing(daemon.engine()) as client:
        for seed in range(4):
            store_all(client, NAMESPACE, Prefix(NAMESPACE, seed, 300).keys)
            assert set(fetch(client, NAMESPACE, Prefix(NAMESPACE, seed, 300).keys)[0]) == {Outcome.OK}
    assert daemon.errors()["ssd_write_full"] > 0
    assert daemon.stop() == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_others_fill_up_is_survived_and_used_again_when_there_is_room(
    make_daemon: MakeDaemon, small_disk: Path
) -> None:
    daemon = make_daemon(
        ram_size="4MiB",
        ram_policy="lru",
        ssd_path=small_disk / "ssd",
        ssd_max_bytes="1GiB",
        ssd_segment_bytes="1MiB",
    )
    with contextlib.closing(daemon.engine()) as client:
        store_all(client, NAMESPACE, Prefix(NAMESPACE, 1, 200).keys)
        daemon.wait_written()
        filler = small_disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(b"x" * 65536)
        for seed in range(2, 10):
            store_all(client, NAMESPACE, Prefix(NAMESPACE, seed, 300).keys)
            assert set(fetch(client, NAMESPACE, Prefix(NAMESPACE, seed, 300).keys)[0]) <= {Outcome.OK, Outcome.MISS}
        filler.unlink()
        last = Prefix(NAMESPACE, 20, 200)
        store_all(client, NAMESPACE, last.keys)
        daemon.wait_written()
        until(lambda: client.evict(["ram"]).kept["ram"] == 0)
        assert set(fetch(client, NAMESPACE, last.keys)[0]) == {Outcome.OK}
    assert daemon.stop() == 0


def test_a_worker_that_is_killed_comes_back_and_loses_nothing(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(ram_size="16MiB")
    with contextlib.closing(daemon.engine()) as client:
        for seed in range(3):
            store_all(client, NAMESPACE, Prefix(NAMESPACE, seed, 100).keys)
            daemon.kill_worker("ssd")
            assert set(fetch(client, NAMESPACE, Prefix(NAMESPACE, seed, 100).keys)[0]) == {Outcome.OK}
            assert client.ping() > 0
            until(lambda: daemon.stats()["tiers"]["ssd"]["state"] == "ok")
        daemon.wait_written()
        client.evict(["ram"])
        for seed in range(3):
            assert set(fetch(client, NAMESPACE, Prefix(NAMESPACE, seed, 100).keys)[0]) == {Outcome.OK}


def test_a_fetch_whose_worker_hangs_is_answered_by_its_deadline(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    prefix = Prefix(NAMESPACE, 1, 50)
    with contextlib.closing(daemon.engine()) as client:
        store_all(client, NAMESPACE, prefix.keys)
        daemon.wait_written()
        client.evict(["ram"])
        worker = daemon.worker("ssd")
        os.kill(worker, signal.SIGSTOP)
        outcomes, _ = fetch(client, NAMESPACE, prefix.keys, deadline_s=0.5)
        assert set(outcomes) == {Outcome.TIMED_OUT}
        assert client.ping() > 0
        os.kill(worker, signal.SIGCONT)
        until(lambda: set(fetch(client, NAMESPACE, prefix.keys)[0]) == {Outcome.OK})


def test_limits_that_leave_no_room_on_the_disk_are_named_and_the_daemon_does_not_start(make_daemon: MakeDaemon) -> None:
    assert (
        "max_bytes" in make_daemon(is_started=False, ssd_max_bytes="100KiB", ssd_segment_bytes="1KiB").start_refused()
    )
