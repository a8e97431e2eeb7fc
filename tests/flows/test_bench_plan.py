"""`kvstore bench plan` as a whole on a tiny model: real processes, a real S3 server, the link between them. What it
measures there means nothing; that it runs every plan, compares every token, and can be run in pieces is asked here."""

import json
from pathlib import Path

import pytest

from kvstore.bench.plan import figures
from kvstore.bench.plan.cases import LinkSetting
from kvstore.bench.plan.rig import Scale
from kvstore.bench.plan.run import PlanSettings, run
from tests.engine.tiny import llama, write_folder

PREFIX = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = llama()
    config.max_position_embeddings = 2048
    return write_folder(tmp_path_factory.mktemp("model") / "tiny", config)


def settings(model: Path, folder: Path, shm_dir: Path) -> PlanSettings:
    folder.mkdir()
    scale = Scale(("--model", str(model)), chunk_tokens=128, hbm_bytes=16 << 20, ram_size="16MiB", text_chars=700)
    return PlanSettings(
        folder,
        shm_dir,
        links=(LinkSetting(2, 50),),
        prefixes=(PREFIX,),
        scenarios=("idle", "beside", "split"),
        rounds=2,
        max_rounds=2,
        out=folder.parent / "out",
        scale=scale,
    )


@pytest.mark.slow
def test_every_plan_of_every_scenario_is_run_and_what_was_run_is_not_run_again(
    model: Path, tmp_path: Path, shm_dir: Path
) -> None:
    report = run(settings(model, tmp_path / "first", shm_dir), lambda text: None)
    assert [result["scenario"] for result in report["cases"]] == ["idle", "beside", "split"]
    for result in report["cases"]:
        plans = result["plans"]
        assert {"auto", "load", "recompute", f"cut {PREFIX // 2}"} == set(plans)
        assert len(plans["auto"]["seconds"]) == 2
        served = {name: plan["served"] for name, plan in plans.items()}
        head = PREFIX // 2 if result["scenario"] == "split" else 0
        assert (served["load"]["ram"], served["load"]["s3"]) == (head, PREFIX - head)
        assert sum(served["recompute"].values()) == 0
        assert sum(served[f"cut {PREFIX // 2}"].values()) == PREFIX // 2
    assert {"regret_p50", "regret_p95", "machine", "settings"} <= set(report)
    assert len(figures.rows(report)) == 3

    again = settings(model, tmp_path / "second", shm_dir)
    kept = tmp_path / "out" / "idle-2ms-50MBps-256.json"
    assert json.loads(kept.read_text())["plans"] == report["cases"][0]["plans"]
    # Nothing is left to run, so nothing is started and the figures are the same.
    assert run(again, pytest.fail)["cases"] == report["cases"]
