"""The profiles say what the design says of Llama-3.1-8B, and a model takes as many GPUs as hold it."""

from dataclasses import replace

import pytest

from kvstore.core.errors import ConfigError
from kvstore.core.outcome import TierKind
from policies.cost import LoadCost
from policies.interval import Question, compare
from policies.profiles import GPUS, MODELS, machine
from policies.simulator.setting import setting_of


def test_the_kv_of_a_token_has_the_published_size() -> None:
    assert MODELS["Llama-3.1-8B"].kv_bytes_per_token == 131_072
    assert MODELS["Llama-3.1-70B"].kv_bytes_per_token == 327_680


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_runs_on_every_gpu(gpu: str, model: str) -> None:
    found = machine(gpu.lower(), model.upper())
    assert found.prefill.predict(1000, 0) > 0
    assert found.model.weight_bytes < found.gpu.hbm_bytes * found.gpus_per_engine
    assert found.gpu.source and found.model.source


@pytest.mark.parametrize(("gpu", "count"), [("H100", 4), ("H200", 2), ("A100", 4), ("L4", 8)])
def test_a_large_model_takes_several_gpus(gpu: str, count: int) -> None:
    assert machine(gpu, "Llama-3.1-70B").gpus_per_engine == count
    assert machine(gpu, "Llama-3.1-8B").gpus_per_engine == 1


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"B200.*H100, H200, A100, L4"):
        machine("B200", "Llama-3.1-8B")
    with pytest.raises(ConfigError, match=r"Llama-3\.1-8B"):
        machine("H100", "gpt")


def test_gpus_that_make_no_whole_engine_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 GPUs per engine; 6 are no multiple"):
        setting_of(
            machine("H100", "Llama-3.1-70B"),
            6,
            512,
            dram_bytes=0,
            ssd_bytes=0,
            ssd_bytes_per_s=1.0,
            s3_bytes_per_s=1.0,
            s3_latency_s=0.0,
        )


def test_the_example_of_the_design_takes_0_70_s_where_the_best_cut_takes_0_98_s() -> None:
    """An H100, 16,000 tokens in RAM, 16,000 in S3 at 1 GB/s and 100 ms, and 200 new ones; steps cost nothing there."""
    h100 = machine("H100", "Llama-3.1-8B")
    stride = 16
    tiers = [TierKind.RAM] * (16_000 // stride) + [TierKind.S3] * (16_000 // stride)
    question = Question(32_200, stride, stride * h100.model.kv_bytes_per_token, 0, tiers)
    loads = {TierKind.RAM: LoadCost(0.0, 1 / h100.link_bytes_per_s), TierKind.S3: LoadCost(0.1, 1e-9)}
    plans = compare(question, replace(h100.prefill, per_step_s=0.0), loads)
    assert plans.best.seconds == pytest.approx(0.70, abs=0.005)
    assert plans.prefix_cut.seconds == pytest.approx(0.98, abs=0.005)
    assert plans.two_ended.seconds == pytest.approx(1.12, abs=0.005)
    assert plans.best.start == len(tiers) // 2, "all that is near is loaded first"
