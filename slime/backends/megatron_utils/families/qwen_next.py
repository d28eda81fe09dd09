"""Qwen3-Next and Qwen3.5: gated softmax attention in every fourth layer, gated delta nets in the others."""

from __future__ import annotations

from slime.backends.megatron_utils.families.blocks import (
    DENSE_MLP,
    EMBEDDINGS,
    EXPERTS,
    PRE_MLP_NORM,
    QK_NORM,
    shared_experts,
)
from slime.backends.megatron_utils.families.layout import COLUMN_PARALLEL, ROW_PARALLEL
from slime.backends.megatron_utils.families.linear_attention import GATED_QKV_PARALLEL, KeyHeads
from slime.backends.megatron_utils.families.table import Family, Weight

_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."
_ATTENTION, _LINEAR = _M + "self_attention.", _H + "linear_attn."

_MIXERS = (
    Weight(
        (
            _M + "input_layernorm.weight",
            _ATTENTION + "linear_qkv.layer_norm_weight",
            _ATTENTION + "in_proj.layer_norm_weight",
        ),
        _H + "input_layernorm.weight",
    ),
    Weight(
        _ATTENTION + "linear_qkv.weight", tuple(f"{_H}self_attn.{x}_proj.weight" for x in "qkv"), GATED_QKV_PARALLEL
    ),
    Weight(_ATTENTION + "linear_proj.weight", _H + "self_attn.o_proj.weight", ROW_PARALLEL),
    *QK_NORM,
    Weight(_ATTENTION + "conv_weight", _LINEAR + "conv1d.weight", KeyHeads(tensors=("qkv",))),
    Weight(_ATTENTION + "A_log", _LINEAR + "A_log", COLUMN_PARALLEL),
    Weight(_ATTENTION + "dt_bias", _LINEAR + "dt_bias", COLUMN_PARALLEL),
    Weight(_ATTENTION + "norm_weight", _LINEAR + "norm.weight"),
    Weight(_ATTENTION + "out_proj.weight", _LINEAR + "out_proj.weight", ROW_PARALLEL),
)
_REST = EMBEDDINGS + _MIXERS + PRE_MLP_NORM + DENSE_MLP + EXPERTS + shared_experts("shared_expert", gated=True)

QWEN3_NEXT = Family(
    ("qwen3_next",),
    (
        Weight(
            _ATTENTION + "in_proj.weight",
            (_LINEAR + "in_proj_qkvz.weight", _LINEAR + "in_proj_ba.weight"),
            KeyHeads(tensors=("qkvz", "ba"), stacked=False),
        ),
        *_REST,
    ),
)
QWEN3_5_TEXT = Family(
    ("qwen3_5_text", "qwen3_5_moe_text"),
    (
        Weight(
            _ATTENTION + "in_proj.weight",
            tuple(f"{_LINEAR}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
            KeyHeads(tensors=("qkv", "z", "b", "a")),
        ),
        *_REST,
    ),
)
