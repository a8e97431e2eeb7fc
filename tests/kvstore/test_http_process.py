"""The API's process as the daemon starts it."""

from pathlib import Path

import pytest

from kvstore.config import Config, HttpConfig
from kvstore.http_process import HttpProcess
from tests.support.waiting import until


def test_modules_in_the_current_folder_are_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`python -m` imports from the current folder first, so a daemon that somebody started in /tmp ran whatever
    other users had put there as `msgspec.py`."""
    trap = tmp_path / "trapped"
    (tmp_path / "msgspec.py").write_text(f"open({str(trap)!r}, 'w')\nraise SystemExit(2)\n")
    monkeypatch.chdir(tmp_path)
    process = HttpProcess(Config(http=HttpConfig(port=0)), tmp_path)
    process.start()
    said: list[str] = []

    def serves_or_is_trapped() -> bool:
        said.append(capfd.readouterr().err)
        return trap.exists() or "HTTP API on" in "".join(said)

    until(serves_or_is_trapped)
    process.stop()
    assert not trap.exists()
