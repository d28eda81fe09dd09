"""What a Hugging Face config.json says about a model, in the terms of Megatron's flags."""

from __future__ import annotations

from typing import Any

# Facts that are a choice of training rather than of the architecture: a different value on the command line is fine.
TRAINING_CHOICES = frozenset(
    {
        "attention_dropout",
        "hidden_dropout",
        "max_position_embeddings",
        "moe_aux_loss_coeff",
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
    "num_attention_heads": "num_attention_heads",
    "num_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "num_query_groups",
    "rms_norm_eps": "norm_epsilon",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "vocab_size": "vocab_size",
}
_QK_NORM = frozenset({"qwen3", "qwen3_moe"})
_QKV_BIAS = frozenset({"qwen2", "qwen2_moe"})
_PLAIN_DECODERS = frozenset({"llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})


def config_from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """Attributes that the config decides; what it doesn't say is left out.

    Args:
        config: the content of config.json. A nested `text_config` is used where there is one.
    """
    text = config.get("text_config") or config
    facts = {attribute: text[key] for key, attribute in _SAME_MEANING.items() if text.get(key) is not None}
    if "tie_word_embeddings" in text or "tie_word_embeddings" in config:
        tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
        facts["untie_embeddings_and_output_weights"] = not tied
    facts.update(_heads(text))
    facts.update(_rotary(text))
    if text.get("model_type") in _PLAIN_DECODERS:
        facts.update(_plain_decoder(text))
    if "num_experts" in facts:
        facts.update(_experts(text, facts))
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


def _heads(text: dict[str, Any]) -> dict[str, Any]:
    heads = text.get("num_attention_heads")
    if heads is None:
        return {}
    facts: dict[str, Any] = {"group_query_attention": text.get("num_key_value_heads", heads) != heads}
    size = text.get("head_dim")
    if size is None and text.get("model_type") in _PLAIN_DECODERS:
        size = text["hidden_size"] // heads
    if size is not None:
        facts["kv_channels"] = size
    return facts


def _rotary(text: dict[str, Any]) -> dict[str, Any]:
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    facts: dict[str, Any] = {}
    base = rope.get("rope_theta", text.get("rope_theta"))
    if base is not None:
        facts["rotary_base"] = base
    if rope.get("rope_type", rope.get("type")) == "llama3":
        facts["use_rope_scaling"] = True
        facts["rope_scaling_factor"] = rope["factor"]
    return facts


def _plain_decoder(text: dict[str, Any]) -> dict[str, Any]:
    kind = text["model_type"]
    return {
        "normalization": "RMSNorm",
        "swiglu": text.get("hidden_act", "silu") == "silu",
        "add_bias_linear": False,
        "add_qkv_bias": kind in _QKV_BIAS or bool(text.get("attention_bias", False)),
        "qk_layernorm": kind in _QK_NORM,
        "position_embedding_type": "rope",
        "attention_dropout": text.get("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
    }


def _experts(text: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Qwen's kinds of mixture: softmax router, experts in every `decoder_sparse_step`-th layer."""
    step, dense = text.get("decoder_sparse_step", 1), text.get("mlp_only_layers") or []
    layers = range(facts["num_layers"])
    pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in layers]
    return {
        "moe_layer_freq": 1 if all(pattern) else pattern,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not text.get("norm_topk_prob", False),
        "moe_router_load_balancing_type": ["none"],
        "moe_aux_loss_coeff": [0.0],
        "moe_router_dtype": "fp32",
    }
