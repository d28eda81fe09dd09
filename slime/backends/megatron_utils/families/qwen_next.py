"""Qwen3-Next and Qwen3.5: gated softmax attention in every fourth layer, gated delta nets in the others."""

from __future__ import annotations

from slime.backends.megatron_utils.families.blocks import (
    DENSE_MLP,
    EMBEDDINGS,
    EXPERTS,
    PRE_MLP_NORM,
    QK_NORM,
    STACKED_EXPERTS,
    mtp_inner_layer,
    shared_experts,
)
from slime.backends.megatron_utils.families.layout import COLUMN_PARALLEL, ROW_PARALLEL
from slime.backends.megatron_utils.families.linear_attention import GATED_QKV_PARALLEL, KeyHeads
from slime.backends.megatron_utils.families.table import Family, Weight, renamed
from slime.backends.megatron_utils.families.vision import VISION_TOWER

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
_MLP = PRE_MLP_NORM + DENSE_MLP + shared_experts("shared_expert", gated=True)
_NEXT_IN_PROJ = Weight(
    _ATTENTION + "in_proj.weight",
    (_LINEAR + "in_proj_qkvz.weight", _LINEAR + "in_proj_ba.weight"),
    KeyHeads(tensors=("qkvz", "ba"), stacked=False),
)
_IN_PROJ = Weight(
    _ATTENTION + "in_proj.weight",
    tuple(f"{_LINEAR}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
    KeyHeads(tensors=("qkv", "z", "b", "a")),
)


def _rows(in_proj: Weight, experts: tuple[Weight, ...], prefix: str = "model.") -> tuple[Weight, ...]:
    """The whole model. One multi-token-prediction layer at most; it stands beside the text model of a vision model."""
    layer = (in_proj, *_MIXERS, *_MLP, *experts)
    ours = "mtp.layers.0."
    return (
        *renamed(EMBEDDINGS + layer, {"model.": prefix}),
        *mtp_inner_layer(layer, "mtp.layers.{mtp}."),
        Weight(ours + "enorm.weight", "mtp.pre_fc_norm_embedding.weight"),
        Weight(ours + "hnorm.weight", "mtp.pre_fc_norm_hidden.weight"),
        Weight(ours + "eh_proj.weight", "mtp.fc.weight", COLUMN_PARALLEL),
        Weight(ours + "final_layernorm.weight", "mtp.norm.weight"),
    )


_MTP, _VISION, _TEXT = r"mtp\.", (r"model\.visual\.",), "model.language_model."

QWEN3_NEXT = Family(("qwen3_next",), _rows(_NEXT_IN_PROJ, EXPERTS), mtp_hf=_MTP)
QWEN3_5_TEXT = Family(("qwen3_5_text", "qwen3_5_moe_text"), _rows(_IN_PROJ, EXPERTS), mtp_hf=_MTP)
# A text model with a vision tower, which the trainer leaves as it is unless it trains on images.
QWEN3_5 = Family(
    ("qwen3_5", "qwen3_5_moe"),
    _rows(_IN_PROJ, EXPERTS, _TEXT) + VISION_TOWER,
    mtp_hf=_MTP,
    kept_hf=_VISION,
    stacked=Family(
        ("qwen3_5_moe",), _rows(_IN_PROJ, STACKED_EXPERTS, _TEXT) + VISION_TOWER, mtp_hf=_MTP, kept_hf=_VISION
    ),
)
