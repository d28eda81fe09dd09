"""MiniMax-M2: experts in every layer, a sigmoid router with a bias, norms over all heads together."""

from __future__ import annotations

from slime.backends.megatron_utils.families.blocks import (
    ATTENTION,
    EMBEDDINGS,
    EXPERT_BIAS,
    EXPERTS,
    PRE_MLP_NORM,
    QK_NORM,
)
from slime.backends.megatron_utils.families.table import Family, renamed

_NAMES = {
    ".mlp.gate.e_score_correction_bias": ".block_sparse_moe.e_score_correction_bias",
    ".mlp.": ".block_sparse_moe.",
    ".gate_proj.": ".w1.",
    ".up_proj.": ".w3.",
    ".down_proj.": ".w2.",
}

MINIMAX_M2 = Family(
    ("minimax_m2",),
    EMBEDDINGS + ATTENTION + QK_NORM + PRE_MLP_NORM + renamed(EXPERTS + EXPERT_BIAS, _NAMES),
)
