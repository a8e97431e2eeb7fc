"""The benchmark of the cost model runs and prints what it says."""

import pytest

from benchmarks import cost_model


@pytest.mark.slow
def test_every_mix_of_work_is_tried_with_outliers_and_with_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cost_model.sys, "argv", ["cost_model.py", "--machines", "1"])
    assert cost_model.main() == 0
    lines = capsys.readouterr().out.splitlines()
    for mix in cost_model.STEPS:
        assert sum(line.startswith(f"steps, {mix}: ") for line in lines) == 10
    for mix in cost_model.LOADS:
        assert sum(line.startswith(f"loads, {mix}: ") for line in lines) == 12
    assert "us on average" in lines[1]
