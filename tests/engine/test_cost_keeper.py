"""What an engine measured is there when the next one starts, whatever the disk does."""

import logging
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.cost_keeper import CostKeeper, blank_profile, device_name
from kvstore.core.outcome import TierKind
from policies.confidence import Confidence
from policies.cost import SavedCosts
from policies.saved_profile import load, read, saved_in
from tests.engine.serving import OPTIONS, serving

COSTS = SavedCosts((0.05, 3e-3, 2e-7, 0.02, 0.03), {TierKind.S3: (0.05, 5e-9)})
BLANK = blank_profile("model", "cpu, float32", 256, 16, 737_280, host="here")


def keeper(folder: Path, save_every_s: float = 300.0) -> CostKeeper:
    def snapshot() -> "Future[SavedCosts]":
        future: Future[SavedCosts] = Future()
        future.set_result(COSTS)
        return future

    return CostKeeper(folder, BLANK, snapshot, lambda: 12.0, save_every_s)


def test_what_one_engine_measured_the_next_one_knows(tmp_path: Path) -> None:
    first = keeper(tmp_path)
    assert first.saved == SavedCosts()
    first.start()
    first.close(COSTS)
    assert keeper(tmp_path).saved == COSTS
    found = load(tmp_path, BLANK)
    assert found is not None
    assert (found.source, found.saved_at) == ("engine", 12.0)


def test_nothing_measured_writes_nothing(tmp_path: Path) -> None:
    for last_word in (SavedCosts(), None):
        keeper(tmp_path).close(last_word)
    assert not list(tmp_path.iterdir())


def test_it_is_written_now_and_then_too(tmp_path: Path) -> None:
    kept = keeper(tmp_path, save_every_s=0.001)
    kept.start()
    while load(tmp_path, BLANK) is None:
        pass
    kept.close(None)


def test_a_folder_that_cannot_be_written_stops_nobody_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    kept = keeper(tmp_path / "file")
    with caplog.at_level(logging.WARNING):
        kept.save(COSTS)
        kept.save(COSTS)
    assert sum("cannot be kept" in record.message for record in caplog.records) == 1


def test_the_device_is_named_with_what_it_computes_in() -> None:
    assert device_name(torch.device("cpu"), "float32").endswith("cores, float32")


def test_an_engine_begins_with_what_the_last_one_measured(tmp_path: Path) -> None:
    options = replace(OPTIONS, profile_dir=tmp_path)
    with serving(None, options) as first:
        assert first.engine.costs.prefill_known, "the warm-up was measured"
        for number in range(4):
            assert first.complete([1 + number] * 40).status_code == 200
    (path,) = saved_in(tmp_path)
    with serving(None, replace(options, warm_up=False)) as second:
        assert second.engine.costs.prefill_confidence is Confidence.SAVED
        assert second.engine.costs.step_coefficients() == pytest.approx(read(path).step)


def test_the_end_does_not_wait_for_a_step_loop_that_does_not_answer(tmp_path: Path) -> None:
    """It waited for what had been asked, which nobody answers any more, for as long as that may take."""
    asked = threading.Event()
    future: Future[SavedCosts] = Future()

    def snapshot() -> "Future[SavedCosts]":
        asked.set()
        return future

    kept = CostKeeper(tmp_path, BLANK, snapshot, lambda: 12.0, 0.001)
    kept.start()
    assert asked.wait(10)
    kept.close(COSTS)
    assert not kept._thread.is_alive(), "it was not waited for, but had ended"
    assert load(tmp_path, BLANK) is not None
