"""Rotary embeddings of a Hugging Face config.json, in the terms of Megatron's flags."""

from __future__ import annotations

from typing import Any

from slime.utils.arguments.errors import ConfigError

_INTERLEAVED = frozenset({"glm4"})
# how much of each head rotates unless the config says otherwise; other families always rotate all of it
_DEFAULT_SHARE = {
    "glm4": 0.5,
    "glm4_moe": 0.5,
    "glm4_moe_lite": 1.0,
    "minimax_m2": 1.0,
    "qwen3_5_moe_text": 0.25,
    "qwen3_5_text": 0.25,
    "qwen3_next": 0.25,
}
# what megatron-core 0.16.1 has fixed in its form of Llama 3's scaling
_LLAMA3_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rotary_facts(text: dict[str, Any], *, known: bool, latent: bool) -> dict[str, Any]:
    """Base, share of each head, order of the pairs, and scaling.

    Args:
        known: the family is one of slime's, so that all is said; of other families only what the config says.
        latent: multi-latent attention, which has YaRN.

    Raises:
        ConfigError: a kind of scaling that the trainer doesn't have.
    """
    # `rope_parameters` since transformers 5, `rope_scaling` and keys beside it before
    rope = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    facts: dict[str, Any] = {}
    base = rope.get("rope_theta", text.get("rope_theta"))
    if base is not None:
        facts["rotary_base"] = base
    scaling = rope.get("rope_type", rope.get("type")) or "default"
    if scaling == "llama3":
        facts.update(_llama3(rope))
    elif latent:
        facts.update(_latent(rope, scaling, text))
    elif known and scaling != "default":
        raise ConfigError(f"config.json: rotary embeddings of rope_type {scaling!r} are not supported for this model")
    if known:
        facts["rotary_percent"] = _rotated_share(rope, text)
        facts["rotary_interleaved"] = text["model_type"] in _INTERLEAVED
        facts.setdefault("use_rope_scaling", False)
        if facts["rotary_interleaved"]:
            facts["apply_rope_fusion"] = False  # the fused kernel rotates halves
    return facts


def _rotated_share(rope: dict[str, Any], text: dict[str, Any]) -> float:
    if text["model_type"] not in _DEFAULT_SHARE:
        return 1.0
    share = rope.get("partial_rotary_factor", text.get("partial_rotary_factor"))
    if share is None and text.get("rotary_dim"):
        share = text["rotary_dim"] / text["head_dim"]
    return _DEFAULT_SHARE[text["model_type"]] if share is None else share


def _llama3(rope: dict[str, Any]) -> dict[str, Any]:
    for key, value in _LLAMA3_FIXED.items():
        if rope.get(key, value) != value:
            raise ConfigError(
                f"config.json: {key} {rope[key]} of rope_type 'llama3' is not supported: megatron-core has {value}"
            )
    return {"use_rope_scaling": True, "rope_scaling_factor": rope["factor"]}


def _latent(rope: dict[str, Any], scaling: str, text: dict[str, Any]) -> dict[str, Any]:
    """YaRN with DeepSeek's two factors, or plain rotary embeddings; the pairs lie side by side in the checkpoint."""
    if not text.get("rope_interleave", True):
        raise ConfigError("config.json: rope_interleave false is not supported: megatron-core pairs neighbours")
    if scaling == "default":
        return {"rope_type": "rope", "apply_rope_fusion": False}  # the fused kernel is one for YaRN
    if scaling != "yarn":
        raise ConfigError(f"config.json: rope_type {scaling!r} with multi-latent attention is not supported")
    scale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if rope.get("attention_factor") is not None or bool(scale) != bool(all_dim) or not rope.get("truncate", True):
        raise ConfigError(
            "config.json: YaRN with attention_factor, without truncation, or with only one of mscale and "
            "mscale_all_dim is not supported"
        )
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        # cos and sin are scaled by m(mscale) / m(mscale_all_dim), the softmax by m(mscale_all_dim)², where
        # m(a) = 0.1 a ln(factor) + 1; neither given: cos and sin by m(1)
        "mscale": scale or 1.0,
        "mscale_all_dim": all_dim or 0.0,
    }
