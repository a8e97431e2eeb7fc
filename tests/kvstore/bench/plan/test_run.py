"""What `kvstore bench plan --out` finds again."""

from pathlib import Path

from kvstore.bench.plan.run import finished


def test_only_the_results_that_are_asked_for_are_read_again(tmp_path: Path) -> None:
    """The command's own output was once sent to the same folder, empty still while the results were read."""
    (tmp_path / "idle-1ms-300MBps-256.json").write_text('{"regret": 0.5}')
    (tmp_path / "idle-1ms-300MBps-512.json").write_text('{"regret": 0.7}')
    (tmp_path / "all.json").write_text("")
    names = ["idle-1ms-300MBps-256", "split-1ms-300MBps-256"]
    assert finished(tmp_path, names) == {"idle-1ms-300MBps-256": {"regret": 0.5}}


def test_a_folder_that_is_not_there_is_made(tmp_path: Path) -> None:
    assert finished(tmp_path / "new", ["idle"]) == {}
    assert (tmp_path / "new").is_dir()
    assert finished(None, ["idle"]) == {}
