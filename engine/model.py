"""A language model of the engine: loading a Hugging Face folder, and computing tokens into the paged pool.

Covers: refusing what cannot be served, the identity of the weights, the pool's shape, one step of the model.
Does not cover: which tokens to compute when (the scheduler), fetching a model from anywhere but the disk.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from engine.attention import ATTENTION_NAME, SequenceSlice
from engine.forward import packed_forward
from engine.smollm import default_model_folder
from engine.supported import max_context_tokens, refusal
from kvstore.core.errors import ConfigError

__all__ = ["Model", "ModelSpec", "SequenceSlice", "default_model_folder", "load_model", "make_pool"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Fields of config.json that say how the folder was made, not what the model computes.
_INCIDENTAL_FIELDS = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
# How far the paged pass may be from the model's own attention, as a share of the logits' size: rounding alone.
_SELF_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the rest of the engine needs to know of a model. `weights_digest` is a SHA-256 in hex over the weights and
    the configuration, the same on every machine that has the same files."""

    name: str
    weights_digest: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]

    @property
    def kv_bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * _DTYPES[self.dtype].itemsize


class Model:
    """A loaded model. Not thread-safe: one thread computes."""

    def __init__(self, spec: ModelSpec, network: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        self.spec = spec
        self.tokenizer = tokenizer
        self._network = network

    def forward(self, slices: Sequence[SequenceSlice], pool: torch.Tensor) -> torch.Tensor:
        """Compute the slices' tokens in one packed pass and write their K and V into `pool`.

        Returns the logits of each slice's last token, `[len(slices), vocab_size]` float32 on the pool's device, and
        a row of NaN for a slice that wants none.
        Blocks until queued on a GPU, until done on a CPU. The slices' sequences must not share a block that is
        written. Raises ValueError for a slice that does not fit model or pool; then nothing was written.
        """
        self._check(slices, pool)
        logits, _ = packed_forward(self._network, slices, pool)
        return logits

    def _check(self, slices: Sequence[SequenceSlice], pool: torch.Tensor) -> None:
        spec = self.spec
        num_blocks, _, _, block_tokens, _, _ = pool.shape
        if pool.shape[1:] != _block_shape(spec, block_tokens) or not pool.is_contiguous():
            raise ValueError(f"the pool {tuple(pool.shape)} is not made for {spec.name}")
        if not slices:
            raise ValueError("a step needs at least one slice")
        for piece in slices:
            length = piece.start + len(piece.token_ids)
            if not piece.token_ids or piece.start < 0:
                raise ValueError("a slice needs at least one token, and a start that is not negative")
            if length > spec.max_context_tokens:
                raise ValueError(f"{length} tokens exceed the context of {spec.name}, {spec.max_context_tokens}")
            if len(piece.block_table) * block_tokens < length:
                raise ValueError(f"{len(piece.block_table)} pool blocks do not cover {length} tokens")
            if min(piece.block_table) < 0 or max(piece.block_table) >= num_blocks:
                raise ValueError(f"a pool block lies outside of the pool's {num_blocks}")
            low, high = min(piece.token_ids), max(piece.token_ids)
            if low < 0 or high >= spec.vocab_size:
                outside = low if low < 0 else high
                raise ValueError(f"token id {outside} is outside of the vocabulary of {spec.vocab_size}")


def load_model(folder: Path, device: str, dtype: str) -> Model:
    """Load the model of a local Hugging Face folder; nothing is fetched and no code of the folder is run.

    `device` is torch's name ("cpu", "cuda"), `dtype` float32, bfloat16 or float16. Raises ConfigError with the reason
    where the folder cannot be read or its model cannot be served.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; known are {', '.join(_DTYPES)}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is no model folder: it has no config.json")
    config = _read_config(folder)
    reason = refusal(config)
    if reason is not None:
        raise ConfigError(f"{folder.name} cannot be served: {reason}")
    # A bar per start is noise in a server's log.
    quiet: Any = transformers_logging
    quiet.disable_progress_bar()
    with ThreadPoolExecutor(1) as hashing:
        # Hashing releases the interpreter lock, so it costs nothing beside the loading.
        digest = hashing.submit(_weights_digest, folder)
        network = _load_network(folder, config, device, _DTYPES[dtype])
        tokenizer = _load_tokenizer(folder)
        spec = _spec(folder, config, network, digest.result(), dtype)
    _check_against_itself(network, spec)
    return Model(spec, network, tokenizer)


def make_pool(spec: ModelSpec, num_pool_blocks: int, pool_block_tokens: int, device: str) -> torch.Tensor:
    """Return a pool `[num_pool_blocks, num_layers, 2, pool_block_tokens, num_kv_heads, head_dim]`, K before V.

    One pool block is one contiguous run of bytes. It is zeroed, which also takes its memory from the system now
    and not in the middle of a step.
    """
    shape = (num_pool_blocks, *_block_shape(spec, pool_block_tokens))
    # Filled, not torch.zeros: that maps the system's zero page and faults on the first write to every page.
    return torch.empty(shape, dtype=_DTYPES[spec.dtype], device=device).fill_(0)


def _block_shape(spec: ModelSpec, block_tokens: int) -> tuple[int, int, int, int, int]:
    return (spec.num_layers, 2, block_tokens, spec.num_kv_heads, spec.head_dim)


def _read_config(folder: Path) -> PretrainedConfig:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the config.json of {folder} cannot be read: {error}") from error
    assert isinstance(config, PretrainedConfig)
    return config


def _load_network(folder: Path, config: PretrainedConfig, device: str, dtype: torch.dtype) -> PreTrainedModel:
    loader: Any = AutoModelForCausalLM
    try:
        network, report = loader.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        network = network.to(device).eval()
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"the model in {folder} cannot be loaded: {error}") from error
    # transformers fills what is missing with random numbers and goes on.
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(f"the model in {folder} cannot be loaded: {len(missing)} weights are missing ({missing[0]})")
    assert isinstance(network, PreTrainedModel)
    return network


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} has no tokenizer that can be loaded (tokenizer.json): {error}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def _spec(folder: Path, config: PretrainedConfig, network: PreTrainedModel, digest: str, dtype: str) -> ModelSpec:
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    generation: Any = network.generation_config
    eos = generation.eos_token_id if generation is not None else None
    if eos is None:
        eos = config.eos_token_id
    return ModelSpec(
        name=folder.resolve().name,
        weights_digest=digest,
        dtype=dtype,
        num_layers=int(config.num_hidden_layers),
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(head_dim),
        vocab_size=int(config.vocab_size),
        max_context_tokens=max_context_tokens(config),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
    )


def _weights_digest(folder: Path) -> str:
    """Hash names and contents of all weight files, and the configuration: equal weights under another RoPE base
    make other K. A name or path on this machine takes no part."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for field in _INCIDENTAL_FIELDS:
        config.pop(field, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            digest.update(file.name.encode() + hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _check_against_itself(network: PreTrainedModel, spec: ModelSpec) -> None:
    """Compute a few tokens through the pool, in two steps, and by the model's own attention, and compare.

    What a configuration does not tell (a bias, layers that keep no KV or keep it elsewhere) shows here. Raises
    ConfigError where the two differ by more than rounding.
    """
    ids = [i % spec.vocab_size for i in range(3, 10)]
    device = str(network.device)
    pool = make_pool(spec, 3, 3, device)
    table = (2, 0, 1)
    try:
        _, written = packed_forward(network, [SequenceSlice(ids[:4], 0, table)], pool)
        paged, _ = packed_forward(network, [SequenceSlice(ids[4:], 4, table)], pool)
        network.set_attn_implementation("eager")
        with torch.inference_mode():
            own = network(torch.tensor([ids], device=network.device), use_cache=False).logits[0, -1:].float()
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{spec.name} cannot be served: its layers do not work over a paged pool: {error}") from error
    finally:
        network.set_attn_implementation(ATTENTION_NAME)
    if sorted(written) != list(range(spec.num_layers)):
        raise ConfigError(f"{spec.name} cannot be served: not every layer keeps its K and V in the cache")
    error_share = float((paged - own).norm() / own.norm())
    if not math.isfinite(error_share) or error_share > _SELF_CHECK_TOLERANCE[_DTYPES[spec.dtype]]:
        raise ConfigError(f"{spec.name} cannot be served: over the paged pool it computes something else")
