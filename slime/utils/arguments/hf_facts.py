"""What a Hugging Face config.json says about a model, in the terms of Megatron's flags."""

from __future__ import annotations

from typing import Any

from slime.utils.arguments.hf_experts import expert_facts, shared_expert_facts
from slime.utils.arguments.hf_rotary import rotary_facts

# Facts that are a choice of training rather than of the architecture: a different value on the command line is fine.
TRAINING_CHOICES = frozenset(
    {
        "attention_dropout",
        "hidden_dropout",
        "max_position_embeddings",
        "moe_aux_loss_coeff",
        "moe_router_bias_update_rate",
        "moe_router_dtype",
        "moe_router_load_balancing_type",
    }
)

# config.json key -> attribute
_SAME_MEANING = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "n_routed_experts": "num_experts",
    "num_attention_heads": "num_attention_heads",
    "num_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "num_hidden_layers": "num_layers",
    "num_local_experts": "num_experts",
    "num_key_value_heads": "num_query_groups",
    "rms_norm_eps": "norm_epsilon",
    "vocab_size": "vocab_size",
}
_LATENT_SAME_MEANING = {
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
# every fourth layer with softmax attention, the others with a gated delta net
_GATED_DELTA_NET = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
# models with a vision tower: their text model trains alone, or behind the tower on images
VISION_MODELS = frozenset({"qwen3_5", "qwen3_5_moe"})
_LINEAR_ATTENTION = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
)
_QK_NORM = frozenset({"minimax_m2", "qwen3", "qwen3_moe"}) | _GATED_DELTA_NET
_QKV_BIAS = frozenset({"mimo", "qwen2", "qwen2_moe"})
LATENT_ATTENTION = frozenset({"deepseek_v3", "glm4_moe_lite", "kimi_k2"})
_GROUPED_ATTENTION = frozenset({"glm4", "glm4_moe", "llama"}) | _QKV_BIAS | _QK_NORM
_DECODERS = _GROUPED_ATTENTION | LATENT_ATTENTION


def config_from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """Attributes that the config decides; what it doesn't say is left out.

    Args:
        config: the content of config.json. A nested `text_config` is used where there is one.

    Raises:
        ConfigError: the config asks for something that the trainer can't do, such as an unknown kind of rotary
            embedding; the message names the key.
    """
    text = config.get("text_config") or config
    facts = {attribute: text[key] for key, attribute in _SAME_MEANING.items() if text.get(key) is not None}
    if "tie_word_embeddings" in text or "tie_word_embeddings" in config:
        tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
        facts["untie_embeddings_and_output_weights"] = not tied
    kind = text.get("model_type")
    facts.update(_latent_attention(text) if kind in LATENT_ATTENTION else _heads(text))
    facts.update(rotary_facts(text, known=kind in _DECODERS, latent=kind in LATENT_ATTENTION))
    if kind in _DECODERS:
        facts.update(_decoder(text))
    if kind in _GATED_DELTA_NET:
        facts.update(_gated_delta_net(text))
    if "num_experts" in facts:
        facts.update(expert_facts(text, facts["num_layers"]))
        facts.update(shared_expert_facts(text))
    if kind is not None and kind not in _DECODERS:
        facts.update(_plugin_facts(kind, config))
    return facts


def has_dense_layer(facts: dict[str, Any]) -> bool:
    """Whether any layer has an MLP without experts."""
    if facts.get("num_experts") is None:
        return True
    return 0 in expand_layer_pattern(facts.get("moe_layer_freq", 1), facts["num_layers"])


def expand_layer_pattern(pattern: int | list[int], num_layers: int) -> list[int]:
    """One 0 or 1 per layer; an integer N stands for every N-th layer, from the first."""
    if isinstance(pattern, list):
        return pattern
    return [int(layer % pattern == 0) for layer in range(num_layers)]


def linear_attention_pattern(freq: int | list[int] | None, num_layers: int) -> list[int]:
    """1 per layer with linear attention; an integer N stands for another kind in every N-th layer."""
    if isinstance(freq, list):
        return freq
    return [int(freq is not None and (layer + 1) % freq != 0) for layer in range(num_layers)]


def _heads(text: dict[str, Any]) -> dict[str, Any]:
    heads = text.get("num_attention_heads")
    if heads is None:
        return {}
    facts: dict[str, Any] = {"group_query_attention": text.get("num_key_value_heads", heads) != heads}
    size = text.get("head_dim")
    if size is None and text.get("model_type") in _GROUPED_ATTENTION:
        size = text["hidden_size"] // heads
    if size is not None:
        facts["kv_channels"] = size
    return facts


def _latent_attention(text: dict[str, Any]) -> dict[str, Any]:
    """Multi-latent attention: heads of their own sizes, one compressed vector of keys and values."""
    facts = {attribute: text.get(key) for key, attribute in _LATENT_SAME_MEANING.items()}
    return {**facts, "multi_latent_attention": True, "group_query_attention": False}


def _decoder(text: dict[str, Any]) -> dict[str, Any]:
    kind = text["model_type"]
    return {
        "normalization": "RMSNorm",
        "swiglu": text.get("hidden_act", "silu") == "silu",
        "add_bias_linear": False,
        "add_qkv_bias": kind in _QKV_BIAS or bool(text.get("attention_bias", False)),
        "qk_layernorm": kind in _QK_NORM or kind in LATENT_ATTENTION or bool(text.get("use_qk_norm", False)),
        "qk_layernorm_over_heads": kind == "minimax_m2",
        "multi_latent_attention": kind in LATENT_ATTENTION,
        "position_embedding_type": "rope",
        "post_self_attn_layernorm": kind == "glm4",
        "post_mlp_layernorm": kind == "glm4",
        "attention_dropout": text.get("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
    }


def _gated_delta_net(text: dict[str, Any]) -> dict[str, Any]:
    """Qwen3-Next and Qwen3.5: gated softmax attention in every N-th layer, norms whose weights count from one."""
    interval = text.get("full_attention_interval", 4)
    kinds = text.get("layer_types")
    pattern = [int(kind == "linear_attention") for kind in kinds] if kinds else None
    regular = pattern is None or pattern == linear_attention_pattern(interval, len(pattern))
    facts = {key: text[key] for key in _LINEAR_ATTENTION if key in text}
    return {
        **facts,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": interval if regular else pattern,
        "attention_output_gate": True,
        "apply_layernorm_1p": True,
    }


def _plugin_facts(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    from slime_plugins.models import find_model_plugin

    plugin = find_model_plugin(kind)
    facts = getattr(plugin, "config_facts", None)
    return facts(config) if facts is not None else {}
