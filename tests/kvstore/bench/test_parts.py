"""Each part of `kvstore bench tiers` on tiny blocks: it runs, and measures both sides. How fast anything is, no test
asks."""

import importlib.util
import os
from pathlib import Path

import pytest

from kvstore.bench import catalog, churn, flow, lookup, machine, ram, s3, ssd
from kvstore.bench.settings import MIB, BenchSettings, Sizes
from tests.support.bench import TINY, Rounds, assert_compared
from tests.support.s3server import BUCKET


def test_ram_measures_copies_and_paths_against_memcpy(settings: BenchSettings, rounds: Rounds) -> None:
    measured = ram.measure(settings, TINY, rounds)
    assert set(measured) == {"store", "fetch", "store_path", "fetch_path"}
    assert_compared(measured, {"memcpy"})
    # The path holds the copy and the round trips around it.
    for part in ("store", "fetch"):
        assert all(
            path > alone
            for path, alone in zip(measured[f"{part}_path"].ours.seconds, measured[part].ours.seconds, strict=True)
        )
    assert rounds.count == settings.rounds + 1


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("block_bytes", [16 << 10, 64 << 10, 2 * MIB])
def test_the_paged_pool_is_measured_for_blocks_of_many_pool_blocks(
    settings: BenchSettings, rounds: Rounds, block_bytes: int
) -> None:
    from kvstore.bench import paged

    sizes = Sizes(block_bytes, 2)
    pool = paged.make_pool(sizes)
    assert pool.shape[0] == 2 * 16
    assert pool.nbytes == sizes.total_bytes
    measured = paged.measure(settings, sizes, rounds)
    assert set(measured) == {"paged_store", "paged_fetch"}
    assert_compared(measured, {"memcpy"})


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_a_size_that_no_paged_pool_has_is_refused() -> None:
    from kvstore.bench import paged

    with pytest.raises(ValueError, match="no paged pool"):
        paged.make_pool(Sizes(1000, 1))


def test_ssd_measures_durable_writes_and_cold_reads_against_plain_files(
    settings: BenchSettings, rounds: Rounds
) -> None:
    measured, facts = ssd.measure(settings, TINY, rounds)
    assert set(measured) == {"write", "read", "write_direct", "read_direct"}
    assert_compared({part: measured[part] for part in ("write", "read")}, {"buffered"})
    assert_compared({part: measured[f"{part}_direct"] for part in ("write", "read")}, {"direct"})
    assert set(facts) == {"reads_were_cold", "pages_left_in_cache", "huge_slots"}


def test_writes_go_in_batches_as_the_worker_makes_them() -> None:
    assert ssd.batches(Sizes(2 * MIB, 40)) == [range(32), range(32, 40)]
    assert ssd.batches(Sizes(64 * MIB, 2)) == [range(1), range(1, 2)]


def test_churn_turns_the_tier_over_ten_times_and_never_sees_it_above_its_cap(settings: BenchSettings) -> None:
    steps: list[float] = []
    measured, facts = churn.measure(settings, 64 << 10, steps.append)
    assert_compared({"churn": measured["churn"]}, {"fresh"}, 2 * settings.rounds)
    assert_compared({"churn_with_eviction": measured["churn_with_eviction"]}, {"fresh"}, 2 * settings.rounds)
    assert facts["turnovers"] >= 9.5
    assert facts["samples"] > 1
    assert 0.5 * facts["max_bytes"] < facts["peak_bytes"] <= facts["max_bytes"] == settings.churn_bytes
    assert steps == sorted(steps)
    assert steps[-1] == 1.0


@pytest.mark.usefixtures("s3_server")
def test_s3_measures_the_tier_and_boto3_on_the_same_server(
    settings: BenchSettings, rounds: Rounds, where: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "BUCKET", BUCKET)
    measured = s3.measure(settings, TINY, where, rounds)
    assert set(measured) == {"put", "get"}
    assert_compared(measured, {"boto3"})


@pytest.mark.usefixtures("s3_server")
def test_lookups_are_measured_idle_and_beside_uploads_and_requests(
    settings: BenchSettings, rounds: Rounds, where: dict[str, str]
) -> None:
    figures = lookup.measure(settings, where, rounds)
    assert figures["blocks"] == 8
    assert {"p50_ms", "p99_ms", "keys_p50_ms", "ping_p50_ms", "loaded_p50_ms", "loaded_p99_ms"} <= set(figures)
    assert 0 < figures["keys_p50_ms"] < figures["p50_ms"] <= figures["p99_ms"]
    assert rounds.count == 2 * (settings.lookup_rounds + 1)


def test_without_a_bucket_the_loaded_lookup_says_why_it_is_missing(settings: BenchSettings, rounds: Rounds) -> None:
    figures = lookup.measure(settings, None, rounds)
    assert "loaded_p99_ms" not in figures
    assert "S3 server" in figures["loaded_skipped"]


@pytest.mark.usefixtures("s3_server")
def test_whole_paths_are_measured_from_each_tier(
    settings: BenchSettings, rounds: Rounds, where: dict[str, str]
) -> None:
    measured = flow.measure(settings, TINY, where, rounds)
    assert set(measured) == {"store", "durable_ssd", "fetch_ram", "fetch_ssd", "durable_s3", "fetch_s3"}
    assert all(len(timing.seconds) == settings.rounds for timing in measured.values())
    assert all(timing.num_bytes == TINY.total_bytes for timing in measured.values())


def test_a_daemon_recovers_every_block_that_was_put_into_the_index(settings: BenchSettings) -> None:
    steps: list[float] = []
    figures = catalog.measure(settings, steps.append)
    assert figures["blocks"] == settings.catalog_blocks
    assert figures["answers_after_s"] > 0
    assert figures["recover_s"] > 0
    # The daemon and its worker.
    assert len(figures["rss_mib_by_process"]) >= 2
    assert figures["rss_mib"] == pytest.approx(sum(figures["rss_mib_by_process"].values()))
    assert steps[-1] == 1.0


def test_private_memory_of_a_process_is_read_from_the_kernel() -> None:
    assert catalog.rss_anon_bytes(os.getpid()) > MIB
    assert catalog.rss_anon_bytes(2**22 + 1) == 0


def test_the_mount_of_a_folder_is_named(shm_dir: Path) -> None:
    assert machine.mount_of(shm_dir)["file_system"] == "tmpfs"
