"""Which models can be used: the families allowed, and why the others are refused.

Works on configuration dictionaries alone, so that a model is refused before its weights are
downloaded, converted or read. It loads nothing and writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from store.errors import UnsupportedModelError

#: ``model_type`` -> the name people know it by.
SUPPORTED_FAMILIES: dict[str, str] = {
    "opt": "OPT",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}

#: RoPE types whose key at a position depends on nothing but that position. ``dynamic`` and
#: ``longrope`` change earlier keys as the text grows, so their stored keys can't be reused.
SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")

_SLIDING = "sliding-window attention drops old keys"
_LATENT = "multi-head latent attention (MLA) caches no per-head keys"
_HYBRID = "hybrid and state-space layers keep a state that can't be cut by token"
_ENCODER = "encoder-decoder models have no causal prefix"

#: Families people try, with the reason they can't work. Everything else not in
#: `SUPPORTED_FAMILIES` is refused as untested.
_REFUSED: dict[str, tuple[str, ...]] = {
    _SLIDING: (
        "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma4", "gpt_oss", "cohere2", "phi3",
        "ministral", "exaone4", "starcoder2", "olmo3", "llama4", "llama4_text", "smollm3",
    ),
    _LATENT: ("deepseek_v2", "deepseek_v3", "deepseek_v32", "minicpm3", "glm4_moe_lite"),
    _HYBRID: (
        "mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba", "zamba2", "falcon_h1",
        "granitemoehybrid", "nemotron_h", "qwen3_next", "lfm2", "lfm2_moe", "rwkv",
        "recurrent_gemma", "minimax", "kimi_linear",
    ),
    _ENCODER: (
        "t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian", "blenderbot", "led",
        "m2m_100", "t5gemma", "whisper",
    ),
}  # fmt: skip
_REASONS = {family: reason for reason, families in _REFUSED.items() for family in families}


def require_supported(config: Mapping[str, Any], where: str) -> None:
    """Refuse a model whose keys and values can't be reused by position.

    Parameters
    ----------
    config
        A model's configuration: ``config.json`` as read, or ``PretrainedConfig.to_dict()``.
    where
        How the user named the model, for the message.

    Raises
    ------
    UnsupportedModelError
        Names the family or the setting, and what is supported.
    """
    reason = _family_reason(config) or _quantization_reason(config) or _attention_reason(config)
    if reason:
        names = ", ".join(SUPPORTED_FAMILIES.values())
        raise UnsupportedModelError(
            f"{where} can't be used: {reason}; use a full-attention model of {names} "
            f"with RoPE type {', '.join(SUPPORTED_ROPE)}"
        )


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE settings of a configuration, whichever of the two spellings it uses."""
    return dict(config.get("rope_parameters") or config.get("rope_scaling") or {})


def _family_reason(config: Mapping[str, Any]) -> str | None:
    """Why the family is refused, or None."""
    family = str(config.get("model_type") or "unknown")
    if config.get("is_encoder_decoder"):
        return f"family {family!r}: {_ENCODER}"
    if config.get("kv_lora_rank"):
        return f"family {family!r}: {_LATENT}"
    if family not in SUPPORTED_FAMILIES:
        return f"family {family!r}: {_REASONS.get(family, 'not tested here')}"
    return None


def _quantization_reason(config: Mapping[str, Any]) -> str | None:
    """Why quantised weights are refused, or None."""
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    method = quantization.get("quant_method", "unknown")
    return f"weights quantised with {method!r}, whose kernels decide the keys"


def _attention_reason(config: Mapping[str, Any]) -> str | None:
    """Why the attention or the position encoding is refused, or None."""
    layer_types = config.get("layer_types") or []
    others = sorted({kind for kind in layer_types if kind != "full_attention"})
    if others:
        return f"layer_types {', '.join(others)}: {_SLIDING}"
    if config.get("model_type") == "mistral" and config.get("sliding_window") is not None:
        return f"sliding_window {config['sliding_window']}: {_SLIDING}"
    rope = rope_parameters(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in SUPPORTED_ROPE:
        return f"RoPE type {kind!r}: keys may depend on the total length of the text"
    return None
