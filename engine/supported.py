"""Which models the engine can serve: decoder-only language models with full causal softmax attention.

Their K and V of a token depend only on the tokens before it, are the same however the prompt was cut into steps,
and fill one `[num_kv_heads, head_dim]` row each per layer. Everything else is refused with its reason, from the
configuration alone, before weights are read; `engine.model` then checks the loaded model against itself.
"""

from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_RECURRENT_FIELDS = ("mamba_d_state", "ssm_state_size", "state_size", "linear_conv_kernel_dim", "rescale_every")
_BLOCK_LISTS = ("layer_types", "layers_block_type", "block_types")
_LAYER_KINDS = {
    "sliding_attention": "sliding-window attention",
    "chunked_attention": "chunked attention",
    "linear_attention": "linear attention",
    "conv": "convolution layers",
    "mamba": "state-space layers",
    "recurrent": "recurrent layers",
    "hybrid": "hybrid layers",
}
_FULL = ("full_attention", "attention")
# Their frequencies depend on how long the sequence is, so that a token's K is not fixed once it is computed.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def refusal(config: PretrainedConfig) -> str | None:
    """Return why the model of this configuration cannot be served, naming what it has, or None if it can."""
    kind = config.model_type
    for check in (_family, _uniformity, _quantisation, _latent, _recurrent, _layer_kinds, _window, _rope):
        reason = check(config)
        if reason is not None:
            return f"model type {kind!r} {reason}"
    return None


def _family(config: PretrainedConfig) -> str | None:
    if config.is_encoder_decoder:
        return "is an encoder-decoder, not a decoder-only model"
    if config.get_text_config() is not config:
        return "is a multimodal model, not a plain language model"
    architectures = config.architectures or []
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if causal is None or (architectures and causal not in architectures):
        names = ", ".join(architectures) or "no architecture"
        return f"({names}) is not a decoder-only language model"
    return None


def _uniformity(config: PretrainedConfig) -> str | None:
    # Such a configuration also refuses to be read as a whole.
    return "has layers of different shapes" if _field(config, "is_heterogeneous") else None


def _quantisation(config: PretrainedConfig) -> str | None:
    quantised = _field(config, "quantization_config")
    if not quantised:
        return None
    method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
    return f"has quantised weights ({method}); load the unquantised ones"


def _latent(config: PretrainedConfig) -> str | None:
    if _field(config, "kv_lora_rank"):
        return f"uses latent attention (MLA, kv_lora_rank {_field(config, 'kv_lora_rank')})"
    return None


def _recurrent(config: PretrainedConfig) -> str | None:
    for name in _RECURRENT_FIELDS:
        if _field(config, name):
            return f"has state-space or linear attention layers ({name} {_field(config, name)})"
    return None


def _layer_kinds(config: PretrainedConfig) -> str | None:
    for name in _BLOCK_LISTS:
        others = sorted({str(kind) for kind in _field(config, name) or ()} - set(_FULL))
        if others:
            return f"has layers with {', '.join(_LAYER_KINDS.get(other, other) for other in others)}"
    local = [kind for kinds, _ in _field(config, "attention_types") or () for kind in kinds if kind != "global"]
    if local:
        return f"has layers with {local[0]} attention"
    if _field(config, "num_kv_shared_layers"):
        return "shares KV between layers"
    return None


def _window(config: PretrainedConfig) -> str | None:
    window = _field(config, "sliding_window")
    if window and _field(config, "use_sliding_window") is not False and window < max_context_tokens(config):
        return f"uses sliding-window attention ({window} tokens)"
    if _field(config, "attn_logit_softcapping"):
        return "caps its attention logits"
    if _field(config, "alibi"):
        return "uses ALiBi position biases"
    return None


def _rope(config: PretrainedConfig) -> str | None:
    parameters: Any = _field(config, "rope_parameters") or {}
    rope_type = parameters.get("rope_type", "default")
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        return f"uses {rope_type} RoPE, whose keys depend on the length of the sequence"
    return None


def max_context_tokens(config: PretrainedConfig) -> int:
    """Return the longest sequence the model was made for."""
    for name in ("max_position_embeddings", "n_positions"):
        if _field(config, name):
            return int(_field(config, name))
    return 2**31 - 1


def _field(config: PretrainedConfig, name: str) -> Any:
    return getattr(config, name, None)
