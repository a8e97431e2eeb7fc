"""Loading a model folder: what is accepted, what is refused and in which words, and what a step checks first."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from engine.model import Model, SequenceSlice, load_model, make_pool
from kvstore.core.errors import ConfigError
from tests.engine import tiny

_SMALL = {"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("models") / "tiny-llama", tiny.llama())


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder, "cpu", "float32")


def test_the_spec_states_the_shape_of_the_kv(model: Model) -> None:
    spec = model.spec
    assert spec.name == "tiny-llama"
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim) == (3, 2, 12)
    assert (spec.vocab_size, spec.max_context_tokens, spec.eos_token_ids) == (300, 512, (257,))
    assert spec.kv_bytes_per_token == 3 * 2 * 2 * 12 * 4
    assert make_pool(spec, 5, 4, "cpu").shape == (5, 3, 2, 4, 2, 12)


def test_the_tokenizer_renders_a_chat(model: Model) -> None:
    rendered = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=True, add_generation_prompt=True, return_dict=True
    )
    assert model.tokenizer.decode(rendered["input_ids"]) == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"


def test_the_digest_is_that_of_the_weights_and_the_configuration(folder: Path, model: Model, tmp_path: Path) -> None:
    copy = _copy(folder, tmp_path / "copy")
    assert load_model(copy, "cpu", "float32").spec.weights_digest == model.spec.weights_digest

    _edit_config(copy, transformers_version="0")
    assert load_model(copy, "cpu", "float32").spec.weights_digest == model.spec.weights_digest

    _edit_config(copy, rms_norm_eps=1e-4)
    assert load_model(copy, "cpu", "float32").spec.weights_digest != model.spec.weights_digest

    other = tiny.write_folder(tmp_path / "other", tiny.llama(), seed=1)
    assert load_model(other, "cpu", "float32").spec.weights_digest != model.spec.weights_digest


def test_bfloat16_loads_too_and_passes_the_check_against_its_own_attention(folder: Path) -> None:
    half = load_model(folder, "cpu", "bfloat16")
    pool = make_pool(half.spec, 4, 4, "cpu")
    assert pool.dtype == torch.bfloat16
    assert half.forward([SequenceSlice([1, 2, 3], 0, [0])], pool).dtype == torch.float32


def _deepseek(version: str) -> PretrainedConfig:
    make = getattr(transformers, f"Deepseek{version}Config")
    return make(**_SMALL, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)


_REFUSED: dict[str, tuple[Callable[[], PretrainedConfig], str]] = {
    "deepseek_v2": (lambda: _deepseek("V2"), r"'deepseek_v2' uses latent attention \(MLA"),
    "deepseek_v3": (lambda: _deepseek("V3"), r"'deepseek_v3' uses latent attention \(MLA"),
    "mamba": (lambda: transformers.MambaConfig(), "'mamba' has state-space"),
    "mamba2": (lambda: transformers.Mamba2Config(), "'mamba2' has state-space"),
    "jamba": (lambda: transformers.JambaConfig(), "'jamba' has state-space"),
    "qwen3_next": (lambda: transformers.Qwen3NextConfig(), "'qwen3_next' has state-space or linear attention"),
    "minimax": (lambda: transformers.MiniMaxConfig(), "'minimax' has layers with linear attention"),
    "rwkv": (lambda: transformers.RwkvConfig(), "'rwkv' has state-space or linear attention"),
    "gemma2": (lambda: transformers.Gemma2Config(), "'gemma2' has layers with sliding-window attention"),
    "gemma3_text": (lambda: transformers.Gemma3TextConfig(), "'gemma3_text' has layers with sliding-window attention"),
    "gemma3": (lambda: transformers.Gemma3Config(), "'gemma3' is a multimodal model"),
    "gpt_oss": (lambda: transformers.GptOssConfig(), "'gpt_oss' has layers with sliding-window attention"),
    "llama4_text": (lambda: transformers.Llama4TextConfig(), "'llama4_text' has layers with chunked attention"),
    "gpt_neo": (lambda: transformers.GPTNeoConfig(), "'gpt_neo' has layers with local attention"),
    "mistral": (
        lambda: transformers.MistralConfig(sliding_window=1024),
        r"'mistral' uses sliding-window attention \(1024 tokens\)",
    ),
    "falcon": (lambda: transformers.FalconConfig(alibi=True), "'falcon' uses ALiBi"),
    "t5": (lambda: transformers.T5Config(), "'t5' is an encoder-decoder"),
    "vit": (lambda: transformers.ViTConfig(), "'vit' .*is not a decoder-only language model"),
    "classifier": (
        lambda: transformers.LlamaConfig(architectures=["LlamaForSequenceClassification"]),
        r"'llama' \(LlamaForSequenceClassification\) is not a decoder-only language model",
    ),
    "dynamic_rope": (
        lambda: transformers.LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "'llama' uses dynamic RoPE",
    ),
    "quantised": (
        lambda: transformers.LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4}),
        r"'llama' has quantised weights \(gptq\)",
    ),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_a_model_that_cannot_be_served_is_refused_by_name_before_its_weights_are_read(
    name: str, tmp_path: Path
) -> None:
    make, reason = _REFUSED[name]
    make().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        load_model(tmp_path, "cpu", "float32")


def test_a_bias_that_the_configuration_does_not_tell_of_is_found_by_the_check(tmp_path: Path) -> None:
    """BLOOM adds ALiBi biases inside its own attention and has no setting that says so."""
    config = transformers.BloomConfig(vocab_size=300, hidden_size=48, n_layer=2, n_head=4)
    tiny.write_folder(tmp_path, config)
    with pytest.raises(ConfigError, match="cannot be served"):
        load_model(tmp_path, "cpu", "float32")


def test_a_window_no_shorter_than_the_context_is_no_window(tmp_path: Path) -> None:
    config = tiny.mistral()
    config.sliding_window = config.max_position_embeddings
    tiny.write_folder(tmp_path, config)
    assert load_model(tmp_path, "cpu", "float32").spec.max_context_tokens == 512


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: (folder / "config.json").unlink(), "is no model folder"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json of .* cannot be read"),
        (lambda folder: _edit_config(folder, model_type="no-such-model"), "config.json of .* cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot be loaded"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 64), "cannot be loaded"),
        (lambda folder: _drop_weight(folder, "model.norm.weight"), "1 weights are missing .model.norm.weight"),
        (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "no tokenizer"),
    ],
    ids=["no config", "torn config", "unknown type", "no weights", "torn weights", "missing weight", "no tokenizer"],
)
def test_a_spoilt_folder_is_refused(spoil: Callable[[Path], object], reason: str, folder: Path, tmp_path: Path) -> None:
    copy = _copy(folder, tmp_path / "copy")
    spoil(copy)
    with pytest.raises(ConfigError, match=reason):
        load_model(copy, "cpu", "float32")


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        load_model(folder, "cpu", "int8")


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        (SequenceSlice([5, 300], 0, [0]), "token id 300 is outside of the vocabulary of 300"),
        (SequenceSlice([5, -1], 0, [0]), "token id -1 is outside"),
        (SequenceSlice([], 0, [0]), "at least one token"),
        (SequenceSlice([5], -1, [0]), "not negative"),
        (SequenceSlice([5], 4, [0]), "1 pool blocks do not cover 5 tokens"),
        (SequenceSlice([5], 0, [8]), "outside of the pool's 8"),
        (SequenceSlice([5], 0, [-1]), "outside of the pool's 8"),
        (SequenceSlice([5], 512, [0] * 200), "513 tokens exceed the context"),
    ],
)
def test_a_slice_that_does_not_fit_is_refused_and_writes_nothing(
    piece: SequenceSlice, reason: str, model: Model
) -> None:
    pool = make_pool(model.spec, 8, 4, "cpu")
    good = SequenceSlice([1, 2], 0, [1])
    with pytest.raises(ValueError, match=reason):
        model.forward([good, piece], pool)
    assert not pool.any()


def test_a_pool_of_another_shape_and_an_empty_step_are_refused(model: Model) -> None:
    with pytest.raises(ValueError, match="is not made for tiny-llama"):
        model.forward([SequenceSlice([1], 0, [0])], torch.zeros(8, 3, 2, 4, 2, 16))
    with pytest.raises(ValueError, match="at least one slice"):
        model.forward([], make_pool(model.spec, 8, 4, "cpu"))


def _copy(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def _drop_weight(folder: Path, name: str) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
