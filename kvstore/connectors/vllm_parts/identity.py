"""The namespace of one rank of a vLLM engine: all that must agree for its blocks to be of use to another, beside what
vLLM's own block hashes cover (tokens, LoRA, images, salt).

Covers: model and weights, dtype, how a page is laid out and by which backend, ranks, how hashes are made. Reads plain
attributes of vLLM's configuration and imports nothing of vLLM.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.connectors import weights as model_weights
from kvstore.connectors.vllm_parts.pages import Layer
from kvstore.connectors.vllm_parts.seal import SEAL_BYTES
from kvstore.core.errors import ConfigError
from kvstore.core.key import Namespace

# Says how a payload is put together; another order of bytes takes another name.
_FORMAT = "vllm-1"
# Where a model came from, not what it is.
_INCIDENTAL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
# What vLLM's CPU kernels choose their packing by.
_INSTRUCTION_SETS = frozenset(
    {"avx2", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"}
    | {"asimd", "asimdhp", "bf16", "sve"}
)
_PLAIN_SPECS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})


@dataclass(frozen=True, slots=True)
class Rank:
    """Where a worker stands. `kv_replicas` neighbouring TP ranks hold the same KV (MLA): they share a namespace, and
    the first of them stores."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    kv_replicas: int = 1

    @property
    def stores(self) -> bool:
        return self.tp_rank % self.kv_replicas == 0


def refuse_what_cannot_be_right(
    config: Any, kv_cache_config: Any, environ: Any = os.environ, *, hears_of_sleep: bool = True
) -> None:
    """Raise ConfigError, naming the model and what to do, where blocks cannot be kept and found correctly.
    `hears_of_sleep`: whether this vLLM tells a connector when it takes the KV cache's memory away."""
    model = config.model_config.model
    groups = list(kv_cache_config.kv_cache_groups)
    if len(groups) != 1 or not all(_is_plain(group.kv_cache_spec) for group in groups):
        kinds = ", ".join(f"{_kind(group.kv_cache_spec)} for {len(group.layer_names)} layers" for group in groups)
        raise ConfigError(
            f"kvstore cannot keep the KV cache of {model}: its layers need more than full attention ({kinds}). "
            "Start vLLM with --disable-hybrid-kv-cache-manager where the model allows it (every layer then keeps all "
            "tokens: more memory for each), or without this connector"
        )
    if not hears_of_sleep and getattr(config.model_config, "enable_sleep_mode", False):
        # A store that had waited over the sleep would read what is there afterwards, and keep it under a good key.
        raise ConfigError(
            f"kvstore cannot keep the KV cache of {model} in sleep mode with this vLLM, which takes its memory away "
            "without a word: start it without --enable-sleep-mode, or use vLLM 0.33"
        )
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"kvstore cannot keep the KV cache of {model} with {name} above 1: set it to 1")
    if getattr(parallel, "nnodes", 1) > 1:
        raise ConfigError(
            f"kvstore cannot keep the KV cache of {model} across machines: a daemon serves one. Use tensor parallelism "
            "within a machine, and one engine for each"
        )
    cache = config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            f"kvstore cannot keep the KV cache of {model} while calculate_kv_scales is on: each process would scale it "
            "in its own way. Use a checkpoint with scales, or another kv_cache_dtype"
        )
    algorithm = hash_algorithm(config)
    if not algorithm.startswith("sha256") and "PYTHONHASHSEED" not in environ:
        raise ConfigError(
            f"prefix_caching_hash_algo {algorithm!r} makes other hashes in every process, so nothing that is stored "
            "would be found again: use sha256, or set PYTHONHASHSEED to the same value for all engines"
        )


def hash_algorithm(config: Any) -> str:
    return str(getattr(config.cache_config, "prefix_caching_hash_algo", "sha256"))


