"""Mixtures of experts of a Hugging Face config.json, in the terms of Megatron's flags."""

from __future__ import annotations

from typing import Any

from slime.utils.arguments.errors import ConfigError

# DeepSeek-V3's router: sigmoid scores, a bias that chooses experts and does not weigh them, groups of experts
_SIGMOID_ROUTER = frozenset({"deepseek_v3", "glm4_moe", "glm4_moe_lite", "kimi_k2"})
# the chosen experts' weights always add up to one, which the config does not say
_ALWAYS_NORMED = frozenset({"qwen3_5_moe_text"})
_COMMON = {
    "moe_router_load_balancing_type": ["none"],
    "moe_aux_loss_coeff": [0.0],
    "moe_router_dtype": "fp32",
}


def expert_facts(text: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Which layers have experts, and how a token is routed.

    Raises:
        ConfigError: a router that megatron-core doesn't have.
    """
    if text.get("model_type") == "minimax_m2":
        width = {"moe_ffn_hidden_size": text["intermediate_size"], "moe_layer_freq": 1}
        return {**_COMMON, **width, **_sigmoid_router(text)}
    if text.get("model_type") in _SIGMOID_ROUTER:
        return {**_COMMON, **_layers_after_dense(text, num_layers), **_sigmoid_router(text)}
    return {
        **_COMMON,
        **_sparse_steps(text, num_layers),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not text.get("norm_topk_prob", text.get("model_type") in _ALWAYS_NORMED),
        "moe_router_enable_expert_bias": False,
    }


def shared_expert_facts(text: dict[str, Any]) -> dict[str, Any]:
    """The experts that every token passes: of a width of their own (Qwen), or so many of the usual width."""
    width = text.get("shared_expert_intermediate_size")
    if width:
        return {"moe_shared_expert_intermediate_size": width, "moe_shared_expert_gate": True}
    count = text.get("n_shared_experts")
    if count:
        width = count * text["moe_intermediate_size"]
        return {"moe_shared_expert_intermediate_size": width, "moe_shared_expert_gate": False}
    return {}


def _sparse_steps(text: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Qwen: experts in every `decoder_sparse_step`-th layer but those listed as dense."""
    step, dense = text.get("decoder_sparse_step", 1), text.get("mlp_only_layers") or []
    return _pattern([int(layer not in dense and (layer + 1) % step == 0) for layer in range(num_layers)])


def _layers_after_dense(text: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """DeepSeek and GLM: dense layers first, then experts in every layer; some configs list the layers' kinds."""
    if text.get("moe_layer_freq", 1) != 1:
        raise ConfigError(f"config.json: moe_layer_freq {text['moe_layer_freq']} is not supported, only 1")
    kinds = text.get("mlp_layer_types")
    if kinds is not None:
        return _pattern([int(kind == "sparse") for kind in kinds])
    dense = text.get("first_k_dense_replace", 1)
    return _pattern([int(layer >= dense) for layer in range(num_layers)])


def _pattern(layers: list[int]) -> dict[str, Any]:
    return {"moe_layer_freq": 1 if all(layers) else layers}


def _sigmoid_router(text: dict[str, Any]) -> dict[str, Any]:
    if text.get("scoring_func", "sigmoid") != "sigmoid":
        raise ConfigError(f"config.json: scoring_func {text['scoring_func']!r} is not supported, only 'sigmoid'")
    top = text["num_experts_per_tok"]
    if not text.get("norm_topk_prob", True) and top > 1:
        raise ConfigError("config.json: norm_topk_prob false is not supported with sigmoid scores")
    groups, chosen = text.get("n_group") or 1, text.get("topk_group") or 1
    # megatron-core rates a group by its best topk / topk_group experts, the published models by its best two
    if groups > 1 and top // chosen != 2:
        raise ConfigError(
            f"config.json: num_experts_per_tok {top} with topk_group {chosen} is not supported: the first must be "
            "twice the second"
        )
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # the bias stays as it was trained
        "moe_router_topk_scaling_factor": text.get("routed_scaling_factor", 1.0),
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": chosen if groups > 1 else None,
    }
