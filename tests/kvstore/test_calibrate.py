"""What `kvstore calibrate` makes of measurements; that it measures is asked in tests/flows/test_calibrate.py."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from kvstore.cli import app
from kvstore.commands import calibrate
from kvstore.commands.calibrate import CalibrationFailed, Load, Step, learned
from kvstore.commands.calibrate_plot import plot_times
from kvstore.core.errors import ConfigError
from kvstore.core.outcome import TierKind
from policies.cost import LoadCost
from policies.saved_profile import SavedProfile

ABOUT = SavedProfile("m", "d", "h", 256, 16, 737_280, 0.0)
STEPS = [
    Step(new, cached, decodes, 0.04 + 1e-3 * new + 4e-7 * (new * cached + new * new / 2) + 0.01 * decodes)
    for new in (0, 32, 128, 256)
    for cached in (256, 1024, 4096)
    for decodes in (1, 2)
]
LOADS = [
    Load("ssd", blocks, at_once, blocks * at_once * 737_280, 0.005 + blocks * at_once * 737_280 / 5e8)
    for blocks in (1, 4, 16, 64)
    for at_once in (1, 2)
]


def test_the_profile_has_what_the_measurements_say() -> None:
    found = calibrate._profile(ABOUT, learned(256, STEPS, LOADS))
    assert found.step == pytest.approx((0.04, 1e-3, 4e-7, 0.01, 0.04), rel=0.05)
    assert set(found.loads) == {"ssd"}
    assert found.loads["ssd"] == pytest.approx((0.005, 2e-9), rel=0.05)
    assert (found.source, found.model, found.block_bytes) == ("calibrate", "m", 737_280)
    assert type(found) is SavedProfile


def _measured(lines: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    """Run the real reading of a process that says these lines and then ends with 3."""
    script = tmp_path / "says"
    said = "\n".join(line if isinstance(line, str) else msgspec.json.encode(line).decode() for line in lines)
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\necho it broke >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(calibrate.sys, "executable", str(script))
    return list(calibrate._lines([]))


def test_a_measuring_process_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(CalibrationFailed, match="it broke"):
        _measured([{"part": {"name": "prefill", "total": 3}}], monkeypatch, tmp_path)


def test_what_it_says_beside_is_a_fault_and_no_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(CalibrationFailed, match="nonsense"):
        _measured(["nonsense"], monkeypatch, tmp_path)


@pytest.mark.leaks  # matplotlib keeps its fonts open
def test_a_plot_shows_both_times(tmp_path: Path) -> None:
    path = tmp_path / "times.png"
    plot_times(
        path,
        "title",
        [16, 256, 4096],
        [0.1, 1.0, 20.0],
        {"ram": [0.1] * 3, "s3": [1.0, 2.0, 9.0]},
        {"s3": 900},
        262_144,
    )
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot write"):
        plot_times(tmp_path / "none" / "x.png", "title", [16, 32], [0.1, 1.0], {}, {}, 262_144)


def test_a_tier_that_does_not_pay_says_up_to_which_prefix_it_was_looked_for() -> None:
    slow = calibrate._tier_row(TierKind.S3, LoadCost(0.05, 1e-6), None, 16)
    assert slow[-1] == "not up to 262144 tokens"
    assert calibrate._tier_row(TierKind.S3, LoadCost(0.05, 1e-6), 160, 16)[-1] == "160 tokens"


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_work() -> None:
    ran = CliRunner().invoke(app, ["calibrate", "--plot", "times.jpg"])
    assert isinstance(ran.exception, ConfigError)


def test_a_size_that_is_none_is_refused_by_name() -> None:
    ran = CliRunner().invoke(app, ["calibrate", "--ram-size", "much"])
    assert ran.exit_code == 2
    assert "--ram-size" in ran.output


def test_the_tables_have_what_was_measured_beside_the_model_and_its_doubt(capsys: pytest.CaptureFixture[str]) -> None:
    costs = learned(256, STEPS, LOADS)
    calibrate._show(calibrate._profile(ABOUT, costs), costs, STEPS, LOADS, {"ssd": 160})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["256", "1024", "1"] in [line[:3] for line in lines]
    assert ["ssd", "16", "2"] in [line[:3] for line in lines]
    measured = next(line for line in lines if line[:3] == ["ssd", "16", "2"])
    assert float(measured[3]) == pytest.approx(float(measured[4]), rel=0.05)
    assert measured[5].endswith("%")
    assert lines[-1] == ["ssd", "5.00", "477", "MiB/s", "160", "tokens"]
