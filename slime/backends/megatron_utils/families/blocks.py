"""Rows that many families share, grouped by the part of the model."""

from __future__ import annotations

import dataclasses

from slime.backends.megatron_utils.families.layout import (
    COLUMN_PARALLEL,
    FUSED_GATE_UP_PARALLEL,
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

INPUT_NORM = (
    Weight(
        (_M + "input_layernorm.weight", _M + "self_attention.linear_qkv.layer_norm_weight"),
        _H + "input_layernorm.weight",
    ),
)

ATTENTION = (
    *INPUT_NORM,
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

FUSED_DENSE_MLP = (
    Weight(_M + "mlp.linear_fc1.weight", _H + "mlp.gate_up_proj.weight", FUSED_GATE_UP_PARALLEL),
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

# the same, of a checkpoint whose tensors hold all experts of a layer
STACKED_EXPERTS = (
    EXPERTS[0],
    dataclasses.replace(
        EXPERTS[1], hf=_H + "mlp.experts.gate_up_proj", layout=FUSED_GATE_UP_PARALLEL, stacked_experts=True
    ),
    dataclasses.replace(EXPERTS[2], hf=_H + "mlp.experts.down_proj", stacked_experts=True),
)

# the router's bias that balances the load (DeepSeek-V3); it chooses experts and does not weigh them
EXPERT_BIAS = (Weight(_M + "mlp.router.expert_bias", _H + "mlp.gate.e_score_correction_bias"),)

# multi-latent attention (DeepSeek-V2): queries with or without a low rank, keys and values from one compressed vector
LATENT_ATTENTION = (
    *INPUT_NORM,
    Weight(_M + "self_attention.linear_q_proj.weight", _H + "self_attn.q_proj.weight", COLUMN_PARALLEL),
    Weight(_M + "self_attention.linear_q_down_proj.weight", _H + "self_attn.q_a_proj.weight"),
    Weight(
        (_M + "self_attention.q_layernorm.weight", _M + "self_attention.linear_q_up_proj.layer_norm_weight"),
        _H + "self_attn.q_a_layernorm.weight",
    ),
    Weight(_M + "self_attention.linear_q_up_proj.weight", _H + "self_attn.q_b_proj.weight", COLUMN_PARALLEL),
    Weight(_M + "self_attention.linear_kv_down_proj.weight", _H + "self_attn.kv_a_proj_with_mqa.weight"),
    Weight(
        (_M + "self_attention.kv_layernorm.weight", _M + "self_attention.linear_kv_up_proj.layer_norm_weight"),
        _H + "self_attn.kv_a_layernorm.weight",
    ),
    Weight(_M + "self_attention.linear_kv_up_proj.weight", _H + "self_attn.kv_b_proj.weight", COLUMN_PARALLEL),
    Weight(_M + "self_attention.linear_proj.weight", _H + "self_attn.o_proj.weight", ROW_PARALLEL),
)


def shared_experts(name: str, *, gated: bool = False) -> tuple[Weight, ...]:
    """Rows of the experts that every token passes, called `name` in the checkpoint, and of their gate."""
    ours, theirs = _M + "mlp.shared_experts.", f"{_H}mlp.{name}"
    gate = (Weight(ours + "gate_weight", f"{theirs}_gate.weight"),) if gated else ()
    return (
        Weight(
            ours + "linear_fc1.weight",
            (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight"),
            GATE_UP_PARALLEL,
        ),
        Weight(ours + "linear_fc2.weight", f"{theirs}.down_proj.weight", ROW_PARALLEL),
        *gate,
    )


# where tensors of multi-token-prediction layers stand that are numbered on after the last layer
MTP_AFTER_LAYERS = r"model\.layers\.(?P<layer>\d+)\."


def mtp_inner_layer(layer_rows: tuple[Weight, ...], theirs: str) -> tuple[Weight, ...]:
    """The decoder layer in a multi-token-prediction layer, whose tensors' names begin with `theirs`."""
    ours = "mtp.layers.{mtp}.transformer_layer."
    return tuple(
        dataclasses.replace(
            row,
            megatron=tuple(name.replace(_M, ours) for name in row.megatron_names),
            hf=tuple(name.replace(_H, theirs) for name in row.hf_names),
        )
        for row in layer_rows
    )


def mtp_after_layers(layer_rows: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """Rows of multi-token-prediction layers that are numbered on after the last layer, as DeepSeek-V3 has them.

    Such a layer is one of the model's layers (`layer_rows`) behind a projection of the embedding and the last hidden
    state. The checkpoint's copies of the embedding and the output layer in it are the model's own.
    """
    ours, theirs = "mtp.layers.{mtp}.", "model.layers.{mtp_layer}."
    return (
        *mtp_inner_layer(layer_rows, theirs),
        Weight(ours + "enorm.weight", theirs + "enorm.weight"),
        Weight(ours + "hnorm.weight", theirs + "hnorm.weight"),
        Weight(ours + "eh_proj.weight", theirs + "eh_proj.weight", COLUMN_PARALLEL),
        Weight(ours + "final_layernorm.weight", theirs + "shared_head.norm.weight"),
    )
