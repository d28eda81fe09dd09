"""Qwen2, Qwen2.5 and Qwen3, dense and with experts."""

from __future__ import annotations

from slime.backends.megatron_utils.families.blocks import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDINGS,
    EXPERTS,
    PRE_MLP_NORM,
    QK_NORM,
    QKV_BIAS,
    shared_experts,
)
from slime.backends.megatron_utils.families.table import Family

QWEN2 = Family(("qwen2",), EMBEDDINGS + ATTENTION + QKV_BIAS + PRE_MLP_NORM + DENSE_MLP)
QWEN3 = Family(("qwen3",), EMBEDDINGS + ATTENTION + QK_NORM + PRE_MLP_NORM + DENSE_MLP)
QWEN3_MOE = Family(("qwen3_moe",), EMBEDDINGS + ATTENTION + QK_NORM + PRE_MLP_NORM + DENSE_MLP + EXPERTS)
QWEN2_MOE = Family(
    ("qwen2_moe",),
    EMBEDDINGS
    + ATTENTION
    + QKV_BIAS
    + PRE_MLP_NORM
    + DENSE_MLP
    + EXPERTS
    + shared_experts("shared_expert", gated=True),
)
