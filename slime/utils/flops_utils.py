"""Estimate of the floating-point operations of a forward pass, to balance work and to report TFLOP/s.

One multiply-add counts as two operations. Norms, activations and the embedding look-up are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slime.utils.arguments.hf_facts import linear_attention_pattern


def calculate_embedding_flops(seqlen: int, hidden_size: int) -> int:
    """A look-up does no arithmetic worth counting."""
    return 0


def calculate_lm_head_flops(seqlen: int, hidden_size: int, vocab_size: int) -> int:
    return 2 * seqlen * hidden_size * vocab_size


def calculate_qkv_projection_flops(
    args: Any, seqlen: int, hidden_size: int, num_attention_heads: int, num_query_groups: int
) -> int:
    """The query, key and value projections; with `args.multi_latent_attention`, the low-rank ones of DeepSeek-V2."""
    if getattr(args, "multi_latent_attention", False):
        return 2 * seqlen * _mla_projection_size(args, hidden_size, num_attention_heads)
    queries = num_attention_heads * (2 if getattr(args, "attention_output_gate", False) else 1)
    return 2 * seqlen * hidden_size * args.kv_channels * (queries + 2 * num_query_groups)


def _mla_projection_size(args: Any, hidden_size: int, num_attention_heads: int) -> int:
    query_dim = num_attention_heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)
    rank = args.q_lora_rank
    query = hidden_size * query_dim if rank is None else rank * (hidden_size + query_dim)
    down = hidden_size * (args.kv_lora_rank + args.qk_pos_emb_head_dim)
    up = args.kv_lora_rank * num_attention_heads * (args.qk_head_dim + args.v_head_dim)
    return query + down + up


def calculate_attention_flops(args: Any, seqlen: int, num_attention_heads: int) -> int:
    """Scores and weighted values of causal attention: half of the square."""
    if getattr(args, "multi_latent_attention", False):
        score_dim, value_dim = args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    else:
        score_dim = value_dim = args.kv_channels
    return seqlen * seqlen * num_attention_heads * (score_dim + value_dim)


def calculate_output_flops(seqlen: int, hidden_size: int, attention_size: int | None = None) -> int:
    """The projection from the heads (`attention_size` in all, default the hidden size) back to the hidden size."""
    return 2 * seqlen * (hidden_size if attention_size is None else attention_size) * hidden_size


def calculate_mlp_flops(seqlen: int, hidden_size: int, ffn_hidden_size: int, matrices: int = 3) -> int:
    """`matrices` is 3 for a gated unit (gate, up, down), 2 for a plain one."""
    return 2 * seqlen * matrices * hidden_size * ffn_hidden_size


def calculate_delta_net_flops(args: Any, seqlen: int, hidden_size: int, chunk: int = 64) -> int:
    """A gated delta net in place of attention, with the chunked form's work between the tokens of a chunk."""
    keys, values = args.linear_num_key_heads, args.linear_num_value_heads
    key_dim, value_dim = args.linear_key_head_dim, args.linear_value_head_dim
    channels = 2 * keys * key_dim + values * value_dim
    projections = hidden_size * (channels + values * (value_dim + 2)) + values * value_dim * hidden_size
    convolution = channels * args.linear_conv_kernel_dim
    # per token and head: half a chunk of scores (twice), of a triangular solve and of values; three uses of the state
    rule = values * (chunk * (3 * key_dim + 2 * value_dim) // 2 + 3 * key_dim * value_dim)
    return 2 * seqlen * (projections + convolution + rule)


def calculate_layer_flops(
    args: Any, seqlen: int, hidden_size: int, num_attention_heads: int, num_query_groups: int, ffn_hidden_size: int
) -> int:
    """One transformer layer whose MLP is `ffn_hidden_size` wide."""
    return calculate_mixer_flops(
        args, seqlen, hidden_size, num_attention_heads, num_query_groups
    ) + calculate_mlp_flops(seqlen, hidden_size, ffn_hidden_size, 3 if getattr(args, "swiglu", True) else 2)


def calculate_mixer_flops(
    args: Any, seqlen: int, hidden_size: int, num_attention_heads: int, num_query_groups: int
) -> int:
    """The attention of one layer with its projections."""
    head_dim = args.v_head_dim if getattr(args, "multi_latent_attention", False) else args.kv_channels
    return (
        calculate_qkv_projection_flops(args, seqlen, hidden_size, num_attention_heads, num_query_groups)
        + calculate_attention_flops(args, seqlen, num_attention_heads)
        + calculate_output_flops(seqlen, hidden_size, num_attention_heads * head_dim)
    )


def calculate_fwd_flops(seqlens: Iterable[int], args: Any) -> int:
    """Forward pass over whole sequences of these lengths, all layers and the language-model head.

    Reads the architecture from `args`: num_layers, hidden_size, num_attention_heads, num_query_groups, kv_channels,
    ffn_hidden_size, padded_vocab_size or vocab_size, and for mixtures of experts num_experts, moe_layer_freq,
    moe_ffn_hidden_size, moe_router_topk, moe_shared_expert_intermediate_size; for gated delta nets
    linear_attention_freq and the sizes of their heads.
    """
    heads = args.num_attention_heads
    groups = getattr(args, "num_query_groups", None) or heads
    vocab = getattr(args, "padded_vocab_size", None) or args.vocab_size
    widths = _mlp_widths(args)
    linear = sum(linear_attention_pattern(getattr(args, "linear_attention_freq", None), args.num_layers))
    matrices = 3 if getattr(args, "swiglu", True) else 2
    total = 0
    for seqlen in seqlens:
        total += calculate_lm_head_flops(seqlen, args.hidden_size, vocab)
        attention = calculate_mixer_flops(args, seqlen, args.hidden_size, heads, groups)
        total += (args.num_layers - linear) * attention
        if linear:
            total += linear * calculate_delta_net_flops(args, seqlen, args.hidden_size)
        for width, layers in widths.items():
            total += layers * calculate_mlp_flops(seqlen, args.hidden_size, width, matrices)
    return total


def _mlp_widths(args: Any) -> dict[int, int]:
    """{MLP width that a token passes through: number of layers with it}."""
    if not getattr(args, "num_experts", None):
        return {args.ffn_hidden_size: args.num_layers}
    active = (args.moe_ffn_hidden_size or args.ffn_hidden_size) * args.moe_router_topk
    active += getattr(args, "moe_shared_expert_intermediate_size", None) or 0
    moe_layers = _count_moe_layers(getattr(args, "moe_layer_freq", 1), args.num_layers)
    widths = {active: moe_layers}
    if moe_layers < args.num_layers:
        widths[args.ffn_hidden_size] = widths.get(args.ffn_hidden_size, 0) + args.num_layers - moe_layers
    return widths


def _count_moe_layers(freq: int | list[int], num_layers: int) -> int:
    if isinstance(freq, int):
        return len(range(0, num_layers, freq))
    return sum(freq)
