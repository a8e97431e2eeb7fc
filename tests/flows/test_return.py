"""`kvstore bench return` as a whole on a tiny model: real processes, a real S3 server, users who pause."""

from pathlib import Path

import pytest

from kvstore.bench.returns import ReturnSettings, run
from tests.engine.tiny import llama, write_folder
from tests.support.leaks import regions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = llama()
    config.max_position_embeddings = 2048
    return write_folder(tmp_path_factory.mktemp("model") / "tiny", config)


@pytest.mark.slow
def test_sessions_in_the_bucket_are_in_ram_before_their_users_return(model: Path, tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    before = regions()
    report = run(
        ReturnSettings(
            tmp_path / "bench",
            num_users=2,
            turns=1,
            pauses_s=(7.0, 9.0),
            text_chars=400,
            ram_size="16MiB",
            engine_arguments=("--model", str(model), "--hbm-bytes", "16MiB"),
        ),
        lambda text: None,
    )
    assert not regions() - before, "memory is left behind"
    assert report["predicted"]["turns"] == report["announced"]["turns"] == 2
    # All of them where nobody else wants the cores; how many it is elsewhere, the benchmark says.
    assert report["ready_share"] >= 0.5 and report["announced"]["ready_share"] >= 0.5, report
    assert report["is_within_budget"]
    assert report["prefetch"]["useful_blocks"] > 0