def namespace_of(
    config: Any,
    kv_cache_config: Any,
    layers: Sequence[Layer],
    rank: Rank,
    *,
    version: str,
    backends: Iterable[str],
    device: str,
    packing: str,
    weights: str,
    tenant: str,
) -> Namespace:
    """Return the rank's namespace. `weights` is `weights_digest`, `device` names what runs the kernels ("cpu": this
    machine's instruction sets count), `packing` how the layers themselves say that they pack K and V, "" where they do
    not."""
    model, cache = config.model_config, config.cache_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    layout = {
        "format": _FORMAT,
        "vllm": ".".join(version.split(".")[:2]),
        "layout": str(getattr(kv_cache_config, "kv_cache_layout", None)),
        "layers": [(layer.name, layer.page_bytes, layer.form) for layer in layers],
        "backends": sorted(backends),
        "device": f"cpu {instruction_sets()}" if device == "cpu" else "gpu",
        "packing": packing,
        "load": _loading(config),
        "hash": hash_algorithm(config),
        "speculative": _speculative(config),
        "spec": _kind(spec),
    }
    return Namespace(
        model=model_name(model),
        weights_digest=weights,
        dtype=f"{_plain(model.dtype)}, {_plain(cache.cache_dtype)}, {getattr(model, 'quantization', None)}",
        kv_layout=f"{_FORMAT}-{_digest(layout)}",
        block_tokens=block_tokens(kv_cache_config),
        block_bytes=sum(layer.page_bytes for layer in layers) + SEAL_BYTES,
        num_layers=len(layers),
        num_kv_heads=int(getattr(spec, "num_kv_heads", 0)),
        head_dim=int(getattr(spec, "head_size", 0)),
        tp_rank=rank.tp_rank // rank.kv_replicas,
        tp_size=max(1, rank.tp_size // rank.kv_replicas),
        pp_rank=rank.pp_rank,
        pp_size=rank.pp_size,
        tenant=tenant,
    )


def block_tokens(kv_cache_config: Any) -> int:
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def model_name(model: Any) -> str:
    """Return the model's name; of a folder or file its last part, since it may be mounted elsewhere in another pod."""
    name = _given_name(model)
    return Path(name).name if Path(name).exists() else name


def weight_files(model: Any, in_hub: model_weights.InHub) -> list[Path]:
    """Return the files of the weights; [] where they are not on this machine."""
    place = model_weights.place_of(_given_name(model), getattr(model, "revision", None), in_hub)
    return model_weights.files_of(place)


def weights_digest(model: Any, files: Sequence[Path]) -> str:
    """Say what the weights are: the configuration as vLLM has it, and the files by their names and contents. No files:
    name and revision must do."""
    text = getattr(model.hf_config, "to_json_string", None)
    configuration = json.loads(text(use_diff=False)) if text is not None else {}
    for field in _INCIDENTAL:
        configuration.pop(field, None)
    if "longrope" in json.dumps(configuration.get("rope_scaling") or configuration.get("rope_parameters") or {}):
        # There the longest context decides which factors are used.
        configuration["max_model_len"] = model.max_model_len
    hasher = hashlib.sha256(json.dumps(configuration, sort_keys=True, default=str).encode())
    if files:
        hasher.update(model_weights.digest_of(files))
    else:
        hasher.update(f"{_given_name(model)}@{getattr(model, 'revision', None)}".encode())
    return hasher.hexdigest()


def instruction_sets() -> str:
    """Return those of this machine's CPU that kernels choose between."""
    found: frozenset[str] = frozenset()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip().lower() in ("flags", "features"):
                    found = _INSTRUCTION_SETS & set(value.split())
                    break
    except OSError:
        pass
    return " ".join([platform.machine(), *sorted(found)])


def _given_name(model: Any) -> str:
    # Of weights in a bucket vLLM makes a folder that has everything but them, and remembers what it was given.
    return str(getattr(model, "model_weights", "") or model.model)


def _loading(config: Any) -> str:
    """Say how the weights are read where that may make others of the same files: random ones, or a file from elsewhere
    that the loader is told of."""
    load = getattr(config, "load_config", None)
    how = str(getattr(load, "load_format", "auto"))
    if how == "auto":
        return ""
    return f"{how} {json.dumps(getattr(load, 'model_loader_extra_config', None), sort_keys=True, default=str)}"


def _is_plain(spec: Any) -> bool:
    inner = getattr(spec, "kv_cache_specs", None)
    if inner is not None:
        return (
            all(_is_plain(each) for each in inner.values()) and len({each.block_size for each in inner.values()}) == 1
        )
    return type(spec).__name__ in _PLAIN_SPECS


def _kind(spec: Any) -> str:
    inner = getattr(spec, "kv_cache_specs", None)
    return type(spec).__name__ if inner is None else "+".join(sorted({type(each).__name__ for each in inner.values()}))


def _speculative(config: Any) -> str:
    speculative = getattr(config, "speculative_config", None)
    if speculative is None:
        return ""
    return f"{getattr(speculative, 'method', '')} {Path(str(getattr(speculative, 'model', ''))).name}"


def _plain(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
