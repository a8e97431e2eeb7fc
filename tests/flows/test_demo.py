"""The whole demo on a tiny model: every interruption, real processes, a real S3 server, every token compared."""

import json

import pytest

from kvstore.demo.main import Scale, run
from tests.engine.tiny import llama, write_folder
from tests.support.leaks import regions

# The tier that has to serve the sessions after each interruption.
MEANT = {"hbm_pressure": "hbm", "engine_restart": "ram", "daemon_restart": "ssd", "s3_only": "s3", "other_daemon": "s3"}
BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    folder = tmp_path_factory.mktemp("demo")
    config = llama()
    config.max_position_embeddings = 2048
    model = write_folder(folder / "model", config)
    scale = Scale(
        model="tiny random Llama",
        model_arguments=("--model", str(model)),
        # 3 layers, K and V, 2 heads of 12, float32
        pool_block_bytes=BLOCK_TOKENS * 3 * 2 * 2 * 12 * 4,
        resumed=3,
        displaced=2,
        timed=1,
        opening_chars=600,
        hbm_blocks=170,
        reference_hbm_blocks=600,
        ram_size="16MiB",
        ssd_max_bytes="1GiB",
    )
    path = folder / "report.json"
    before = regions()
    assert run(path, scale) == 0
    assert not regions() - before, "memory is left behind"
    return dict(json.loads(path.read_text()))


def test_every_interruption_is_in_the_report(report: dict[str, list[dict[str, object]]]) -> None:
    assert [row["name"] for row in report["interruptions"]] == list(MEANT)


def test_no_interruption_changes_a_token(report: dict[str, list[dict[str, object]]]) -> None:
    assert all(row["tokens_equal"] is True for row in report["interruptions"] + report["also"])


@pytest.mark.parametrize("name", MEANT)
def test_the_tier_that_was_meant_to_serve_the_sessions_does(
    report: dict[str, list[dict[str, object]]], name: str
) -> None:
    (row,) = (row for row in report["interruptions"] if row["name"] == name)
    served = row["served_tokens"]
    assert isinstance(served, dict)
    assert isinstance(row["cached_prompt_tokens"], int)
    assert served[MEANT[name]] > 0.9 * row["cached_prompt_tokens"]


def test_sessions_that_hbm_has_no_room_for_come_back_from_ram(report: dict[str, list[dict[str, object]]]) -> None:
    (row,) = (row for row in report["also"] if row["name"] == "hbm_displaced")
    served = row["served_tokens"]
    assert isinstance(served, dict)
    assert served["ram"] > 0
