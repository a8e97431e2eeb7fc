"""Writes a tiny Llama with random weights and a tokenizer of made-up words, for engines that are compared with it."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCABULARY = 4096
MAX_TOKENS = 4096
NUM_LAYERS = 4
NUM_KV_HEADS = 4
HEAD_DIM = 32
_HIDDEN = 256
_INNER = 512
_HEADS = 8
# Wide enough that the likeliest token is seldom close to the next one.
_SPREAD = 0.2
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


def kv_bytes_per_token(bytes_per_number: int) -> int:
    return 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * bytes_per_number


def write_llama(folder: Path) -> Path:
    """Write it into `folder`, which is made, and return that; equal bytes every time."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * _SPREAD).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(VOCABULARY, _HIDDEN)}
    for layer in range(NUM_LAYERS):
        place = f"model.layers.{layer}"
        weights |= {
            f"{place}.self_attn.q_proj.weight": matrix(_HEADS * HEAD_DIM, _HIDDEN),
            f"{place}.self_attn.k_proj.weight": matrix(NUM_KV_HEADS * HEAD_DIM, _HIDDEN),
            f"{place}.self_attn.v_proj.weight": matrix(NUM_KV_HEADS * HEAD_DIM, _HIDDEN),
            f"{place}.self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * HEAD_DIM),
            f"{place}.mlp.gate_proj.weight": matrix(_INNER, _HIDDEN),
            f"{place}.mlp.up_proj.weight": matrix(_INNER, _HIDDEN),
            f"{place}.mlp.down_proj.weight": matrix(_HIDDEN, _INNER),
            f"{place}.input_layernorm.weight": np.ones(_HIDDEN, np.float32),
            f"{place}.post_attention_layernorm.weight": np.ones(_HIDDEN, np.float32),
        }
    weights |= {"model.norm.weight": np.ones(_HIDDEN, np.float32), "lm_head.weight": matrix(VOCABULARY, _HIDDEN)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _config())
    _write_tokenizer(folder)
    return folder


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_TOKENS,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }


def _write_tokenizer(folder: Path) -> None:
    words = [*_SPECIAL, *(f"t{number}" for number in range(len(_SPECIAL), VOCABULARY))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": word, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": True}
            for index, word in enumerate(_SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": vocabulary,
            "unk_token": "<unk>",
        },
    }
    _write_json(folder / "tokenizer.json", tokenizer)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_TOKENS}
    settings |= dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), _SPECIAL, strict=True))
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), "utf-8")
