"""GLM-4 (dense, norms before and after each block) and GLM-4.5, 4.6, 4.7 (mixture of experts)."""

from __future__ import annotations

from slime.backends.megatron_utils.families.blocks import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDINGS,
    EXPERT_BIAS,
    EXPERTS,
    FUSED_DENSE_MLP,
    MTP_AFTER_LAYERS,
    PRE_MLP_NORM,
    QK_NORM,
    QKV_BIAS,
    mtp_after_layers,
    shared_experts,
)
from slime.backends.megatron_utils.families.table import Family, Weight

_POST_NORMS = (
    Weight(
        "decoder.layers.{layer}.post_self_attn_layernorm.weight",
        "model.layers.{layer}.post_self_attn_layernorm.weight",
    ),
    Weight("decoder.layers.{layer}.post_mlp_layernorm.weight", "model.layers.{layer}.post_mlp_layernorm.weight"),
)
_MOE_ATTENTION = ATTENTION + QKV_BIAS + QK_NORM + PRE_MLP_NORM
_MOE_MLP = EXPERTS + EXPERT_BIAS + shared_experts("shared_experts")

GLM4 = Family(("glm4",), EMBEDDINGS + ATTENTION + QKV_BIAS + PRE_MLP_NORM + FUSED_DENSE_MLP + _POST_NORMS)
GLM4_MOE = Family(
    ("glm4_moe",),
    EMBEDDINGS + _MOE_ATTENTION + DENSE_MLP + _MOE_MLP + mtp_after_layers(_MOE_ATTENTION + _MOE_MLP),
    mtp_hf=MTP_AFTER_LAYERS,
)
