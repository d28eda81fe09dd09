"""MiMo: Qwen2 with multi-token-prediction layers."""

from __future__ import annotations

from slime.backends.megatron_utils.families.blocks import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDINGS,
    PRE_MLP_NORM,
    QKV_BIAS,
    mtp_inner_layer,
)
from slime.backends.megatron_utils.families.layout import SwappedHalves
from slime.backends.megatron_utils.families.table import Family, Weight

_LAYER = ATTENTION + QKV_BIAS + PRE_MLP_NORM + DENSE_MLP
_OURS, _THEIRS = "mtp.layers.{mtp}.", "model.mtp_layers.{mtp}."

MIMO = Family(
    ("mimo",),
    (
        *EMBEDDINGS,
        *_LAYER,
        *mtp_inner_layer(_LAYER, _THEIRS),
        Weight(_OURS + "enorm.weight", _THEIRS + "token_layernorm.weight"),
        Weight(_OURS + "hnorm.weight", _THEIRS + "hidden_layernorm.weight"),
        # Megatron joins the embedding and the hidden state, MiMo the hidden state and the embedding
        Weight(_OURS + "eh_proj.weight", _THEIRS + "input_proj.weight", SwappedHalves()),
        Weight(_OURS + "final_layernorm.weight", _THEIRS + "final_layernorm.weight"),
    ),
    mtp_hf=r"model\.mtp_layers\.",
)
