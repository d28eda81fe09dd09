"""DeepSeek-V3 and R1, and models of the same shape: Kimi-K2, Moonlight, GLM-4.7-Flash."""

from __future__ import annotations

from slime.backends.megatron_utils.families.blocks import (
    DENSE_MLP,
    EMBEDDINGS,
    EXPERT_BIAS,
    EXPERTS,
    LATENT_ATTENTION,
    MTP_AFTER_LAYERS,
    PRE_MLP_NORM,
    mtp_after_layers,
    shared_experts,
)
from slime.backends.megatron_utils.families.table import Family

_ATTENTION = LATENT_ATTENTION + PRE_MLP_NORM
_MOE_MLP = EXPERTS + EXPERT_BIAS + shared_experts("shared_experts")

DEEPSEEK_V3 = Family(
    ("deepseek_v3", "kimi_k2", "glm4_moe_lite"),
    EMBEDDINGS + _ATTENTION + DENSE_MLP + _MOE_MLP + mtp_after_layers(_ATTENTION + _MOE_MLP),
    mtp_hf=MTP_AFTER_LAYERS,
)
