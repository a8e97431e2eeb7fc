"""Tiny models with random weights, as real Hugging Face folders, for tests that need a model but not its words."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 300
EOS_TOKEN_ID = 257
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": EOS_TOKEN_ID,
}
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def llama() -> PretrainedConfig:
    return LlamaConfig(**_COMMON, head_dim=12)


def qwen2() -> PretrainedConfig:
    """Has biases on Q, K and V."""
    return Qwen2Config(**_COMMON)


def qwen3() -> PretrainedConfig:
    """Normalises Q and K, and has heads wider than hidden_size / num_attention_heads."""
    return Qwen3Config(**_COMMON, head_dim=16)


def mistral() -> PretrainedConfig:
    return MistralConfig(**_COMMON, head_dim=12, sliding_window=None)


def write_folder(folder: Path, config: PretrainedConfig, seed: int = 0) -> Path:
    """Write a complete model folder: random weights large enough that greedy tokens vary, and a byte tokenizer."""
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
    network.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Every byte is a token; `<|start|>` (256) and `<|end|>` (257) mark messages."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|start|>", eos_token="<|end|>")
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)
