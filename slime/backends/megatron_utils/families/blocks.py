"""Rows that many families share, grouped by the part of the model."""

from __future__ import annotations

from slime.backends.megatron_utils.families.layout import (
    COLUMN_PARALLEL,
    GATE_UP_PARALLEL,
    QKV_PARALLEL,
    ROW_PARALLEL,
)
from slime.backends.megatron_utils.families.table import EMBEDDING, OUTPUT_LAYER, Weight

_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."
_QKV = tuple(f"{_H}self_attn.{x}_proj" for x in "qkv")

EMBEDDINGS = (
    Weight(EMBEDDING, "model.embed_tokens.weight", COLUMN_PARALLEL, vocab_rows=True),
    Weight("decoder.final_layernorm.weight", "model.norm.weight"),
    Weight(OUTPUT_LAYER, "lm_head.weight", COLUMN_PARALLEL, vocab_rows=True),
)

ATTENTION = (
    Weight(
        (_M + "input_layernorm.weight", _M + "self_attention.linear_qkv.layer_norm_weight"),
        _H + "input_layernorm.weight",
    ),
    Weight(_M + "self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in _QKV), QKV_PARALLEL),
    Weight(_M + "self_attention.linear_proj.weight", _H + "self_attn.o_proj.weight", ROW_PARALLEL),
)

QKV_BIAS = (Weight(_M + "self_attention.linear_qkv.bias", tuple(f"{name}.bias" for name in _QKV), QKV_PARALLEL),)

QK_NORM = (
    Weight(_M + "self_attention.q_layernorm.weight", _H + "self_attn.q_norm.weight"),
    Weight(_M + "self_attention.k_layernorm.weight", _H + "self_attn.k_norm.weight"),
)

PRE_MLP_NORM = (
    Weight(
        (_M + "pre_mlp_layernorm.weight", _M + "mlp.linear_fc1.layer_norm_weight"),
        _H + "post_attention_layernorm.weight",
    ),
)

DENSE_MLP = (
    Weight(
        _M + "mlp.linear_fc1.weight",
        (_H + "mlp.gate_proj.weight", _H + "mlp.up_proj.weight"),
        GATE_UP_PARALLEL,
    ),
    Weight(_M + "mlp.linear_fc2.weight", _H + "mlp.down_proj.weight", ROW_PARALLEL),
)

EXPERTS = (
    Weight(_M + "mlp.router.weight", _H + "mlp.gate.weight"),
    Weight(
        (
            _M + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
            _M + "mlp.experts.linear_fc1.weight{expert}",
        ),
        (_H + "mlp.experts.{expert}.gate_proj.weight", _H + "mlp.experts.{expert}.up_proj.weight"),
        GATE_UP_PARALLEL,
    ),
    Weight(
        (
            _M + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
            _M + "mlp.experts.linear_fc2.weight{expert}",
        ),
        _H + "mlp.experts.{expert}.down_proj.weight",
        ROW_PARALLEL,
    ),
)
