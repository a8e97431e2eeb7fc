"""`kvstore verify` as people and programs see it, with and without a daemon."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore import cli, wire
from kvstore.commands import verify as command
from kvstore.core.block import HEADER_BYTES
from kvstore.core.errors import ProtocolError
from kvstore.core.outcome import Outcome
from kvstore.wire import ErrorCode
from tests.support.blocks import meta, payload
from tiers.codec import Codec
from tiers.dirlock import FolderLock
from tiers.keys import KeyRing
from tiers.ssd import SsdTier

Run = Callable[..., tuple[int, str, str]]
KEY = bytes(range(32))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


@pytest.fixture
def run(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process; no daemon runs in its folder."""
    path = tmp_path / "kvstore.toml"
    path.write_text(
        f'[daemon]\nrun_dir = "{tmp_path}/run"\n[ssd]\npath = "{folder}"\nmax_bytes = "32MiB"\nsegment_bytes = "4MiB"\n'
    )

    def run(*arguments: str, environ: dict[str, str] | None = None) -> tuple[int, str, str]:
        for name, value in (environ or {}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["kvstore", "verify", "--config", str(path), *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return run


def store(folder: Path, count: int, keys: KeyRing | None = None) -> None:
    tier = SsdTier(folder, max_bytes=32 << 20, segment_bytes=4 << 20, codec=Codec(keys))
    blocks = [meta(number) for number in range(count)]
    assert tier.write(blocks, [payload(block) for block in blocks]) == [Outcome.OK] * count
    tier.records.put("sessions/a", b"text")
    tier.close()


def damage(folder: Path, slot: int) -> None:
    (path,) = (folder / "segments").iterdir()
    with path.open("r+b") as file:
        file.seek(slot * (HEADER_BYTES + 8192) + HEADER_BYTES)
        file.write(b"damage")


def test_a_clean_disk_is_0_a_damaged_one_1_and_after_a_repair_it_is_0_again(run: Run, folder: Path) -> None:
    store(folder, 10)
    assert run()[0] == 0
    damage(folder, 3)
    code, out, err = run()
    assert (code, err) == (1, "")
    assert "ssd: corrupt block " in out
    code, out, _ = run("--repair")
    assert code == 1
    assert ", removed" in out
    code, out, _ = run("--json")
    assert code == 0
    found = json.loads(out)
    assert found["is_clean"] is True
    assert found["tiers"]["ssd"]["counts"] == {"blocks": {"ok": 9}, "records": {"ok": 1}}


def test_what_is_not_ours_is_told_of_and_no_fault(run: Run, folder: Path) -> None:
    store(folder, 1)
    (folder / "notes\033[31m").write_text("mine")
    code, out, _ = run("--repair")
    assert code == 0
    assert "ssd: foreign file notes[31m" in out
    assert (folder / "notes\033[31m").exists()


def test_the_wrong_key_is_told_of_and_costs_nothing(run: Run, folder: Path) -> None:
    store(folder, 3, KeyRing(KEY))
    code, out, _ = run("--json", "--repair")
    assert code == 1
    assert json.loads(out)["tiers"]["ssd"]["counts"] == {"blocks": {"wrong_key": 3}, "records": {"wrong_key": 1}}
    assert run(environ={"KVSTORE_ENCRYPTION_KEY": KEY.hex()})[0] == 0


def test_what_no_key_opens_can_be_dropped(run: Run, folder: Path) -> None:
    store(folder, 3, KeyRing(KEY))
    assert run("--drop-wrong-key")[0] == 1
    assert run()[0] == 0


def test_a_disk_that_somebody_else_has_open_cannot_be_verified(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(folder, 1)
    real = command.open_tier
    monkeypatch.setattr("tiers.ssd.FolderLock", lambda path, **options: FolderLock(path, **options | {"wait_s": 0.0}))
    lock = FolderLock(folder, wait_s=0.0)
    try:
        code, _, err = run()
    finally:
        lock.release()
    assert code == 2
    assert "is in use by process" in err
    assert real is command.open_tier


def test_where_nothing_was_ever_stored_nothing_is_made(run: Run, folder: Path) -> None:
    code, _, err = run()
    assert code == 2
    assert "there is nothing to verify" in err and "is not there" in err
    assert not folder.exists()
    assert run("--tier", "s3")[0] == 2


def test_a_tier_that_does_not_exist_is_wrong_usage(run: Run) -> None:
    code, _, err = run("--tier", "ram")
    assert code == 2
    assert "'ram' is not one of ssd, s3" in err


# ---------------------------------------------------------------- through a daemon


class Daemon:
    """A client whose daemon needs two looks to be through."""

    def __init__(self, *reports: wire.VerifyReport) -> None:
        self.reports = list(reports)
        self.orders: list[tuple[Any, ...]] = []
        self.is_cancelled = False
        self.fault: BaseException | None = None

    def ping(self) -> float:
        return 0.0

    def verify(self, tiers: list[str], *, repair: bool, drop_wrong_key: bool) -> wire.VerifyReport:
        self.orders.append((tiers, repair, drop_wrong_key))
        return self.verify_status()

    def verify_status(self) -> wire.VerifyReport:
        if self.fault is not None:
            raise self.fault
        return self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]

    def verify_cancel(self) -> wire.VerifyReport:
        self.is_cancelled = True
        return self.reports[-1]

    def close(self) -> None:
        pass


def report(state: str, **counts: int) -> wire.VerifyReport:
    return wire.VerifyReport(state == "running", {"ssd": wire.ScrubReport({"blocks": counts}, state=state, total=9)})


@pytest.fixture
def through(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setattr(command, "_LOOK_EVERY_S", 0.0)

    def call(daemon: Daemon, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(command, "Client", lambda *_, **__: daemon)
        return run(*arguments)

    return call


def test_a_running_daemon_does_it_and_is_asked_until_it_is_through(through: Run) -> None:
    daemon = Daemon(report("running"), report("running", ok=4), report("done", ok=9))
    code, out, _ = through(daemon, "--tier", "ssd,s3", "--repair", "--json")
    assert code == 0
    assert daemon.orders == [(["ssd", "s3"], True, False)]
    assert json.loads(out)["tiers"]["ssd"]["counts"] == {"blocks": {"ok": 9}}


@pytest.mark.parametrize("verdict", ["corrupt", "missing", "orphaned", "wrong_key"])
def test_anything_bad_is_1(through: Run, verdict: str) -> None:
    assert through(Daemon(report("done", ok=1, **{verdict: 1})))[0] == 1


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_what_did_not_come_to_its_end_is_2(through: Run, state: str) -> None:
    code, _, err = through(Daemon(report("running"), report(state, ok=1)))
    assert code == 2
    assert f"not complete ({state})" in err


def test_a_daemon_that_is_at_it_already_is_2(through: Run) -> None:
    daemon = Daemon(report("running"))
    daemon.fault = ProtocolError(ErrorCode.BUSY, "a verification is under way already")
    code, _, err = through(daemon)
    assert code == 2
    assert "under way already" in err


def test_an_interrupt_ends_the_daemons_walk_too(through: Run) -> None:
    daemon = Daemon(report("running"))
    real = daemon.verify

    def verify(*arguments: Any, **options: Any) -> wire.VerifyReport:
        found = real(*arguments, **options)
        daemon.fault = KeyboardInterrupt()
        return found

    daemon.verify = verify  # type: ignore[method-assign]
    assert through(daemon)[0] == cli.EXIT_INTERRUPTED
    assert daemon.is_cancelled
