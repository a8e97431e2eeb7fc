"""GPUs and models by name, each figure with its source, and what prefilling costs on them.

    a = 2 · params / (η · FLOP/s)            seconds per token: one multiplication and one addition per weight
    b = 4 · layers · hidden / (η · FLOP/s)   seconds per pair of tokens: Q·K and weights·V, two operations each
    c0 = weights' bytes / HBM bandwidth      seconds per step: with few tokens it takes as long as reading the weights

η, the share of the peak that a prefill reaches, is assumed to be one half: published prefill figures of dense models
in bfloat16 lie between 0.4 and 0.6. Several GPUs that hold one model together are taken as one with their sums.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from kvstore.core.errors import ConfigError
from kvstore.core.outcome import TierKind
from policies.cost import LoadCost, PrefillCost

_Figures = TypeVar("_Figures")

EFFICIENCY: Final = 0.5
# What a step of an engine with chunked prefill takes at most; vLLM's default for online serving (2048 tokens).
CHUNK_TOKENS: Final = 2048
_WEIGHT_BYTES: Final = 2
# Assumed; both are small against what is loaded.
RAM_LATENCY_S: Final = 1e-4
SSD_LATENCY_S: Final = 1e-3
# Of a common NVMe disk, and of S3 from one client; where nobody says otherwise.
_SSD_BYTES_PER_S: Final = 7e9
_S3_BYTES_PER_S: Final = 1e9
_S3_LATENCY_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Gpu:
    """`flops` is the peak of dense bfloat16; `link_bytes_per_s` what copies over PCIe reach, about 0.8 of its peak."""

    flops: float
    hbm_bytes: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Model:
    """A dense model with grouped queries, weights and KV in bfloat16."""

    params: float
    num_layers: int
    hidden: int
    num_kv_heads: int
    head_dim: int
    source: str

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * _WEIGHT_BYTES

    @property
    def weight_bytes(self) -> float:
        return self.params * _WEIGHT_BYTES


GPUS: Final[Mapping[str, Gpu]] = {
    "H100": Gpu(989e12, 80e9, 3.35e12, 50e9, "NVIDIA H100 data sheet, SXM5; PCIe 5.0 x16, 64 GB/s each way"),
    "H200": Gpu(989e12, 141e9, 4.8e12, 50e9, "NVIDIA H200 data sheet, SXM; PCIe 5.0 x16, 64 GB/s each way"),
    "A100": Gpu(312e12, 80e9, 2.039e12, 25e9, "NVIDIA A100 80GB data sheet, SXM; PCIe 4.0 x16, 32 GB/s each way"),
    "L4": Gpu(121e12, 24e9, 300e9, 25e9, "NVIDIA L4 data sheet, half of its figure with sparsity; PCIe 4.0 x16"),
}

MODELS: Final[Mapping[str, Model]] = {
    "Llama-3.1-8B": Model(8.03e9, 32, 4096, 8, 128, "config.json of meta-llama/Llama-3.1-8B; arXiv 2407.21783"),
    "Llama-3.1-70B": Model(70.6e9, 80, 8192, 8, 128, "config.json of meta-llama/Llama-3.1-70B; arXiv 2407.21783"),
}

# Room in HBM beside the weights that an engine needs for KV and activations.
_MAX_WEIGHTS_SHARE: Final = 0.75


@dataclass(frozen=True, slots=True)
class Machine:
    """One model on `gpus_per_engine` GPUs that work as one engine."""

    gpu: Gpu
    model: Model
    gpus_per_engine: int

    @property
    def prefill(self) -> PrefillCost:
        flops = EFFICIENCY * self.gpu.flops * self.gpus_per_engine
        return PrefillCost(
            chunk_tokens=CHUNK_TOKENS,
            per_step_s=self.model.weight_bytes / (self.gpu.hbm_bytes_per_s * self.gpus_per_engine),
            per_token_s=2 * self.model.params / flops,
            per_pair_s=4 * self.model.num_layers * self.model.hidden / flops,
        )

    @property
    def link_bytes_per_s(self) -> float:
        """Each GPU takes its own share of every block over its own link."""
        return self.gpu.link_bytes_per_s * self.gpus_per_engine

    @property
    def loads(self) -> Mapping[TierKind, LoadCost]:
        """From RAM over PCIe, an NVMe disk at 7 GB/s, and S3 at 1 GB/s and 100 ms."""
        return {
            TierKind.RAM: LoadCost(RAM_LATENCY_S, 1 / self.link_bytes_per_s),
            TierKind.SSD: LoadCost(SSD_LATENCY_S, 1 / _SSD_BYTES_PER_S),
            TierKind.S3: LoadCost(_S3_LATENCY_S, 1 / _S3_BYTES_PER_S),
        }


def machine(gpu: str, model: str) -> Machine:
    """Return the model on as few GPUs as hold it: 1, 2, 4 or 8. Names as in GPUS and MODELS, in any case.

    ConfigError names what is unknown, or what does not fit.
    """
    gpu_figures, model_figures = _named(gpu, GPUS, "GPU"), _named(model, MODELS, "model")
    for count in (1, 2, 4, 8):
        if model_figures.weight_bytes <= _MAX_WEIGHTS_SHARE * gpu_figures.hbm_bytes * count:
            return Machine(gpu_figures, model_figures, count)
    raise ConfigError(f"{model} does not fit eight {gpu}")


def _named(name: str, known: Mapping[str, _Figures], what: str) -> _Figures:
    for each, figures in known.items():
        if each.lower() == name.lower():
            return figures
    raise ConfigError(f"no profile of the {what} {name!r}; there are {', '.join(known)}")
