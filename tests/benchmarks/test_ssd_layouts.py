"""The comparison of SSD layouts runs, and what it reads is what was written (it checks that itself)."""

from pathlib import Path

from benchmarks.ssd_layouts import measure


def test_every_figure_is_there_for_both_layouts(tmp_path: Path) -> None:
    figures = measure(tmp_path, block_bytes=1 << 20, num_blocks=4, rounds=1)
    assert {what: set(speeds) for what, speeds in figures.items()} == {
        "durable write": {"file", "lmdb", "segments"},
        "cold read": {"file", "lmdb", "segments"},
        "churn at 90% full": {"lmdb", "segments"},
    }
    assert all(speed > 0 for speeds in figures.values() for speed in speeds.values())
